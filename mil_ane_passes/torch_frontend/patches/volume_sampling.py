"""`grid_sample` of volumes (rank 5) and by bicubic interpolation: an error with a workaround.

Core ML's `resample` has two spatial axes, and interpolates linearly or not at all. Other samples of images (rank 4) are
lowered by coremltools.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.frontend.torch import ops

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH179",
              title="`grid_sample` of volumes (rank 5) and by bicubic interpolation fails without advice",
              upstream=("none known",))

_IMAGE_RANK = 4
_BICUBIC = 2
"torch's number of this interpolation, after bilinear and nearest."


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x, grid: torch.nn.functional.grid_sample(x, grid, align_corners=False),
                      torch.ones(1, 1, 2, 2, 2), torch.zeros(1, 2, 2, 2, 3))


@PATCH.op("grid_sampler", "grid_sampler_3d")
def sample_grid(context: Any, node: Any) -> None:
    """Lower grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners) of images, bilinear or nearest.
    """
    rank = context[node.inputs[0]].rank
    if rank != _IMAGE_RANK:
        raise NotConverted.at(
            node, f"samples an input of rank {rank}, but Core ML's resample has two spatial axes (rank 4)",
            "sample the two nearest slices as images and blend them by the fraction of the depth, or sample outside of "
            "the model")
    mode = node.inputs[2]
    if to_python(context[mode] if isinstance(mode, str) else mode, node, "interpolation_mode") == _BICUBIC:
        raise NotConverted.at(node, "interpolates by mode 'bicubic', which Core ML's resample does not have",
                              "use mode='bilinear' or 'nearest', or sample outside of the model")
    ops.grid_sampler(context, node)
