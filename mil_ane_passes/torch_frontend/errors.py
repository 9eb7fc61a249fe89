"""Errors of the patched frontend, with the location of the op in the torch model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..utils.errors import AnePassesError

__all__ = ["UNNAMED_SCOPES", "NotConverted", "NotEqual", "describe_node_location", "find_source_line"]


class NotConverted(AnePassesError, NotImplementedError):
    """An op that cannot be converted faithfully.

    Names the op, the module path and the source line, and suggests a change.
    """

    @classmethod
    def at(cls, node: Any, what: str, advice: str = "") -> NotConverted:
        """Make the error for an op of a graph.

        `node` is of coremltools' torch graph (InternalTorchIRNode) or of a torch graph (torch._C.Node).
        """
        return cls(f"{describe_node_location(node)}: {what}{'; ' + advice if advice else ''}")


class NotEqual(AnePassesError):
    """A converted model that does not compute what its torch model does: names the first part that differs, and where.

    `mlmodel` is the model despite the error; `module` the path of the part, "" where it is not known.
    """

    def __init__(self, message: str, mlmodel: Any = None, module: str = "") -> None:
        super().__init__(message)
        self.mlmodel, self.module = mlmodel, module


def describe_node_location(node: Any) -> str:
    """Format `op 'aten::index_put_' in encoder.attention (model.py:12)`, as far as it is known."""
    if callable(getattr(node, "kind", None)):
        kind, module, source = node.kind(), node.getModuleHierarchy(), node.sourceRange()
    else:
        meta = getattr(node, "meta", None) or {}
        kind, module = node.kind, getattr(node, "model_hierarchy", None) or _read_exported_module_path(meta)
        source = meta.get("source") or meta.get("stack_trace") or ""
    names = ".".join(name for part in module.split(".") if (name := part.partition("(")[0]) not in UNNAMED_SCOPES)
    return (
        f"op '{kind}'"
        + (f" in {names}" if names else "")
        + (f" ({line})" if (line := find_source_line(source)) else "")
    )


def _read_exported_module_path(meta: Mapping[str, Any]) -> str:
    """Return the path of the module that torch.export records for a node, "" for the outermost."""
    stack = list((meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self']").removeprefix(".") if stack else ""


UNNAMED_SCOPES = ("", "UNKNOWN_INSTANCE")
"Steps of module paths that TorchScript has for a function, which has no module."


def find_source_line(source: str) -> str:
    """Return the innermost `file:line` of a TorchScript source range or of a Python stack trace."""
    lines = [line.strip() for line in source.splitlines()]
    frames = [line for line in lines if line.startswith('File "')]
    if frames:
        inside = [frame for frame in frames if "/torch/" not in frame and not frame.startswith('File "<')] or frames
        path, _, rest = inside[-1].removeprefix('File "').partition('", line ')
        return f"{path}:{rest.partition(',')[0].split()[0]}" if rest else path
    outside = [line for line in lines if ".py(" in line and "/torch/" not in line]
    if outside:  # a trace: "model.py(12): forward", innermost first
        path, _, rest = outside[0].partition(".py(")
        return f"{path}.py:{rest.partition(')')[0]}"
    return ""
