"""Origins of ops in the source model, from the scopes that coremltools' frontends attach to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from coremltools.converters.mil.mil import Operation, Program
from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

from .query import iterate_ops

__all__ = ["Origin", "copy_scopes", "fill_layer_scopes", "find_origin", "make_layer_scopes"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_LAYER_MARK = "NeuralNetworkLayer:"
"Prefix of the kind of a NeuralNetwork layer, in the scope that has a torch module's class: layers have no own scope."
_INSIDE_TORCH = ("/torch/", "\\torch\\")


@dataclass(frozen=True)
class Origin:
    """The PyTorch module and op, or the NeuralNetwork layer, that a MIL op was converted from.

    A field that was not recorded is None. For a traced model, `module` is the path of the module, `module_type` its
    class, and `op` the torch op. For an exported model, `source` is the file, line and text. For a layer, `is_layer` is
    set, `module` is its name and `module_type` its kind. coremltools omits containers that are not called from the
    path: `ups.0.conv` in a ModuleList `ups` becomes `0.conv`.
    """

    module: str | None = None
    module_type: str | None = None
    op: str | None = None
    source: str | None = None
    is_layer: bool = False

    def to_dict(self) -> dict[str, str | None]:
        return {"module": self.module, "module_type": self.module_type, "op": self.op, "source": self.source}

    def __str__(self) -> str:
        if self.is_layer:
            return f"layer '{self.module}' ({self.module_type})"
        named = self.module and f"{self.module} ({self.module_type})" if self.module_type else self.module
        return ", ".join(part for part in (named, self.op and f"aten op {self.op}", self.source) if part)


def find_origin(op: Operation) -> Origin | None:
    """Find the origin of `op`; None if it has no scopes, such as an op loaded from a package."""
    scopes = op.scopes
    names = [str(name) for name in scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME, ())]
    kinds = [str(kind) for kind in scopes.get(ScopeSource.TORCHSCRIPT_MODULE_TYPE, ())]
    if names and kinds and kinds[-1].startswith(_LAYER_MARK):
        name = "" if names[-1] == "-" else unquote(names[-1])
        return Origin(name, kinds[-1].removeprefix(_LAYER_MARK), is_layer=True)
    if names and kinds:  # the last entries are the torch op itself: its number in the graph, and its kind
        return Origin(".".join(names[:-1]) or None, kinds[-2] if len(kinds) > 1 else None, kinds[-1])
    frames = [frame for trace in scopes.get(ScopeSource.EXIR_STACK_TRACE, ()) if trace
              for frame in _FRAME.findall(str(trace))]
    own = [frame for frame in frames if not any(part in frame[0] for part in _INSIDE_TORCH)] or frames
    if not own:
        return None
    file, line, _, text = own[-1]
    return Origin(source=f"{file}:{line}: {text.strip()}")


def make_layer_scopes(name: str, kind: str) -> tuple[ScopeInfo, ScopeInfo]:
    """Make the scopes for the ops of one layer of a NeuralNetwork.

    The scopes of a layer in the body of another layer replace those of the outer layer. coremltools drops spaces from
    scopes, so the name is quoted.
    """
    return (ScopeInfo(source=ScopeSource.TORCHSCRIPT_MODULE_NAME, data=[quote(name) or "-"]),
            ScopeInfo(source=ScopeSource.TORCHSCRIPT_MODULE_TYPE, data=[f"{_LAYER_MARK}{kind}"]))


def fill_layer_scopes(program: Program) -> None:
    """Give ops without an origin, such as casts that passes added, the scopes of a neighbouring op."""
    ops = [op for _, op in iterate_ops(program)]
    for listed, neighbours in ((ops[::-1], _get_readers), (ops, _get_makers)):
        for op in listed:
            if find_origin(op) is None:
                found = next((each for each in neighbours(op) if find_origin(each) is not None), None)
                if found is not None:
                    op.scopes = dict(found.scopes)


def _get_readers(op: Operation) -> list[Operation]:
    return [reader for var in op.outputs for reader in var.child_ops]


def _get_makers(op: Operation) -> list[Operation]:
    bound = [var for given in op.inputs.values() for var in (given if isinstance(given, (list, tuple)) else [given])]
    return [var.op for var in bound if var is not None and var.op is not None]


def copy_scopes(source: Program, program: Program) -> None:
    """Copy the scopes of the ops of `source` to the ops of `program` that compute the same values.

    `source` is the program that coremltools converted; `program` was loaded from a package, which has no scopes.
    """
    known = {(function, var.name): op.scopes for function, op in iterate_ops(source) for var in op.outputs}
    for function, op in iterate_ops(program):
        for var in op.outputs:
            scopes = known.get((function, var.name))
            if scopes:
                op.scopes = dict(scopes)
