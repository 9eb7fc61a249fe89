"""Equivalence checks: the definition of "verified equivalent", the feeds, and the comparison.

A reference runtime executes both programs with PyTorch on the CPU, on the same seeded inputs: at float64 (is the
algebra the same?) and at float16 (every value rounded to its declared dtype, as stored). The declared exactness of the
passes that fired determines the comparison. `is_bitwise` means equal bits in both. For `rounding`, float64 results
agree to 1e-9 of the output's largest value, and float16 results are no further from the float64 ones than four times
the worst error of the program before, plus one unit in the last place. `approximate` reports the error. The final value
of a state counts as an output.

Both programs run side by side (`lockstep`). An op of the second that an op of the first equals, in type, constants and
nested blocks, and whose operands have the bits of that op's, takes its result: what a rewrite left alone is computed
once, and so is what follows a changed region whose results have the same bits. In runs at float64 such ops are run at
float32, as long as they read nothing in which the two may differ: both go on from the same numbers, whatever these are.
A run that does not pass is made again, at float64 throughout. Values are freed when neither program needs them. Where
both at once exceed the memory limit, they run one after the other.

A rewrite that fixes an overflow declares it (`fixes_nonfinite`): where the program before computes NaN or infinity, the
program after may compute a number. It is compared with the program before in which constants that fp16 cannot hold are
read as large finite numbers: a mask of minus infinity stands for the limit of ever larger masks. Values that were
finite are judged as usual. Outputs that are computed from NaN without being NaN, such as integers, may equal those of
that limit, too. A rewrite that changes a constant declares by which share of an output that may move it.

Ops after a rewritten one may amplify the declared change, wrap it round (mod) or turn it into integers (argmax). So
where a run differs, the program before is run again with the rewritten ops changed as their rewrites declare: its
constants below 2^-24 read as 2^-24 (`raises_constants`; not where an operand is exactly 0), and results moved by
`moves` times the largest value at the op (`moves_of`), by 2^-40 of it where a rewrite only rounds, and by any amount
where operands are beyond the range of fp16 (`reach`). Each element may move twice as far as it does in such runs.

Inputs are drawn by declared type: ids within their table, pixels for images, both values of a lone flag, every
enumerated shape, both ends of a range (an end that is unbounded or too large to run is replaced by the largest
reasonable size).

Besides the normal draws, adversarial feeds are run at float64 (and typed, where the same bits are declared), with a few
extreme elements among ordinary ones so that the rest stays comparable. Where a function has float inputs, these are:
one with a wide range (rows x 30 and x 0.001, +-65504, +-300), one with NaN, infinities and zeros of both signs, one
with ties (multiples of 0.5, zeros of both signs, +-6e-8, +-1e-4, rows of zeros, of one number and one-hot); a function
that computes more than 4 million elements gets wide range and ties as halves of one run. Where it has integer inputs:
one with indices from -n to n - 1 and other integers from -100 to 1000, besides the first and the last row of every
table; where constant tables of the two programs, compressed or not, differ, one with the ids of the rows that differ
most. Symbolic dimensions are 1, 2, 7, and 257 where that is cheap (16 and 41 in normal draws), as far as declared
ranges allow, and the largest size that an option of a rewrite allows. Feeds that the model itself cannot run on are
dropped. The result's `sampled` lists the feeds that were run. Users' intervals (`--ranges`) bound these feeds, too. So
does the domain of the rewrites that fired: a rule declares the magnitudes of the inputs between which it holds
(`within`: 30 for a finite mask), whether NaN and infinity reach the same results (`keeps_nonfinite`), and by how many
units in the last place an approximating formula is off (`ulps`). Rewrites that approximate, which no preset has, are
judged on normal draws and the user's feeds only.

The verdict is *not verified*, and nothing is written, when an op cannot be executed here, when no drawn input can be
run, or when no run entered a branch or loop body that a rewrite changed. A shape that the model itself does not support
is left out, and the report lists it.

An equivalence check is not a proof: a difference that no draw reaches, such as one hidden by a relu that is always
zero, at one particular number, at lengths other than those tried, or in the rounding to fp16 of extreme values, is not
found; the rules' own tests cover those on each op alone. It compares programs, and does not cover Apple's hardware.

When two models differ, the report names the first op whose value differs, in the order in which the second computes:
both values, the op's operands and whether they agree, and the MIL around it. Comparison with a torch module or a
callable verifies nothing: outputs pass within a share of their largest value (1e-4, or 2e-2 with fp16 or compressed
values; or `tolerance=`), and integers have to be equal. A classifier, whose outputs are a label and a dictionary,
cannot be compared with a callable, and user-supplied feeds are used for the default function only.
"""
