"""Rules about NeuralNetwork layers: kinds and parameters that are reported to be unsupported on the ANE.

The reports are from 2019 and 2020, for iPhones up to A13, when Core ML executed this format directly; no newer
measurements are published. According to their authors, some are guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..passes.evidence import Community, Evidence, cite_2020_layer_list
from ..passes.severity import Severity
from .layer_converter import get_layer_kind
from .network_view import NetworkView, iterate_nested_layers

__all__ = ["LayerHit", "LayerRule", "find_layer_hits", "get_layer_rules", "is_layer_rule_key", "select_layer_rules"]

# The limits of the list of layers from 2020 that the rules on pooling and upsampling cite.
MAX_POOL_SIDE = 13
MAX_POOL_STRIDE = 2
MAX_UPSAMPLING = 2

Check = Callable[[Any, NetworkView], "str | None"]


@dataclass(frozen=True)
class LayerRule:
    """A problem of layers on the ANE. `find` returns what was found in a layer, or None; `confidence` as for rules."""

    code: str
    slug: str
    summary: str
    confidence: str
    evidence: tuple[Evidence, ...]
    find: Check = field(repr=False)
    advice: str = ""

    severity = Severity.UNSUPPORTED

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "slug": self.slug, "summary": self.summary, "confidence": self.confidence,
                "severity": self.severity.value, "evidence": [each.to_dict() for each in self.evidence],
                "advice": self.advice or None}


@dataclass(frozen=True)
class LayerHit:
    """A layer with a problem: its name and kind, and what was found."""

    rule: LayerRule
    layer: str
    kind: str
    reason: str


_RULES: dict[str, LayerRule] = {}


def layer_rule(
    code: str, slug: str, summary: str, *evidence: Evidence, confidence: str = "medium", advice: str = ""
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a rule."""

    def register_check(find: Check) -> Check:
        _RULES[code] = LayerRule(code, slug, summary, confidence, evidence, find, advice)
        return find

    return register_check


def get_layer_rules() -> dict[str, LayerRule]:
    """Return all rules about layers by code."""
    return dict(_RULES)


def find_layer_hits(views: Iterable[NetworkView]) -> list[LayerHit]:
    """Find all layers with a problem, in the order of the networks, with those in loops and branches."""
    return [LayerHit(rule, layer.name, get_layer_kind(layer), reason)
            for view in views for layer in iterate_nested_layers(view.network.layers) for rule in _RULES.values()
            if (reason := rule.find(layer, view)) is not None]


def is_layer_rule_key(key: str) -> bool:
    """Return whether `key` names rules about layers: a code, the beginning of codes with NN, or a slug."""
    return bool(_find_codes(key))


def select_layer_rules(keys: list[str]) -> frozenset[str]:
    """Return the codes of the rules that the keys name."""
    return frozenset(code for key in keys for code in _find_codes(key))


def _find_codes(key: str) -> list[str]:
    required = key.strip().upper()
    return [code for code, rule in _RULES.items()
            if rule.slug == key.strip().lower() or (required.startswith("NN") and code.startswith(required))]


_RECURRENT = ("simpleRecurrent", "gru", "uniDirectionalLSTM", "biDirectionalLSTM")
_GATHERS = ("gather", "gatherND", "gatherAlongAxis", "scatter", "scatterND", "scatterAlongAxis")
_ND_KINDS = (
    "concatND", "splitND", "loadConstantND", "softmaxND", "transpose", "expandDims", "squeeze", "flattenTo2D",
    "reshapeStatic", "reshapeLike", "reshapeDynamic", "rankPreservingReshape", "stack", "tile", "sliceStatic",
    "sliceDynamic", "sliceBySize", "constantPad", "embeddingND", "broadcastToLike", "broadcastToStatic",
    "broadcastToDynamic", "reduceL1", "reduceL2", "reduceMax", "reduceMin", "reduceSum", "reduceProd", "reduceMean",
    "reduceLogSum", "reduceSumSquare", "reduceLogSumExp", "argMax", "argMin",
)
_BROADCASTABLE = (
    "addBroadcastable", "subtractBroadcastable", "multiplyBroadcastable", "divideBroadcastable", "maxBroadcastable",
    "minBroadcastable", "powBroadcastable", "modBroadcastable", "floorDivBroadcastable", "whereBroadcastable",
)


@layer_rule("NN101", "broadcastable-layer", "Broadcastable layers of Core ML 3 do not run on the ANE.",
            cite_2020_layer_list("broadcastable layers do not run on the ANE: Core ML falls back to CPU or GPU; the "
                                 "classic layers of Core ML 2 broadcast less and mostly run there"))
def _find_broadcastable(layer: Any, view: NetworkView) -> str | None:
    kind = get_layer_kind(layer)
    return f"{kind} is a broadcastable layer" if kind in _BROADCASTABLE else None


@layer_rule("NN102", "nd-layer", "ND layers (layers of Core ML 3 for tensors of any rank) do not run on the ANE.",
            cite_2020_layer_list("layers with ND in their name do not run on the ANE: ConcatND, SplitND, "
                                 "LoadConstantND and others; replace them by the classic ones"),
            confidence="low")
def _find_nd(layer: Any, view: NetworkView) -> str | None:
    kind = get_layer_kind(layer)
    if kind not in _ND_KINDS:
        return None
    named = "" if "ND" in kind else "; the list names those with ND in their name, and 'others'"
    return f"{kind} is a layer for values of any rank{named}"


@layer_rule("NN103", "custom-layer", "Custom layers run on CPU or GPU, never on the ANE.",
            cite_2020_layer_list("custom layers can only have implementations for CPU and GPU"), confidence="high",
            advice="Split the model: the part before the custom layer can run on the ANE.")
def _find_custom(layer: Any, view: NetworkView) -> str | None:
    return "a custom layer" if get_layer_kind(layer) == "custom" else None


@layer_rule("NN104", "recurrent-layer", "Recurrent layers do not run on the ANE.",
            cite_2020_layer_list("RNN layers such as LSTM or GRU do not run on the ANE"), confidence="high")
def _find_recurrent(layer: Any, view: NetworkView) -> str | None:
    kind = get_layer_kind(layer)
    return f"{kind} is a recurrent layer" if kind in _RECURRENT else None


@layer_rule("NN105", "gather-layer", "Gathers and scatters do not run on the ANE.",
            cite_2020_layer_list("gather does not run on the ANE"))
def _find_gather(layer: Any, view: NetworkView) -> str | None:
    kind = get_layer_kind(layer)
    return f"{kind} selects by index" if kind in _GATHERS else None


@layer_rule("NN106", "dilated-convolution-layer", "Dilated convolutions do not run on the ANE.",
            cite_2020_layer_list("dilated convolutions do not run on the ANE"),
            Community("(dilated) kernel width = 28 > 13", source="hollance/neural-engine issue 2", date="2020"))
def _find_dilated(layer: Any, view: NetworkView) -> str | None:
    if get_layer_kind(layer) != "convolution" or layer.convolution.isDeconvolution:
        return None
    dilations = [int(each) for each in layer.convolution.dilationFactor]
    return f"dilations {dilations}" if max(dilations, default=1) > 1 else None


@layer_rule("NN107", "channel-broadcast-layer", "A classic layer that broadcasts channels may leave the ANE.",
            cite_2020_layer_list("certain broadcasts, such as the product of CxHxW and Cx1x1, do not run on the ANE"),
            confidence="low")
def _find_channel_broadcast(layer: Any, view: NetworkView) -> str | None:
    if get_layer_kind(layer) not in ("add", "multiply", "max", "min") or len(layer.input) < 2:
        return None
    shapes = [view.get_shape(name) for name in layer.input]
    images = [shape[-3:] for shape in shapes if shape is not None and len(shape) >= 3]
    small = [shape for shape in images if shape[0] != 1 and shape[1:] == (1, 1)]
    large = [shape for shape in images if shape[1:] != (1, 1)]
    return "it broadcasts [C, 1, 1] over [C, H, W]" if small and large else None


@layer_rule("NN108", "pooling-window-layer", "Poolings with a window over 13 or a stride over 2 leave the ANE.",
            cite_2020_layer_list("poolings with a window over 13 or a stride over 2 do not run on the ANE"))
def _find_pooling(layer: Any, view: NetworkView) -> str | None:
    if get_layer_kind(layer) != "pooling" or layer.pooling.globalPooling:
        return None
    window, stride = list(layer.pooling.kernelSize) or [3, 3], list(layer.pooling.stride) or [1, 1]
    if max(window) > MAX_POOL_SIDE:
        return f"window {'x'.join(map(str, window))} has a side over {MAX_POOL_SIDE}"
    return f"stride {'x'.join(map(str, stride))} is over {MAX_POOL_STRIDE}" if max(stride) > MAX_POOL_STRIDE else None


@layer_rule("NN109", "upsampling-layer", "Upsampling by more than 2 leaves the ANE.",
            cite_2020_layer_list("upsampling by factors over 2 does not run on the ANE"))
def _find_upsampling(layer: Any, view: NetworkView) -> str | None:
    if get_layer_kind(layer) != "upsample":
        return None
    params = layer.upsample
    factors = [f"{each:g}" for each in (*params.scalingFactor, *params.fractionalScalingFactor)]
    over = any(float(each) > MAX_UPSAMPLING for each in factors)
    return f"factors {' and '.join(factors)} are over {MAX_UPSAMPLING}" if over else None


@layer_rule("NN110", "control-flow-layer", "Loops and branches do not run on the ANE.",
            Community("control flow runs on the CPU: unroll it, or split the model",
                      source="smpanaro/more-ane-transformers src/experiments/NOTES.md", chip="M1 Pro", date="2023"))
def _find_control_flow(layer: Any, view: NetworkView) -> str | None:
    kind = get_layer_kind(layer)
    return f"a {kind} of layers" if kind in ("loop", "branch") else None


