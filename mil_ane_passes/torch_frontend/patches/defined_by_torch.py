"""Ops that coremltools does not support and that torch itself defines by others.

Each is replaced by torch's own definition (see `torch_frontend/decomposition.py`).
"""

from __future__ import annotations

from ..contract import Patch
from ..decomposition import lower_by_decomposition

PATCH = Patch(code="TORCH108",
              title="ops made of simpler ones are not implemented: `lerp`, `logaddexp`, `kron`, `take_along_dim`",
              upstream=("none known",))

PATCH.op(
    # one or two tensors, element by element
    "lerp", "addcmul", "addcdiv", "logaddexp", "logaddexp2", "heaviside", "logit", "xlogy",
    "isfinite", "isinf", "isneginf", "isposinf", "isclose", "deg2rad", "rad2deg", "sinc", "celu", "log_sigmoid",
    "log_sigmoid_forward", "hardshrink", "softshrink", "sgn", "float_power",
    "ldexp", "special_entr", "special_xlog1py", "special_ndtr",
    # along dimensions
    "count_nonzero", "count_nonzero.dim_intlist", "aminmax", "nansum",
    "gradient", "gradient.scalarint",
    "pairwise_distance", "dist", "renorm", "msort", "argwhere",
    # products
    "inner", "vdot", "kron", "tensordot", "addmv", "addr", "linalg_multi_dot", "chain_matmul",
    "matrix_power", "linalg_matrix_power",
    # places
    "movedim", "ravel", "vstack", "dstack", "column_stack", "rot90", "flipud", "diag", "diag_embed",
    "diagflat", "block_diag", "cartesian_prod", "tensor_split", "tensor_split.sections",
    "tensor_split.indices", "hsplit", "vsplit", "dsplit", "mt", "mh", "adjoint", "channel_shuffle",
    "take", "take_along_dim", "tril_indices", "triu_indices", "logspace",
    "lp_pool1d", "lp_pool2d",
    "vander", "linalg_vander", "fft_fftshift", "fft_ifftshift",
    # losses
    "cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss", "triplet_margin_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "cross_entropy_loss", "nll_loss_forward", "nll_loss_nd", "poisson_nll_loss", "soft_margin_loss",
    "multi_margin_loss",
    # statistics
    "quantile", "nanquantile", "nanmean", "isin", "isin.tensor_tensor",
)(lower_by_decomposition)
