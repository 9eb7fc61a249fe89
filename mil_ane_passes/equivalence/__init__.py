"""Equivalence checks: the definition of "verified equivalent", the feeds, and the comparison.

The reference runtime executes both programs with PyTorch on the CPU, on the same seeded inputs: at float64, which tests
the algebra, and at float16, which rounds every value to its declared dtype (a typed run). The declared exactness of the
rewrites that fired determines the comparison:

- `bitwise`: equal bits at both precisions.
- `rounding`: float64 results agree to 1e-9 of the output's largest value. The error of a float16 result, compared with
  the float64 result, is at most four times the worst error of the program before, plus one unit in the last place.
- `approximate`: the error is reported.

The final value of a state counts as an output.

Both programs run side by side (`lockstep`). An op of the second program reuses the result of an op of the first if the
two have equal types, constants and nested blocks, and their operands have the same bits. So ops that no rewrite changed
run once, and so do the ops downstream of a changed region whose results have the same bits. In runs at float64, such
shared ops are run at float32 if they read no value in which the two programs may differ: both programs continue with
the same numbers, so the precision of these does not matter. A run that does not pass is repeated entirely at float64.
Runs on feeds of one shape are made as one batch if no op of either program mixes rows of axis 0; a run that does not
pass in the batch is repeated alone. A value is freed when neither program needs it. If both programs together exceed
the memory limit, they run one after the other.

A rewrite that fixes an overflow declares it (`fixes_nonfinite`): if the program before computes NaN or infinity, the
program after may compute a number. This number is compared with a run of the program before in which constants that
fp16 cannot hold are read as large finite numbers, because a mask of minus infinity stands for the limit of ever larger
masks. Values that were finite are judged as usual. Outputs that are computed from NaN without being NaN, such as
integers, may also equal the results of that run. A rewrite that changes a constant declares the largest change of an
output as a fraction of the output's largest value.

Ops downstream of a rewritten op may amplify the declared change, wrap it around (mod) or turn it into integers
(argmax). If a run differs, the program before is therefore run again with the rewritten ops changed as declared:

- Constants below 2^-24 are read as 2^-24 (`raises_constants`), except for elements at which an operand is exactly 0.
- Results move by `moves` times the largest value at the op (`moves_of`), or by 2^-40 of it if a rewrite only rounds.
- If operands are beyond the range of fp16 (`reach`), results move by any amount.

Each element may then differ by twice its change in these runs.

Inputs are sampled by declared type: ids within their table, pixels for images, both values of a single flag, every
enumerated shape, both ends of a range. An end of a range that is unbounded or too large to run is replaced by the
largest reasonable size.

In addition to the normal draws, adversarial feeds are run at float64 (and at float16 if `bitwise` is declared). A few
elements are extreme and the others ordinary, so that most results stay comparable:

- Float inputs: a wide range (rows x 30 and x 0.001, +-65504, +-300); NaN, infinities and zeros of both signs; ties
  (multiples of 0.5, zeros of both signs, +-6e-8, +-1e-4, rows of zeros, of one number and one-hot). For a function that
  computes more than 4 million elements, wide range and ties are the two halves of one run. For a function with a max
  pool, one in four channels or rows is below -20000 in another run.
- Integer inputs: indices from -n to n - 1, other integers from -100 to 1000, and the first and last row of every table.
  If constant tables of the two programs differ (also compressed ones), the ids of the rows that differ most, whether
  rows are gathered, sliced or multiplied by flags. If integers are compared with constants (limits of masks, lengths,
  periods), integers at, above and below up to six of these.
- Floats, also states, that only one of the programs compares with a constant (scores with a threshold, limits of clip
  and maximum): feeds are searched at which the compared value is just below and just above the constant, by moving and
  scaling all float inputs together, or every eighth element. So are feeds at which an index that is computed from
  floats (a bucket) reads a row in which a table differs. Values that need more than 256 ops, or large tensors, are left
  to the draws.
- Symbolic dimensions: 1, 2, 7, 257 if that is cheap, and the largest size that an option of a rewrite allows, all
  within the declared ranges. In normal draws they are 16 and 41.

Feeds on which the model itself cannot run are dropped. The field `sampled` of the result lists the feeds that were run.
The user's intervals (`--ranges`) limit these feeds, and so does the domain of the rewrites that fired. A rule declares
the smallest and largest magnitude of inputs for which it holds (`within`: at most 30 for a finite mask), whether NaN
and infinity reach the same results (`keeps_nonfinite`), and the error of an approximating formula in units in the last
place (`ulps`). Without `keeps_nonfinite`, a number in place of a NaN that is a sum of infinities of both signs counts
as equal if the run passes with NaN in place of the infinities. Rewrites that approximate, which no preset has, are
judged on normal draws and the user's feeds only.

The verdict is *not verified*, and nothing is written, if the runtime does not support an op, if none of the sampled
feeds can be run, or if no run entered a branch or loop body that a rewrite changed. A shape that the model itself does
not support is omitted, and the report lists it.

An equivalence check is not a proof. It does not find a difference that no sample reaches: a difference hidden by a relu
that is always zero, at one particular number, at lengths other than the tested ones, or in the rounding to fp16 of
extreme values. The rules' own tests cover these cases for each op alone. The check compares programs, and does not
cover Apple's hardware.

If two models differ, the report describes the first op whose value differs, in the order in which the second program
computes: both values, the op's operands and whether they agree, and the MIL around it. A comparison with a torch module
or a callable is a check within a tolerance: outputs pass if they differ by at most a fraction of their largest value
(1e-4, or 2e-2 with fp16 or compressed values, or `tolerance=`), and integers must be equal. At fp16, sampled masks of
zeros and ones leave each row a one, because a query whose keys are all hidden has no defined result. A classifier,
whose outputs are a label and a dictionary, cannot be compared with a callable, and user-supplied feeds are used for the
default function only.
"""
