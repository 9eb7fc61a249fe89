"""The registry of layer rewrites, and their application to a network."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..passes.contract import Exactness
from ..utils.errors import InputError, suggest_nearest
from . import rewrites as _rewrites
from .layer_converter import get_layer_kind
from .layer_rules import get_layer_rules
from .network_view import NetworkView, iterate_nested_layers, list_views
from .program import list_stages

__all__ = [
    "LayerRewrite",
    "LayerTrace",
    "Replacement",
    "RewrittenLayer",
    "RewrittenNetwork",
    "apply_layer_rewrites",
    "explain_missing_rewrite",
    "get_layer_rewrites",
    "rewrite_layer",
    "rewrite_network",
    "select_layer_rewrites",
]

PRESETS = ("safe", "full")


@dataclass(frozen=True)
class Replacement:
    """The layers that replace one, in order, and what they are in words. They make the outputs of the one replaced.

    `exactness` is that of this replacement where it is better than the rewrite's.
    """

    layers: Sequence[Any]
    note: str
    exactness: Exactness | None = None


Result = Replacement | str | None
RewriteFunction = Callable[[Any, NetworkView], Result]


@dataclass(frozen=True)
class LayerRewrite:
    """A rewrite of layers of some `kinds`. `fixes` is the code of the layer rule whose findings it fixes."""

    name: str
    kinds: tuple[str, ...]
    fixes: str
    exactness: Exactness
    preset: str
    moves: float
    "The difference that is allowed besides rounding, as a share of an output's largest value."
    function: RewriteFunction = field(repr=False)

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


@dataclass(frozen=True)
class RewrittenLayer:
    """One layer that a rewrite replaced, or (`made` is empty) did not replace, for the reason in `note`."""

    layer: str
    kind: str
    note: str
    code: str
    made: tuple[tuple[str, str], ...] = ()
    "The names and kinds of the layers in its place."

    def to_dict(self) -> dict[str, Any]:
        made = {"made": [{"layer": name, "kind": kind} for name, kind in self.made]} if self.made else {}
        return {"layer": self.layer, "kind": self.kind, "code": self.code, "note": self.note, **made}


@dataclass
class LayerTrace:
    """The trace of the rewrite `rule`: the layers that it replaced, and the layers that it did not, with reasons."""

    rule: str
    fired: list[RewrittenLayer] = field(default_factory=list)
    near_misses: list[RewrittenLayer] = field(default_factory=list)
    exactness: Exactness | None = None
    moves: float = 0.0
    reverted: ClassVar[str] = ""
    failed: ClassVar[None] = None

    def add(self, other: LayerTrace) -> None:
        """Add what the same rewrite did in another network."""
        self.fired += other.fired
        self.near_misses += other.near_misses
        if self.exactness in (None, Exactness.BITWISE):
            self.exactness = other.exactness or self.exactness
        self.moves = max(self.moves, other.moves)

    def to_dict(self) -> dict[str, Any]:
        return {"pass": self.rule, "fired": [each.to_dict() for each in self.fired],
                "near_misses": [each.to_dict() for each in self.near_misses],
                "exactness": self.exactness.value if self.exactness else None}


_REWRITES: dict[str, LayerRewrite] = {}


def rewrite_layer(
    *kinds: str, fixes: str, exactness: Exactness = Exactness.BITWISE, moves: float = 0.0, preset: str = "safe",
) -> Callable[[RewriteFunction], RewriteFunction]:
    """Register the decorated function as the rewrite of its name, for layers of these kinds."""

    def register_function(function: RewriteFunction) -> RewriteFunction:
        name = function.__name__
        if name in _REWRITES:
            raise ValueError(f"two layer rewrites are called '{name}'")
        _REWRITES[name] = LayerRewrite(name, kinds, fixes, exactness, preset, moves, function)
        return function

    return register_function


def get_layer_rewrites() -> dict[str, LayerRewrite]:
    """Return all layer rewrites by name."""
    for module in pkgutil.iter_modules(_rewrites.__path__):
        importlib.import_module(f"{_rewrites.__name__}.{module.name}")
    return dict(sorted(_REWRITES.items()))


def select_layer_rewrites(preset: str, names: str | Iterable[str] | None = None) -> list[LayerRewrite]:
    """Return the rewrites of a preset, or exactly those in `names` (which may name presets). InputError for others."""
    known = get_layer_rewrites()
    listed = [preset] if names is None else names.split(",") if isinstance(names, str) else list(names)
    chosen: list[LayerRewrite] = []
    for name in map(str.strip, listed):
        if name in PRESETS:
            chosen += [each for each in known.values() if each.preset == "safe" or name == each.preset]
        elif name in known:
            chosen.append(known[name])
        else:
            what = f"no layer rewrite '{name}'" if names is not None else f"preset '{name}'"
            raise InputError(f"{what}; expected {', '.join((*PRESETS, *known))}"
                             f"{suggest_nearest(name, (*PRESETS, *known))}")
    return list(dict.fromkeys(chosen))


def explain_missing_rewrite(code: str, kind: str, tried: Iterable[str], left_out: Iterable[str] = ()) -> str:
    """Return why a layer of a kind, found by the rule `code`, stays where no rewrite in `tried` says why."""
    fitting = [each for each in get_layer_rewrites().values() if each.fixes == code and kind in each.kinds]
    for each in fitting:
        if each.name in left_out:
            return f"{each.name} was left out because it breaks the equivalence check"
        if each.name not in tried:
            where = f"preset {each.preset}" if each.preset in PRESETS else "only by name"
            return f"{each.name} replaces it, {where}"
    return "no rewrite within the format applies; upgrade to an ML Program, and rewrite that"


def apply_layer_rewrites(chosen: Sequence[LayerRewrite], view: NetworkView) -> tuple[list[Any], list[LayerTrace]]:
    """Return the layers of the rewritten network, and a trace of each rewrite; the network itself is not changed.

    Constants without users are removed. Layers in the bodies of loops and branches are unchanged.
    """
    traces = {each.name: LayerTrace(each.name) for each in chosen}
    layers: list[Any] = []
    for layer in view.network.layers:
        layers += _rewrite_one(layer, chosen, view, traces)
        _note_nested_layers(layer, chosen, view, traces)
    kept = _drop_unread_constants(layers, view)
    _note_dropped_constants(layers, kept, traces.values())
    return kept, list(traces.values())


def _note_dropped_constants(layers: Sequence[Any], kept: Sequence[Any], traces: Iterable[LayerTrace]) -> None:
    """Turn near misses of constants that went away with their readers into replacements by no layer."""
    gone = {layer.name for layer in layers} - {layer.name for layer in kept}
    for trace in traces:
        stored = [each for each in trace.near_misses if each.layer in gone]
        trace.near_misses = [each for each in trace.near_misses if each.layer not in gone]
        trace.fired += [replace(each, note="stored in the layers that use it") for each in stored]
        trace.exactness = trace.exactness or (Exactness.BITWISE if stored else None)


@dataclass(frozen=True)
class RewrittenNetwork:
    """A copy of a Model proto whose network is rewritten, and the traces; `changed` says whether a rewrite fired.

    `views` are those of the networks before.
    """

    spec: Any
    traces: list[LayerTrace]
    views: list[NetworkView] = field(repr=False)

    @property
    def changed(self) -> bool:
        return any(trace.fired for trace in self.traces)


def rewrite_network(spec: Any, chosen: Sequence[LayerRewrite], where: str) -> RewrittenNetwork:
    """Apply layer rewrites to a copy of `spec`; all but layers of its network, or networks, stays as it is.

    Raises InputError for networks that cannot be converted.
    """
    made = type(spec)()
    made.CopyFrom(spec)
    traces = {each.name: LayerTrace(each.name) for each in chosen}
    views = list_views(spec, where)
    for view, stage in zip(views, list_stages(made, where)):
        layers, found = apply_layer_rewrites(chosen, view)
        for trace in found:
            traces[trace.rule].add(trace)
        if any(trace.fired for trace in found):
            del stage.network.layers[:]
            stage.network.layers.extend(layers)
    return RewrittenNetwork(made, list(traces.values()), views)


def _rewrite_one(
    layer: Any, chosen: Sequence[LayerRewrite], view: NetworkView, traces: dict[str, LayerTrace]
) -> Sequence[Any]:
    """Return what replaces one layer: the layer itself where no rewrite applies."""
    kind = get_layer_kind(layer)
    for rewrite in chosen:
        if kind not in rewrite.kinds:
            continue
        found = rewrite.function(layer, view)
        trace = traces[rewrite.name]
        if isinstance(found, str):
            trace.near_misses.append(RewrittenLayer(layer.name, kind, found, rewrite.fixes))
        if isinstance(found, Replacement):
            made = tuple((each.name, get_layer_kind(each)) for each in found.layers)
            trace.fired.append(RewrittenLayer(layer.name, kind, found.note, rewrite.fixes, made))
            exactness = found.exactness or rewrite.exactness
            trace.exactness = exactness if trace.exactness in (None, Exactness.BITWISE) else trace.exactness
            trace.moves = max(trace.moves, rewrite.moves if exactness is not Exactness.BITWISE else 0.0)
            return found.layers
    return [layer]


def _note_nested_layers(
    layer: Any, chosen: Sequence[LayerRewrite], view: NetworkView, traces: dict[str, LayerTrace]
) -> None:
    """Record a near miss for each layer in the body of `layer` that has a problem some rewrite fixes."""
    for inner in list(iterate_nested_layers([layer]))[1:]:
        kind = get_layer_kind(inner)
        for rewrite in chosen:
            rule = get_layer_rules()[rewrite.fixes]
            if kind in rewrite.kinds and rule.find(inner, view) is not None:
                reason = f"it is in the body of '{layer.name}', where values may change between runs"
                traces[rewrite.name].near_misses.append(RewrittenLayer(inner.name, kind, reason, rewrite.fixes))


def _drop_unread_constants(layers: list[Any], view: NetworkView) -> list[Any]:
    """Leave out constants that the network read and the new layers do not."""
    def collect_read(listed: Sequence[Any]) -> set[str]:
        return {name for layer in iterate_nested_layers(listed) for name in layer.input}

    dropped = collect_read(view.network.layers) - collect_read(layers) - view.outputs
    return [layer for layer in layers if not (
        get_layer_kind(layer) in ("loadConstant", "loadConstantND") and set(layer.output) <= dropped)]
