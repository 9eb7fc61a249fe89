"""Origins of ops in the source model, from the scopes that coremltools' frontends attach to them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coremltools.converters.mil.mil import Operation, Program
from coremltools.converters.mil.mil.scope import ScopeSource

from .query import iterate_ops

__all__ = ["Origin", "copy_scopes", "find_origin"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_INSIDE_TORCH = ("/torch/", "\\torch\\")


@dataclass(frozen=True)
class Origin:
    """The PyTorch module and op behind a MIL op. A field is None if the frontend did not record it.

    `module` is the path of the module in a traced model, `module_type` its class, `op` the torch op; `source` the
    file, line and text in an exported one. coremltools omits containers from the path that are not called themselves:
    `ups.0.conv` of a ModuleList `ups` arrives as `0.conv`.
    """

    module: str | None = None
    module_type: str | None = None
    op: str | None = None
    source: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return {"module": self.module, "module_type": self.module_type, "op": self.op, "source": self.source}

    def __str__(self) -> str:
        named = self.module and f"{self.module} ({self.module_type})" if self.module_type else self.module
        return ", ".join(part for part in (named, self.op and f"aten op {self.op}", self.source) if part)


def find_origin(op: Operation) -> Origin | None:
    """Find the origin of `op`, or None: only ops converted in this process have scopes, those of a package do not."""
    scopes = op.scopes
    names = [str(name) for name in scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME, ())]
    kinds = [str(kind) for kind in scopes.get(ScopeSource.TORCHSCRIPT_MODULE_TYPE, ())]
    if names and kinds:  # the last of both is the torch op itself: its number in the graph, and its kind
        return Origin(".".join(names[:-1]) or None, kinds[-2] if len(kinds) > 1 else None, kinds[-1])
    frames = [frame for trace in scopes.get(ScopeSource.EXIR_STACK_TRACE, ()) if trace
              for frame in _FRAME.findall(str(trace))]
    own = [frame for frame in frames if not any(part in frame[0] for part in _INSIDE_TORCH)] or frames
    if not own:
        return None
    file, line, _, text = own[-1]
    return Origin(source=f"{file}:{line}: {text.strip()}")


def copy_scopes(source: Program, program: Program) -> None:
    """Copy scopes to the ops of `program`, which was read from a package, from the ops of `source` that make the same
    values: `source` is the program that coremltools converted, before saving it dropped the scopes."""
    known = {(function, var.name): op.scopes for function, op in iterate_ops(source) for var in op.outputs}
    for function, op in iterate_ops(program):
        for var in op.outputs:
            scopes = known.get((function, var.name))
            if scopes:
                op.scopes = dict(scopes)
