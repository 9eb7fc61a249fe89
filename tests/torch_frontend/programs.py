"""Small random programs of views and in-place ops, as Python source that TorchScript can compile."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["OPS", "VIEWS", "program"]

VIEWS = {
    "select": "{new} = {old}[0]",
    "slice": "{new} = {old}[..., 1:]",
    "step": "{new} = {old}[..., ::2]",
    "first": "{new} = {old}[0:1]",
    "transpose": "{new} = {old}.transpose(0, -1)",
    "flat": "{new} = {old}.unsqueeze(0).squeeze(0)",
    "narrow": "{new} = {old}.narrow(0, 0, 1)",
    "chunk": "{new} = {old}.chunk(2, -1)[0]",
    "unsqueeze": "{new} = {old}.unsqueeze(1)",
    "detach": "{new} = {old}.detach()",
    "clone": "{new} = {old}.clone()",
    "reshape": "{new} = {old}.reshape(-1)",
    "contiguous": "{new} = {old}.contiguous()",
    "split": "{new} = {old}.split(1, 0)[0]",
    "unbind": "{new} = {old}.unbind(0)[-1]",
    "view_as": "{new} = {old}.view_as({old})",
}
OPS = {
    "add": "{old}.add_(1)",
    "mul": "{old}.mul_(2)",
    "clamp": "{old}.clamp_(-3, 5)",
    "fill": "{old}.fill_(4)",
    "zero": "{old}.zero_()",
    "set last": "{old}[..., -1] = 3",
    "add last": "{old}[..., -1] += 1",
    "mask": "{old}[{old} > 2] = -1",
    "masked": "{old}.masked_fill_({old} < 0, 9)",
    "copy": "{old}.copy_({old} * 2)",
    "add another": "{old}.add_({other}.sum())",
}
_numbers = itertools.count()


def program(steps: Sequence[tuple[int, str]]) -> Callable[..., Any]:
    """A function of one tensor that takes the steps in turn and returns every name.

    Each step is (which of the names so far, the view or op).
    """
    names, lines = ["x"], []
    for chosen, what in steps:
        old, other = names[chosen % len(names)], names[-1 - chosen % len(names)]
        if what in VIEWS:
            names.append(f"v{len(names)}")
            lines.append(VIEWS[what].format(old=old, new=names[-1]))
        else:
            lines.append(OPS[what].format(old=old, other=other))
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def steps(x: torch.Tensor):\n{body}    return {', '.join(names)}, x.sum()\n"
    name = f"<program {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": __import__("torch"), "__name__": __name__}
    exec(compile(source, name, "exec"), space)  # the text is made above
    steps_of = space["steps"]
    assert callable(steps_of)
    return steps_of
