"""Functionalised TorchScript: no op writes, and torch itself, running the new graph, gives what the module gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from hypothesis import event, given, reject
from hypothesis import strategies as st

from mil_ane_passes.torch_frontend import NotConverted
from mil_ane_passes.torch_frontend.functional import functionalize_graph

from .checks import captured, check, convert
from .programs import OPS, VIEWS, program


def ran(module: Any, *inputs: torch.Tensor) -> Any:
    """What the functionalised graph of a TorchScript module gives; asserts that it is a valid graph without writes."""
    graph = module.inlined_graph.copy()
    functionalize_graph(graph)
    graph.lint()
    assert not [node.kind() for node in every_node(graph) if "!" in node.schema() and node.kind() != "aten::append"]
    return torch._C._create_function_from_graph("functional", graph)(module, *(value.clone() for value in inputs))


def every_node(block: Any) -> list[Any]:
    return [inner for node in block.nodes() for inner in [node, *(n for b in node.blocks() for n in every_node(b))]]


def same(function: Callable[..., Any], *inputs: torch.Tensor, frontend: str) -> None:
    expected = function(*(value.clone() for value in inputs))
    found = ran(captured(function, inputs, frontend), *inputs)
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (one, other)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


@pytest.mark.law
@given(st.data(), st.sampled_from(("trace", "script")))
def test_any_chain_of_views_and_writes(data: st.DataObject, frontend: str) -> None:
    """Random programs over a few names: views of views, writes to any of them, reads of all."""
    steps = data.draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([*VIEWS, *OPS])), min_size=1, max_size=8))
    function, x = program(steps), torch.arange(-12., 12.).reshape(2, 3, 4)
    try:
        function(x.clone())
    except (RuntimeError, IndexError):
        reject()  # not a program: a view of a view that torch cannot take, a write to overlapping memory
    try:
        same(function, x, frontend=frontend)
    except NotConverted as refusal:  # whether reshape copies is not always known, most of all in scripts
        assert "may share memory" in str(refusal) and {"reshape", "contiguous"} & {what for _, what in steps}
        event("refused")


def loop_writes(x: torch.Tensor) -> torch.Tensor:
    y = x[0]
    for i in range(x.shape[0]):
        x[i] += i
        y *= 2
    return x + y


def branch_writes(x: torch.Tensor) -> torch.Tensor:
    y = x.view(-1)
    if x.sum() > 0:
        y[0] = 5
    else:
        x[:, 1] -= 1
    return x


def branch_in_loop(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for i in range(3):
        if bool(x[0, 0] > i):
            total[0] += x[1]
        else:
            total[1, i] = float(i)
        x[0, 0] += 1
    return total


def carried(x: torch.Tensor) -> torch.Tensor:
    y = torch.ones(4)
    for i in range(3):
        y += x[0]
        y[i] = 0
    return y


def while_writes(x: torch.Tensor) -> torch.Tensor:
    i = 0
    while i < 3 and bool(x[0, 0] < 20):
        x[i] *= 3
        i += 1
    return x


def swapped(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4)
    z = torch.ones(4)
    for i in range(3):
        y += x[i]
        y, z = z, y
    return y - z


@pytest.mark.parametrize("function", [loop_writes, branch_writes, branch_in_loop, carried, swapped, while_writes])
@pytest.mark.parametrize("sign", [1, -1])
def test_writes_in_branches_and_loops(function: Callable[..., Any], sign: int) -> None:
    same(function, sign * torch.arange(1., 13.).reshape(3, 4), frontend="script")


def lists(x: torch.Tensor) -> torch.Tensor:
    parts = x.unbind(0)
    both = [parts[0], parts[1]]
    both[0].mul_(2)
    return torch.cat(both) + parts[0].sum() + torch.stack(x.chunk(3, 0)).sum()


def out_argument(x: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=x[:])
    return x


def renamed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x[1]
    y.unsqueeze_(0)
    y[0, 0] = 7
    x.t_()
    x[0, 1] = 8
    return x, y


@pytest.mark.parametrize("frontend", ["trace", "script"])
@pytest.mark.parametrize("function", [lists, out_argument, renamed])
def test_lists_out_arguments_and_views_in_place(function: Callable[..., Any], frontend: str) -> None:
    same(function, torch.arange(12.).reshape(3, 4), frontend=frontend)


def split_beside_a_write(x: torch.Tensor) -> torch.Tensor:
    parts = x.split([x.shape[1] // 4, x.shape[1] - x.shape[1] // 4], 1)
    y = torch.cat([parts[1] * 2, parts[0]], 1)
    y += 1
    return y


def split_written(x: torch.Tensor) -> torch.Tensor:
    parts = x.split([x.shape[1] // 4, x.shape[1] - x.shape[1] // 4], 1)
    parts[1].mul_(2)
    x[:, 0] -= 1
    return x + parts[0].sum() + parts[1].sum()


def equal_split_written(x: torch.Tensor) -> torch.Tensor:
    parts = x.split(x.shape[1] // 4, 1)
    parts[1].add_(3)
    x.mul_(2)
    return parts[3] * 2 + x[:, :1]


def tensor_split_written(x: torch.Tensor) -> torch.Tensor:
    parts = x.tensor_split([x.shape[1] // 4, x.shape[1] // 2], 1)
    parts[1].add_(3)
    return x * 1


def chunk_written(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(x.shape[1] // 2, 1)
    parts[1].add_(3)
    return x * 1


@pytest.mark.parametrize("frontend", ["trace", "script"])
@pytest.mark.parametrize("function", [
    split_beside_a_write, split_written, equal_split_written, tensor_split_written, chunk_written])
def test_parts_of_computed_sizes(function: Callable[..., Any], frontend: str) -> None:
    same(function, torch.arange(12.).reshape(3, 4), frontend=frontend)


@pytest.mark.parametrize("function", [split_beside_a_write, split_written, equal_split_written, tensor_split_written])
@pytest.mark.parametrize("frontend", ["trace", "script"])
def test_parts_of_computed_sizes_convert(function: Callable[..., Any], frontend: str) -> None:
    check(function, torch.arange(12.).reshape(3, 4), frontend=frontend)


def grown_sizes_read(x: torch.Tensor) -> torch.Tensor:
    sizes = [1]
    sizes.append(x.shape[1] - 1)
    parts = torch.split(x, sizes, 1)
    x *= 2
    return parts[1] * 1


def grown_sizes_written(x: torch.Tensor) -> torch.Tensor:
    sizes = [1]
    sizes.append(x.shape[1] - 1)
    torch.split(x, sizes, 1)[1].mul_(2)
    return x * 1


def test_a_split_by_a_list_that_grows_is_refused_only_where_a_part_is_written() -> None:
    x = torch.arange(12.).reshape(3, 4)
    same(grown_sizes_read, x, frontend="script")
    with pytest.raises(NotConverted, match=r"'aten::split' .*part 1 is written, and the list of sizes is computed; "
                                           "give the sizes as a list literal"):
        ran(captured(grown_sizes_written, (x,), "script"), x)


def test_dtype_of_the_written_tensor_stays() -> None:
    def write(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.to(torch.float16)
        half[0] += x[1]
        whole = x.to(torch.int64)
        whole[0] = x[1]
        return half, whole

    same(write, torch.arange(12.).reshape(3, 4) / 3, frontend="trace")


def test_comparisons_in_place_write_numbers() -> None:
    def write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positive, missing, both, kept = x * 1, x * 1, x * 1, (x * 1)[:2]
        positive.gt_(0)
        missing.logical_not_()
        missing += 0.5
        both.logical_and_(x > -1).mul_(3)
        kept[0].eq_(x[0])
        return positive + positive, missing, both, kept * 2

    same(write, torch.tensor([[-2.0, -0.5, 0.0], [0.0, 1.0, 3.0], [1.0, -1.0, 0.0]]), frontend="trace")


def unclear_reshape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x * y).transpose(0, 1)
    flat = torch.nn.functional.pad(z, [0, 0]).reshape(-1)
    kept = z.reshape(-1)
    kept[0] = 1
    return z + flat.sum()


def grown(x: torch.Tensor) -> torch.Tensor:
    parts = [x[0]]
    for i in range(2):
        parts.append(x[i])
    x[0, 0] = 5
    return torch.cat(parts)


def expanded(x: torch.Tensor) -> torch.Tensor:
    y = x[0].expand(3, 4)
    y += 1
    return x


def drawn(x: torch.Tensor) -> torch.Tensor:
    x[0].uniform_()
    return x


def swapped_views(x: torch.Tensor) -> torch.Tensor:
    y, z = x[0], x[1]
    for i in range(3):
        y += i
        y, z = z, y
    return x


@pytest.mark.parametrize("function, inputs, reason", [
    (unclear_reshape, 2, "may share memory with one that op 'aten::copy_' .* writes to"),
    (grown, 1, "reads a list with a tensor that was written after it was added"),
    (expanded, 1, "writes to an expanded tensor"),
    (swapped_views, 1, "reads a tensor that may share memory with one that op .aten::add_"),
    (drawn, 1, "generates random numbers in place"),
])
def test_what_cannot_be_followed_is_refused_with_its_line(function: Callable[..., Any], inputs: int,
                                                          reason: str) -> None:
    examples = [torch.arange(12.).reshape(3, 4)] * inputs
    with pytest.raises(NotConverted, match=reason) as refused:
        ran(captured(function, examples, "script"), *examples)
    assert "test_functional.py:" in str(refused.value)


def product_written(x: torch.Tensor) -> torch.Tensor:
    left, right, values = x.chunk(3, 0)
    scores = torch.einsum("ij,kj->ik", left, right)
    scores *= 0.5
    return torch.einsum("ij,jk->ik", scores, values)


def test_a_product_by_einsum_is_memory_of_its_own() -> None:
    for frontend in ("trace", "script"):
        same(product_written, torch.arange(12.).reshape(3, 4), frontend=frontend)


def from_einsum(x: torch.Tensor) -> torch.Tensor:
    y = torch.einsum("ij->ji", x)
    x.add_(1)
    return y * 1


def from_meshgrid(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.meshgrid([x[:, 0], x[0]], indexing="ij")
    x.add_(1)
    return a + b


def from_hsplit(x: torch.Tensor) -> torch.Tensor:
    a = torch.hsplit(x, 2)[0]
    a.add_(1)
    return x * 1


def from_list_slice(x: torch.Tensor) -> torch.Tensor:
    x.unbind(0)[1:][0].add_(1)
    return x * 1


def appended(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    parts = [x]
    parts.append(y)
    y.add_(10)
    return torch.stack(parts)


def appended_last(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    parts = [x, x]
    parts.append(y)
    parts[-1].add_(10)
    return y


def appended_between(x: torch.Tensor) -> torch.Tensor:
    parts = [x * 1]
    if bool(x.sum() > 0):
        x.add_(1)
        parts.append(x)
        x.add_(1)
    return torch.stack(parts)


def given_memory(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.resize_(2, 6)
    y.add_(1)
    return y


@pytest.mark.parametrize("function, why", [
    (from_einsum, "may share memory"), (from_meshgrid, "may share memory"), (from_hsplit, "may share memory"),
    (from_list_slice, "may share memory"), (appended, "written after it was added"),
    (appended_last, "may share memory"), (appended_between, "written after it was added"),
    (given_memory, "changes the memory or size")])
def test_what_hides_whose_memory_it_is_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(NotConverted, match=why):
        ran(captured(function, (torch.ones(3, 4),), "script"), torch.ones(3, 4))


def grown(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0] = 5
    parts = [y]
    parts.append(y + 1)
    sizes = [1]
    sizes.append(2)
    return torch.cat(parts).view(sizes[1], -1)


def mirrored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.T
    y[1:] += 1
    z = x.unsqueeze(0).mT
    z[:, 0] = 7
    torch.narrow(x, 0, -1, 1).mul_(3)
    return x, y


@pytest.mark.parametrize("function", [grown, mirrored])
def test_lists_that_grow_and_mirrored_axes(function: Callable[..., Any]) -> None:
    same(function, torch.arange(12.).reshape(3, 4), frontend="script")


def first_met_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if bool(x.sum() > 0):
        y[0] += 1
        x[1] = 5
    return y + x


def listed_before_a_branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    both = [y, x]
    for i in range(2):
        if bool(x[0, 0] > i):
            both[0].add_(i + 1)
    return y * 1


@pytest.mark.parametrize("function", [first_met_in_a_branch, listed_before_a_branch])
@pytest.mark.parametrize("sign", [1, -1])
def test_tensors_first_met_in_a_branch(function: Callable[..., Any], sign: int) -> None:
    same(function, sign * torch.arange(1., 13.).reshape(3, 4), frontend="script")


def begun_as_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y
    total = x * 0
    for _ in range(3):
        y.add_(1)
        total = total + z
        z = z * 2
    return total


def given_back(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = x * 3
    for _ in range(3):
        z = y
    z.add_(1)
    return y * 1


def one_of_two(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y if bool(x.sum() > 0) else x * 1
    z.add_(1)
    return y * 1


@pytest.mark.parametrize("function", [begun_as_written, given_back, one_of_two])
def test_names_that_are_now_one_tensor_now_another_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(NotConverted, match="may share memory"):
        ran(captured(function, (torch.ones(3, 4),), "script"), torch.ones(3, 4))


class _Kept(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(3, 4))
        self.also = self.k
        self.eval()


class _Branching(_Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            self.k[0] += x[0]
        else:
            self.k[1] += 1
        return self.k * 2


class _Assigning(_Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k += x
        self.k[1:] -= 1
        return self.also * 2


class _Replacing(_Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k[0] = 1
        self.k = torch.cat([self.k[1:], x[:1]])
        return self.k * 2


@pytest.mark.parametrize("kind, sign", [(_Branching, 1), (_Branching, -1), (_Assigning, 1)])
def test_a_scripted_buffer_is_one_tensor_wherever_it_is_read(kind: type[_Kept], sign: int) -> None:
    check(kind(), sign * torch.arange(1., 13.).reshape(3, 4), frontend="script")


def test_a_buffer_replaced_by_another_tensor_is_refused() -> None:
    with pytest.raises(NotConverted, match="assigns to the attribute 'k'"):
        convert(_Replacing(), (torch.ones(3, 4),), "script")


class _Uncertain(_Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown = self.k * 2
        self.k.as_strided((2, 2), (4, 1)).add_(x[:2, :2])
        return shown + x


def test_a_state_that_may_have_been_written_is_refused() -> None:
    state = ct.StateType(wrapped_type=ct.TensorType(shape=(3, 4), dtype=np.float16), name="k")
    with pytest.raises(NotConverted, match="writes to the state 'k', or possibly"):
        convert(_Uncertain(), (torch.ones(3, 4),), "trace", target=ct.target.iOS18, states=[state])


def whole_by_chance(x: torch.Tensor) -> torch.Tensor:
    y = x[:, :4].reshape(-1)
    y += 1
    return x * 1


def test_a_slice_that_takes_all_at_one_size_only_is_refused() -> None:
    with pytest.raises(NotConverted, match="may share memory"):
        convert(whole_by_chance, (torch.ones(3, 4),), "trace", flexible=(1,))
