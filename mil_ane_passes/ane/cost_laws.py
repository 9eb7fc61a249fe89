"""Cost laws: the estimates of Core ML's segmenter on an M4 as a quantity of an op over a rate, per backend.

They are fitted to the half of the published estimates that we read
(751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/03_compile/opdispatch, commit 5cb462be; M4, macOS 27.0.1).
They give the segmenter's estimates, not the speed of an op. Where `rows` counts estimates, the rates are the
segmenter's own, to the last digit. A rate with rows = 0 was adopted from another law or read from shares of four
digits, and estimates based on it are guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "CONCAT",
    "CONV_TRANSPOSE",
    "DENSE_CONV",
    "DENSE_MIN_INTENSITY",
    "ELEMENTS",
    "GATHER",
    "HEAVY_LINEAR",
    "LIGHT_LINEAR",
    "MEASURED_OP_TYPES",
    "MEMORY",
    "MIDDLE_CONV",
    "MIDDLE_LINEAR",
    "MIDDLE_MIN_INTENSITY",
    "PEAK",
    "RECURRENT",
    "RELU",
    "SHORT_LINEAR",
    "THIN_CONV",
    "TRANSPOSE",
    "UNMEASURED_INTENSITIES",
    "CostLaw",
]


@dataclass(frozen=True)
class CostLaw:
    """Rates of the backends, in 1e9 of `quantity` a second (`giga`: in another unit).

    `rows`: the largest number of estimates of entire ops in which one backend's rate was seen.
    """

    quantity: str
    ane: float
    bnns: float
    classic: float
    rows: int
    giga: float | None = None

    def compute_ms(self, rate: float, quantity: float) -> float:
        """Milliseconds at one of the rates: the published estimates to the last bit, for the sums decide ties."""
        if self.giga is not None:
            return quantity / (rate * self.giga) * 1e3
        return quantity * 1e-9 / rate * 1e3


_MEMORY_ONLY = math.inf
"The ANE is charged for memory alone."
MEMORY = CostLaw("bytes of all inputs and the first output", 68.0, 56.666664123535156, 56.666664123535156, 84,
                 giga=2.0 ** 30)
"GiB/s; the CPU's rate is 1.2 times lower. On the CPU it is also the lower bound for a product or a pool."
PEAK = CostLaw("operations: 2 of a multiply-add, 1 of a pool's tap", _MEMORY_ONLY, 754.5433349609375, 656.0, 8)
"Seen with pools."
RELU = CostLaw("bytes of the input and the output", 100.0, 100.0, 100.0, 6, giga=1e9)
ELEMENTS = CostLaw("elements of the inputs", 17.990264892578125, 10.56109619140625, 9.181818008422852, 7)
CONCAT = CostLaw("bytes of the inputs", 100.0, 11.502184867858887, 10.0, 3)
GATHER = CostLaw("elements of the inputs, all of a table", _MEMORY_ONLY, 11.502184867858887, 10.0, 2)
TRANSPOSE = CostLaw("bytes of all inputs and the output", 68.87468719482422, 87.48632049560547, 76.06060791015625, 2)

DENSE_CONV = CostLaw("FLOPs", 16151.6767578125, 754.4927368164062, 655.9559936523438, 17)
MIDDLE_CONV = CostLaw("FLOPs", 7160.830078125, 388.0614318847656, 337.380615234375, 5)
THIN_CONV = CostLaw("FLOPs", 471.180908203125, 27.08521270751953, 23.54788589477539, 1)
DENSE_MIN_INTENSITY, MIDDLE_MIN_INTENSITY = 60.0, 12.0
"FLOPs per byte from which a convolution is dense or middle; both lie in ranges of `UNMEASURED_INTENSITIES`."
UNMEASURED_INTENSITIES = ((4.5, 17.1), (52.4, 67.0))
"Ranges of FLOPs per byte without a published convolution; which law applies within them is a guess."
CONV_TRANSPOSE = CostLaw("FLOPs at the output's positions", 15205.03515625, 63.14251708984375, 54.89610290527344, 1)

LIGHT_LINEAR = CostLaw("FLOPs and the bias", 580.45, 22.538, 19.595, 0)
"Weights of 65,536 elements and fewer."
MIDDLE_LINEAR = CostLaw("FLOPs and the bias", 10581.5791015625, 335.5166015625, 291.6981506347656, 1)
"Weights of 131,072 elements."
HEAVY_LINEAR = CostLaw("FLOPs and the bias", 5290.78955078125, 167.75830078125, 145.8490753173828, 0)
"Weights of 262,144 elements and more."
SHORT_LINEAR = CostLaw("FLOPs and the bias", 1774.0, 68.892, 59.895, 0)
"Sixteen rows. The ANE's rate is guessed from the ratio of light ones."
RECURRENT = CostLaw("FLOPs of the two products", _MEMORY_ONLY, 23.1139276953452, 20.0952494914443, 1)

_MEASURED_OP_TYPES_TEXT = """
add argsort avg_pool batch_to_space cast ceil concat conv conv_transpose cos dequantize erf expand_dims floor gather
gather_nd greater greater_equal inverse l2_pool layer_norm leaky_relu less_equal linear matmul max_pool not_equal
one_hot pad pixel_shuffle pixel_unshuffle pow quantize range_1d real_div reduce_argmax reduce_l1_norm reduce_max
reduce_sum relu relu6 reshape resize resize_nearest_neighbor rnn round rsqrt select silu slice_by_index
slice_by_size softmax softsign square squeeze stack sub tanh thresholded_relu topk transpose
upsample_nearest_neighbor
"""
MEASURED_OP_TYPES = frozenset(_MEASURED_OP_TYPES_TEXT.split())
"The op types with an estimate among the rows that we read. The estimates of all others are guesses."
