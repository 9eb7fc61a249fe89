"""The grid's forms: each a body of Python that changes or reads `x`, as source, so that TorchScript can compile it.

A form is text with placeholders: `{last}` the last axis, `{n}` its size; it is tried on every rank it names.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMS", "Form"]


@dataclass(frozen=True)
class Form:
    """`body` works on `x` (and on `y`, `i` or `m` where it names them); it ends in a return."""

    name: str
    body: str
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    dtypes: tuple[str, ...] = ("float32",)
    frontends: tuple[str, ...] = ("trace", "script", "export")
    flexible: bool = True


_WIDE = ("float32", "int32", "bool")
_NUMBERS = ("float32", "int32")

FORMS = (
    # slices and selects
    Form("last element += 1", "x[..., -1] += 1", dtypes=_NUMBERS),
    Form("last element = 0", "x[..., -1] = 0", dtypes=_WIDE),
    Form("first element = second", "x[..., 0] = x[..., 1]", dtypes=_WIDE),
    Form("part *= 2", "x[..., :3] *= 2", dtypes=_NUMBERS),
    Form("part from the end = value", "x[..., -2:] = 5"),
    Form("every second = 0", "x[..., ::2] = 0", dtypes=_NUMBERS),
    Form("every second from 1 = own", "x[..., 1::2] = x[..., 0::2][..., :x[..., 1::2].shape[-1]]", flexible=False),
    Form("first axis: row = 0", "x[0] = 0", dtypes=_WIDE),
    Form("first axis: rows += last row", "x[1:3] += x[-1]", ranks=(2, 3, 4)),
    Form("middle axis: = 1.5", "x[:, 0] = 1.5", ranks=(2, 3, 4)),
    Form("middle axis: slice = 0", "x[:, 1:3] = 0", ranks=(2, 3, 4)),
    Form("two slices at once", "x[1:, :-1] = 7", ranks=(2, 3, 4)),
    Form("select of select", "x[1][0] = 3", ranks=(2, 3, 4)),
    Form("newaxis and ellipsis", "x[None, ..., 0] = 4"),
    Form("select().fill_()", "x.select(-1, 0).fill_(2)"),
    Form("whole tensor = value", "x[:] = 3", dtypes=_WIDE),
    Form("broadcast row", "x[:] = x[0].clone()", ranks=(2, 3)),
    # other views
    Form("narrow().add_()", "x.narrow(-1, 1, 2).add_(1)"),
    Form("view(-1)[0]", "x.view(-1)[0] = 9"),
    Form("view += then read x", "y = x.view(-1)\n    y += 1"),
    Form("transpose += 1", "x.transpose(0, -1)[0] += 1", ranks=(2, 3, 4)),
    Form("t().mul_()", "x.t().mul_(2)", ranks=(2,)),
    Form("permute", "x.permute({reversed}).mul_(3)", ranks=(2, 3, 4)),
    Form("chunk", "a, b = x.chunk(2, -1)\n    a.clamp_(0)\n    b += 1", flexible=False),
    Form("split", "a = x.split(2, -1)\n    a[0].mul_(5)", flexible=False),
    Form("unbind", "a = x.unbind(-1)\n    a[1].add_(2)", flexible=False),
    Form("squeeze and unsqueeze", "x.unsqueeze(0).squeeze(0)[..., 1] = 6"),
    Form("diagonal", "x.diagonal().zero_()", ranks=(2,), flexible=False),
    Form("diagonal of the last two", "x.diagonal(1, -2, -1).add_(10)", ranks=(2, 3, 4), flexible=False),
    Form("expand_dims chain", "x.unsqueeze(1)[:, 0][..., 0] = 8"),
    Form("a view read after a write to the base", "y = x[..., 1:3]\n    x += 10\n    y *= 2"),
    Form("reshape of contiguous", "x.reshape(-1)[1] = 5"),
    Form("flatten", "x.flatten()[0] += 4"),
    Form("detach", "x.detach()[..., 0] = 1"),
    # in-place ops
    Form("clamp_", "x[..., 1:3].clamp_(0)", dtypes=_NUMBERS),
    Form("masked_fill_", "x[..., 1:].masked_fill_(x[..., 1:] > 0, 7)"),
    Form("relu_, sigmoid_", "x[..., 0:2].relu_()\n    x[..., 2:4].sigmoid_()"),
    Form("add_ with alpha", "x.add_(x, alpha=2)"),
    Form("sub_, div_", "x[..., 0].sub_(1)\n    x[..., 1].div_(4)"),
    Form("zero_ of the whole", "x.zero_()\n    x += 1"),
    Form("copy_ broadcasts", "x.copy_(x[0].clone())", ranks=(2, 3)),
    Form("unsqueeze_", "x.unsqueeze_(0)\n    x[0, ..., 0] = 2"),
    Form("int written into float", "x[..., 0] = 3\n    x[..., 1] = True"),
    # indices
    Form("list", "x[..., [0, 2]] = 1", dtypes=_WIDE, frontends=("trace", "export")),
    Form("list +=", "x[..., [0, 2]] += 1", dtypes=_NUMBERS, frontends=("trace", "export")),
    Form("list of rows = rows", "x[[0, 2]] = x[[2, 1]]", frontends=("trace", "export")),
    Form("int and list", "x[0, ..., [1, 2]] = 4", ranks=(2, 3, 4), frontends=("trace", "export")),
    Form("two lists", "x[[0, 1], [2, 0]] = 6", ranks=(2, 3, 4), frontends=("trace", "export")),
    Form("slice and list", "x[1:, [0, 3]] = -1", ranks=(2, 3), frontends=("trace", "export")),
    Form("negative indices", "x[..., [-1, 0]] = 2", frontends=("trace", "export")),
    Form("mask of itself", "x[x > 0.5] = 0", dtypes=_NUMBERS),
    Form("mask +=", "x[x > 0] += 1"),
    Form("mask, values picked", "x[x > 0] = x[x > 0] * 2", ranks=(1, 2)),
    Form("mask of rows", "x[x[:, 0] > 0] = 0", ranks=(2, 3)),
    Form("mask behind a slice", "x[1:][x[1:] > 0] = -2", ranks=(1, 2)),
    Form("index_put_ accumulate", "x.index_put_((torch.tensor([0, 0, 1]),), torch.ones(1), accumulate=True)"),
    Form("index_fill_", "x.index_fill_(-1, torch.tensor([0, 2]), 3)", frontends=("trace", "export")),
    Form("index_add_", "x.index_add_(0, torch.tensor([0, 2]), x[:2].clone())", frontends=("trace", "export"),
         flexible=False),
    Form("index_copy_", "x.index_copy_(0, torch.tensor([2, 0]), x[:2].clone())", frontends=("trace", "export"),
         flexible=False),
    # arithmetic and shapes
    Form("% 1", "x = x % 1"),
    Form("// 1", "x = x // 1"),
    Form("remainder of negatives", "x = torch.remainder(x, -1.5)"),
    Form("fmod", "x = torch.fmod(x, 1.5)"),
    Form("div floor", "x = torch.div(x, 1, rounding_mode='floor')", dtypes=_NUMBERS),
    Form("div trunc", "x = torch.div(x, 2, rounding_mode='trunc')", dtypes=_NUMBERS),
    Form("int * float", "x = x * 0.5", dtypes=_NUMBERS),
    Form("sin of ints", "x = torch.sin(x)", dtypes=_NUMBERS),
    Form("rsqrt of ints", "x = torch.rsqrt(x * x + 1)", dtypes=_NUMBERS),
    Form("zeros of a shape", "a, b = x.shape[0], x.shape[-1]\n    x = torch.zeros([a, b]) + a"),
    Form("int arithmetic of sizes", "n = int(x.shape[0] * 2) // 2 + 1\n    x = torch.ones(n, 2) * n"),
    Form("arange of a size", "x = torch.arange(x.shape[-1]) + x", dtypes=_NUMBERS),
    Form("new_ones", "x = x + x.new_ones(x.shape[-1])"),
    Form("roll", "x = torch.roll(x, 1, -1)"),
    Form("diff", "x = torch.diff(x, dim=-1)"),
    Form("flip", "x = x.flip(-1)"),
    Form("triu of -inf", "x = torch.softmax(x + torch.full((5, 5), float('-inf')).triu(1), -1)", ranks=(2,),
         flexible=False),
)
