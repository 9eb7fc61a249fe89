"""Target gating: skip a rewrite where a target supports the op as it is, or does not support the replacement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coremltools.converters.mil.mil import Operation
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane.limits import find_exceeded_limit
from ..passes.contract import Miss, Rule
from ..passes.targets import Generation, format_generations

__all__ = ["describe_supporting_targets", "find_length_obstacle", "find_limiting_generations", "skip_if_supported"]


def find_limiting_generations(name: str, extent: int, generations: Sequence[Generation]) -> list[Generation]:
    """Return the generations whose limit called `name` is below `extent`."""
    return [each for each in generations if find_exceeded_limit(name, extent, (each,))]


def describe_supporting_targets(generations: Sequence[Generation], refused: Sequence[Generation]) -> str:
    """Describe why an op is skipped: some of `generations` support it as it is."""
    taking = format_generations([each for each in generations if each not in refused])
    return f"taken on {taking}; name an older target, or always=true"


def skip_if_supported(rule: Rule, op: Operation, always: bool) -> Miss | None:
    """Return a miss where `rule` does not target all requested generations, so that one supports `op`; else None.

    Return None with `always`, too.
    """
    refused = [each for each in rule.generations if rule.targets.includes(each)]
    return (
        None
        if always or len(refused) == len(rule.generations)
        else Miss(op, describe_supporting_targets(rule.generations, refused))
    )


def find_length_obstacle(lengths: Iterable[object], generations: Sequence[Generation], before: int = 0) -> str:
    """Return why values with spatial axes of `lengths` must not be built, or "".

    The reason is a chip that supports the length `before`, but not the longest of `lengths`.
    """
    longest = max((int(str(length)) for length in lengths if not is_symbolic(length)), default=0)
    found = None if longest <= before else find_exceeded_limit("spatial", longest, [
        each for each in generations if not find_exceeded_limit("spatial", before, (each,))])
    return f"a value of length {longest} would be made: {found.words}" if found else ""
