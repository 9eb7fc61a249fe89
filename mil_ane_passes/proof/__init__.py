"""Feeds, comparison and proof: what "verified equivalent" means.

A reference runtime executes both programs with PyTorch on the CPU, on the same seeded inputs: at float64 (is the
algebra the same?) and at float16 (every value rounded to its declared dtype, as stored). What the passes that fired
promise is what is asked. `is_bitwise` means equal bits in both. For `rounding`, float64 results agree to 1e-9 of the
output's largest value, and float16 results are no further from the float64 ones than four times the worst error of
the program before, plus one unit in the last place. `approximate` reports the error. What is left in a state counts
as an output.

A rewrite that fixes an overflow says so (`fixes_nonfinite`): where the program before gives NaN or infinity, the
program after may give a number. It is held against the program before with those of its constants that fp16 cannot
hold read as large finite numbers: a mask of minus infinity stands for the limit of ever larger masks. Everything that
was finite is judged as ever. Outputs that are made of NaN without being NaN, such as integers, may be those of that
limit, too. A rewrite that changes a constant declares by which share of an output that may move it.

Ops behind a rewritten one may amplify what it declares, wrap it round (mod) or turn it into integers (argmax). So where
a run differs, the program before is run again with the ops that were rewritten changed as their rewrites declare: its
constants below 2^-24 read as 2^-24 (`raises_constants`; not where an operand is exactly 0), and results moved by
`moves` times the largest value at the op (`moves_of`), by 2^-40 of it where a rewrite only rounds, and by anything
where operands are beyond what fp16 holds (`reach`). Each element may move twice as far as it does in such runs.

Inputs are drawn per declared type: ids within their table, pixels for images, both values of a lone flag, every
enumerated shape, both ends of a range (an end that is open or too large for an equivalence check to finish is tried as
far as is reasonable).

Besides the normal draws, adversarial feeds are run at float64 (and typed, where the same bits are promised), a few
extreme elements among ordinary ones so that the rest stays comparable. Where a function has float inputs: one with a
wide range (rows x 30 and x 0.001, +-65504, +-300), one with NaN, infinities and zeros of both signs, one with ties
(multiples of 0.5, zeros of both signs, +-6e-8, +-1e-4, rows of zeros, of one number and one-hot); one that computes
more than 4 million elements gets wide range and ties as halves of one run. Where it has integer inputs: one with
indices from -n to n - 1, other integers from -100 to 1000, besides the first and the last row of every table. Symbolic
dimensions are 1, 2, 7, and 257 where that is cheap (16 and 41 in normal draws), as far as declared ranges allow, and
the largest that an option of a rewrite allows. What the model itself cannot run on is dropped. The result's `sampled`
lists what was run. Intervals that users give (`--ranges`) bound these feeds, too. So does the domain of the rewrites
that fired: a rule declares between which magnitudes of the inputs its promise holds (`within`: 30 for a finite mask),
whether NaN and infinity reach the same results (`keeps_nonfinite`), and by how many units in the last place an
approximating formula is off (`ulps`). Rewrites that approximate, which no preset has, are held to normal draws and the
user's feeds alone.

The verdict is *not verified*, and nothing is written, when an op cannot be executed here, when no drawn
input can be run, or when no run entered a branch or loop body that a rewrite changed. A shape that the model itself
does not take is left out, and the report says so.

An equivalence check by running is what it is: a difference that no draw reaches, such as one behind a relu that is
always zero, at one particular number, at lengths other than those tried, or in the rounding to fp16 of extreme values,
is not seen; the rules' own tests cover those on each op alone. And it is about the program, not about Apple's hardware.

When two models differ, the report names the first op whose value does, in the order in which the second computes:
both values, what the op reads and whether that still agrees, and the MIL around it. Beside a torch module or a
callable nothing is verified: outputs pass within a share of their largest value (1e-4, or 2e-2 with fp16 or compressed
values; or `tolerance=`), and integers have to be equal. A classifier, whose outputs are a label and a dictionary,
cannot be compared with a callable, and feeds that are given reach the default function only.
"""
