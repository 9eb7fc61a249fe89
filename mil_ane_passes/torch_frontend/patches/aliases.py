"""Synonyms of ops: `torch.multiply` is `torch.mul`, `x.view_as(y)` is `x.view(y.shape)`, `alias` is the identity.

TorchScript replaces most synonyms itself, torch.export none. Each is lowered with the lowering of the op it is a
synonym of.
"""

from __future__ import annotations

import copy
from typing import Any

from coremltools.converters.mil.mil import Builder as mb

from ...ir.query import is_symbolic
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, to_tensor

PATCH = Patch(code="TORCH102",
              title="second names of ops are not implemented: `multiply`, `greater`, `concatenate`, `x | y`, `alias`",
              upstream=("none known",))

SYNONYMS = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "concatenate": "cat", "divide": "div", "fix": "trunc", "ger": "outer",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg",
    "not_equal": "ne", "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "unsafe_chunk": "chunk",
    "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes", "special_erf": "erf", "special_erfc":
    "erfc", "special_exp2": "exp2", "special_expit": "sigmoid", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_log_softmax": "log_softmax", "special_logit": "logit", "special_logsumexp": "logsumexp", "special_round":
    "round", "special_sinc": "sinc", "special_softmax": "softmax", "special_xlogy": "xlogy",
    "linalg_diagonal": "diagonal", "linalg_matmul": "matmul", "moveaxis": "movedim", "row_stack": "vstack",
    "divide.scalar_mode": "div",
    # Identities in eval mode, as dropout, which coremltools leaves out
    "alpha_dropout": "dropout", "feature_alpha_dropout": "dropout",
}


def lower_synonym(context: Any, node: Any) -> None:
    """Lower the node as the op of which it is a synonym."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind, unify_inplace_and_functional

    kind = unify_inplace_and_functional(sanitize_op_kind(node.kind))
    meant = SYNONYMS[kind]
    lowering = _TORCH_OPS_REGISTRY.get_func(meant)
    if lowering is None:
        raise NotConverted.at(node, f"'{meant}' is not implemented")
    changed = copy.copy(node)
    changed.kind = meant  # by which lowerings of several kinds choose
    lowering(context, changed)


PATCH.op(*SYNONYMS)(lower_synonym)


@PATCH.op("view_as", "reshape_as")
def lower_view_as(context: Any, node: Any) -> None:
    """Lower view_as(self, other): the view of the tensor in the shape of another, which may be flexible."""
    inputs = bind_arguments(context, node, "self other")
    x, other = to_tensor(inputs.self), to_tensor(inputs.other)
    if other.rank == 0:
        add_result(context, node, mb.squeeze(x=x, name=node.name) if x.rank else mb.identity(x=x, name=node.name))
        return
    shape = mb.shape(x=other) if any(map(is_symbolic, other.shape)) else [int(size) for size in other.shape]
    add_result(context, node, mb.reshape(x=x, shape=shape, name=node.name))


@PATCH.op("alias", "positive")
def lower_alias(context: Any, node: Any) -> None:
    """Lower alias(self): the tensor itself, under a name of its own."""
    add_result(context, node, mb.identity(x=bind_arguments(context, node, "self").self, name=node.name))
