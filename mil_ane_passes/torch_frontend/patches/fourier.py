"""`torch.fft` with default arguments, its two-dimensional forms, and the conjugate.

The host's lowerings want all four arguments, which only TorchScript writes; torch.export leaves out what is default.
Its inverse transforms take no real numbers, which have an imaginary part of zero.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add, bind, cast, python
from ..probing import lowered_by_host, wrong

PATCH = Patch(
    code="ANE920",
    title="`torch.fft` fails with default arguments (torch.export); `fft2` and `conj` are not implemented",
    upstream=("https://github.com/apple/coremltools/issues/2130",),
)
_ONE = ("fft_fft", "fft_rfft", "fft_ifft", "fft_irfft")
_TWO = ("fft_fft2", "fft_rfft2", "fft_ifft2", "fft_irfft2")
_MANY = ("fft_fftn", "fft_rfftn", "fft_ifftn", "fft_irfftn")


@PATCH.probe
def probe() -> str | None:
    import torch

    missing = sorted(kind for kind in PATCH.ops if not lowered_by_host(kind))
    if missing:
        return f"not implemented: {', '.join(missing)}"
    return wrong(lambda x: torch.fft.rfft(x).real, torch.arange(4.), exporting=True) \
        or wrong(lambda x: torch.fft.fft2(x).conj().imag, torch.arange(4.).reshape(2, 2))


@PATCH.op(*_ONE)
def along_one_axis(context: Any, node: Any) -> None:
    """fft_rfft(self, n=None, dim=-1, norm=None)."""
    given = bind(context, node, "self n=None dim=-1 norm=None")
    arguments = {"n": python(given.n, node, "n"), "dim": python(given.dim, node, "dim"),
                 "norm": python(given.norm, node, "norm")}
    _transform(context, node, given.self, arguments)


@PATCH.op(*_TWO, *_MANY)
def along_axes(context: Any, node: Any) -> None:
    """fft_rfftn(self, s=None, dim=None, norm=None), fft_rfft2(self, s=None, dim=[-2, -1], norm=None)."""
    given = bind(context, node, f"self s=None dim={'None' if node.kind.endswith('n') else '[-2,-1]'} norm=None")
    sizes, axes = python(given.s, node, "s"), python(given.dim, node, "dim")
    if sizes is not None and axes is None:
        axes = list(range(-len(sizes), 0))
    _transform(context, node, given.self, {"shapes": sizes, "dims": axes, "norm": python(given.norm, node, "norm")})


def _transform(context: Any, node: Any, x: Var, arguments: dict[str, Any]) -> None:
    kind = node.kind.partition(".")[0].removeprefix("fft_")
    if "i" in kind and not types.is_complex(x.dtype):
        x = cast(x, types.fp32)
        x = mb.complex(real_data=x, imag_data=mb.fill_like(ref_tensor=x, value=0.0))
    builder = getattr(mb, "complex_" + (kind[:-1] + "n" if kind.endswith("2") else kind))
    context.add(builder(data=x, **{name: value for name, value in arguments.items() if value is not None}), node.name)


@PATCH.op("_conj", "conj", "conj_physical", "_conj_physical", "resolve_conj", "resolve_neg")
def conjugate(context: Any, node: Any) -> None:
    """conj(self): the imaginary part with the other sign; a real tensor as it is."""
    x = bind(context, node, "self").self
    if types.is_complex(x.dtype) and "conj" in node.kind and "resolve" not in node.kind:
        x = mb.complex(real_data=mb.complex_real(data=x), imag_data=mb.mul(x=mb.complex_imag(data=x), y=-1.0))
        context.add(x, node.name)
        return
    if types.is_complex(x.dtype):
        context.add(x, node.name)
        return
    add(context, node, mb.identity(x=x, name=node.name))
