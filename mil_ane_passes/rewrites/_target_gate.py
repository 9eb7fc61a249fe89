"""Target gates: skip a rewrite if the target supports the op already, or does not support the replacement."""

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


def describe_supporting_targets(generations: Sequence[Generation], unsupported: Sequence[Generation]) -> str:
    """Describe why an op is skipped: the `generations` that are not among `unsupported` support it as it is."""
    supporting = format_generations([each for each in generations if each not in unsupported])
    return f"supported on {supporting}; choose an older target, or always=true"


def skip_if_supported(rule: Rule, op: Operation, always: bool) -> Miss | None:
    """Return a miss where `rule` does not target all requested generations, so that one supports `op`; else None.

    Return None with `always`, too.
    """
    unsupported = [each for each in rule.generations if rule.targets.includes(each)]
    if always or len(unsupported) == len(rule.generations):
        return None
    return Miss(op, describe_supporting_targets(rule.generations, unsupported))


def find_length_obstacle(lengths: Iterable[object], generations: Sequence[Generation], before: int = 0) -> str:
    """Return why values with spatial axes of `lengths` must not be built, or "".

    The reason is a chip that supports the length `before`, but not the longest of `lengths`.
    """
    longest = max((int(str(length)) for length in lengths if not is_symbolic(length)), default=0)
    if longest <= before:
        return ""
    supporting = [each for each in generations if not find_exceeded_limit("spatial", before, (each,))]
    exceeded = find_exceeded_limit("spatial", longest, supporting)
    return f"a value of length {longest} would be created: {exceeded.words}" if exceeded else ""
