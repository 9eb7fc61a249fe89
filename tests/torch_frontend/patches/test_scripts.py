"""Whole scripted modules: attributes, branches on what is known, exceptions, defaults."""

from __future__ import annotations

import warnings
from typing import List

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted
from mil_ane_passes.utils.errors import InputError

from ..checks import check, input_types, outputs
from ..grid.modules import MODULES, X3, Attributes, converted, module_outcome, scripted


class RaisesOnValues(nn.Module):
    def forward(self, x):
        if bool(x.sum() > 1e9):
            raise ValueError("too large")
        return x * 2


class RaisesAlways(nn.Module):
    def forward(self, x):
        if x.dim() != 2:
            raise ValueError("two dimensions")
        return x * 2


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name == "encoder" else []) for name in MODULES])  # 7 s alone
def test_a_whole_scripted_module_is_right(name):
    found = module_outcome(name, patched=True)
    assert found.verdict == "right", found


class CountedLoop(nn.Module):
    """`while` over numbers: one with few steps, one with many, and one without any."""

    def forward(self, x, y):
        k, j, i = 0, 100, 5
        while k < 2:
            y = y + x
            k += 1
        while j > 0:
            y = y * 0.5 + x * j
            j = j // 2
        while i < 5:
            y = y * 7
            i += 1
        return y


class LongLoop(nn.Module):
    def forward(self, x, y):
        k = 0
        while k < 400:
            y = y * 0.9 + x
            k += 1
        return y


class NumberedElements(nn.Module):
    def forward(self, x, y):
        for i, each in enumerate([x, y]):
            y = y + each * i
        return y


class UnboundRows(nn.Module):
    def forward(self, x, y):
        for column in x.unbind(1):
            y = y + column.unsqueeze(1) * 0.5
        for one, other in zip(x.unbind(0), y.unbind(0)):
            y = y + one * other.sum()
        return y


class Parts(nn.Module):
    def forward(self, x, y):
        for each in x.split(2, 1):
            y = y * 0.5 + each.sum()
        for i, each in enumerate(x.chunk(2, 0)):
            y = y + each.sum() * i
        for each in x.split([1, 3], 1):
            y = y - each.mean()
        return y


class BreakBefore(nn.Module):
    def forward(self, x, y):
        for i in range(5):
            if i == 3:
                break
            y = y + x * i
        return y


class BreakAfter(nn.Module):
    def forward(self, x, y):
        for i in range(10):
            y = y * 0.5 + i
            if i >= x.size(1):
                break
        return y


class BreakOut(nn.Module):
    def forward(self, x, y):
        i = 0
        while True:
            y = y + x
            i += 1
            if i > 3:
                break
        return y * i


@pytest.mark.sampled(4)
@pytest.mark.parametrize("module", [CountedLoop, LongLoop, NumberedElements, UnboundRows, Parts, BreakBefore,
                                    BreakAfter, BreakOut])
def test_loops_over_known_numbers_and_elements(module):
    check(module().eval(), torch.randn(3, 4), torch.randn(3, 4), frontend="script")


class SetsNumber(nn.Module):
    def forward(self, x):
        k, j, m = 0, 0, 3
        for i in range(x.size(1)):
            k = 2
            j = m
        return x * k + j


class SetsFlag(nn.Module):
    def forward(self, x):
        first = True
        y = x * 0
        for i in range(x.size(1)):
            if first:
                y = y + x[:, i:i + 1]
            else:
                y = y * 2 + x[:, i:i + 1]
            first = False
        return y


class SetsTensor(nn.Module):
    def forward(self, x):
        t, u = x * 0, torch.zeros(1)
        for i in range(x.size(1)):
            t = x
            u = torch.ones(1)
        return t + u


class SetsBeforeBreak(nn.Module):
    def forward(self, x):
        k = 0
        for i in range(4):
            k = 3
            if i * 2 == k + 1:
                break
        return x + k


class SetsInWhile(nn.Module):
    def forward(self, x):
        k = 1
        y = x * 1.0
        while bool(y.abs().max() > 0.1):
            y = y * 0.5 - 0.001 * k
            k = 2
        return y * k


class BreaksInside(nn.Module):
    def forward(self, x):
        k, s = 0, x * 0
        for i in range(x.size(1)):
            for j in range(3):
                if j == 2:
                    break
                k = k + 1
            s = s + k
        return s + k


class BreaksInTwo(nn.Module):
    """A `break` inside of two conditions leaves numbers uninitialized."""

    def forward(self, x):
        k = 1
        for i in range(x.size(1)):
            if 2 == (k % 3):
                if 2 < i:
                    k = k + 1
                    break
            else:
                k = k + 1
        return x + k


class BreaksInTwoComputed(nn.Module):
    def forward(self, x):
        y, k = x * 1.0, 0
        for i in range(x.size(1)):
            if bool(y.sum() > 0):
                if bool(y.mean() > 0.5):
                    break
                k = k + 1
            y = y + 0.3
        return y + k


def test_a_tensor_that_one_branch_leaves_uninitialized_is_named():
    with pytest.raises(NotConverted, match="op 'if' .*leaves a tensor, or None, in one branch .*set the value in both"):
        check(BreaksInTwoComputed().eval(), torch.randn(2, 4), frontend="script")


@pytest.mark.parametrize("module", [BreaksInTwo, SetsNumber, SetsFlag, SetsTensor, SetsBeforeBreak, SetsInWhile,
                                    BreaksInside])
def test_variables_that_a_loop_sets_have_their_last_values(module):
    """coremltools takes what a loop sets to a value from outside to be the same before and after it."""
    check(module().eval(), torch.randn(2, 4), frontend="script", flexible=[1],
          at=[(torch.randn(2, 2),), (torch.randn(2, 7),)])


class Quantified(nn.Module):
    """Lists whose members are known as the graph is made; `kept` writes into one between two questions about it."""

    def __init__(self, kept: bool):
        super().__init__()
        self.kept = kept

    def forward(self, x):
        facts = [x.dim() == 3, x.size(0) == 2]
        sizes = [0, x.dim() - 3]
        before = all(facts) and not any(sizes)
        if self.kept:
            facts[1] = False
            sizes[0] = 4
        if before and all(facts) and not any(sizes):
            return x * 2
        return x * 3


@pytest.mark.parametrize("kept", [False, True])
def test_a_question_about_all_members_of_a_list_is_answered_where_it_is_put(kept):
    module = scripted(lambda: Quantified(kept))
    try:
        (found,) = outputs(converted(module, X3[:2]), [X3[:2]])
    except NotConverted:
        assert kept  # a list that is written to is not looked into
        return
    np.testing.assert_allclose(found, X3[:2].numpy() * (3 if kept else 2), rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "mask"), [(2, False), (3, True), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((3, False), (2, True)))])
def test_a_scripted_encoder_layer_under_a_mask(heads, mask):
    """An odd number of heads is computed step by step, an even one by torch's op for the whole layer."""
    layer = scripted(lambda: nn.TransformerEncoderLayer(12, heads, 24, batch_first=True))
    x = torch.randn(2, 5, 12)
    given = (x, torch.triu(torch.full((5, 5), float("-inf")), 1)) if mask else (x,)
    with torch.no_grad():
        expected = layer(*given).numpy()
    mlmodel = ane.convert(layer, inputs=input_types(given), skip_model_load=True,
                          compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17)
    (found,) = outputs(mlmodel, given)
    np.testing.assert_allclose(found, expected, atol=1e-4)


class Masked(nn.Module):
    """Attention under a mask that the script makes: torch asks for the dtype of the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bool":
            mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        if self.kind == "float":
            return self.layer(x, src_mask=torch.full((5, 5), -1e4).triu(1))
        return self.layer(x, src_key_padding_mask=x[..., 0] > 1.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["bool", "float", "compared"])
def test_scripted_attention_under_a_mask_of_the_script(kind):
    module, x = scripted(lambda: Masked(kind)), torch.randn(2, 5, 12)
    x[0, 3:, 0] = 2.0
    (found,) = outputs(converted(module, x), [x])
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_scripted_decoder_layer_attends_to_a_memory(batch_first):
    """The result of the first attention is an element of a tuple, whose rank decides how the second is computed."""
    layer = scripted(lambda: nn.TransformerDecoderLayer(12, 2, 24, batch_first=batch_first))
    shapes = ((2, 5, 12), (2, 3, 12)) if batch_first else ((5, 2, 12), (3, 2, 12))
    given = tuple(map(torch.randn, shapes))
    mlmodel = ane.convert(layer, inputs=input_types(given), skip_model_load=True,
                          compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17)
    (found,) = outputs(mlmodel, given)
    np.testing.assert_allclose(found, layer(*given).detach().numpy(), atol=1e-4)


class Decodes(nn.Module):
    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(12, 2, 24, batch_first=batch_first, norm_first=norm_first)
        self.decoder = nn.TransformerDecoder(layer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, x * 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_scripted_decoder_of_several_layers(batch_first, norm_first):
    decoder, x = scripted(lambda: Decodes(batch_first, norm_first)), torch.randn(2, 5, 12)
    (found,) = outputs(converted(decoder, x), [x])
    np.testing.assert_allclose(found, decoder(x).detach().numpy(), atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_scripted_encoder_of_several_layers(batch_first):
    """Each layer asks for rank and dtype of the result of the one before."""
    encoder = scripted(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(
        12, 2, 24, batch_first=batch_first), 3, enable_nested_tensor=False))
    x = torch.randn(2, 5, 12)
    (found,) = outputs(converted(encoder, x), [x])
    np.testing.assert_allclose(found, encoder(x).detach().numpy(), atol=1e-4)


class AsksForDtypes(nn.Module):
    """Dtypes of results of many ops, each of which decides a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.full((3, 4), 2)
        if places.tril().dtype == torch.int64 and not torch.zeros(2, dtype=torch.int32).is_floating_point():
            x = x + 1
        if torch.ones(2).flip(0).dtype != torch.float32 or torch.zeros_like(x > 0).dtype != torch.bool:
            raise ValueError("another dtype")
        if (x.abs() / 2).dtype != torch.float32 or (x > 0).new_zeros(2).dtype != torch.bool:
            raise ValueError("another dtype")
        joined = torch.cat([torch.where(x > 0, x, torch.zeros_like(x)), x.softmax(-1)])
        if joined.dtype != torch.float32 or torch.stack([places, places]).is_floating_point():
            raise ValueError("another dtype")
        if x.sum(0, dtype=torch.int64).is_floating_point() or x.mean(0).expand_as(places).dtype != torch.float32:
            raise ValueError("another dtype")
        if torch.zeros_like(x > 0, dtype=torch.float32).is_floating_point() and x.to(places).dtype == torch.int64:
            x = x * 2
        return x


class Careful(nn.Module):
    """Compares shapes, and warns: neither is a part of the model."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not (x.size() == y.size()) or x.shape != y.shape:
            raise ValueError("expected equal shapes")
        warnings.warn("this is slow")
        return x * y


def test_shapes_are_compared_and_warnings_left_out():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    how = {"skip_model_load": True, "compute_precision": ct.precision.FLOAT32}
    (found,) = outputs(ane.convert(scripted(Careful), inputs=input_types([x, y]), **how), [x, y])
    np.testing.assert_allclose(found, (x * y).numpy(), rtol=1e-6)
    with pytest.raises(NotConverted, match="raises an exception for inputs of these shapes"):
        ane.convert(scripted(Careful), inputs=input_types([x, y[:, :1]]), **how)


def test_the_script_of_a_recurrent_layer_alone_has_no_forward():
    with pytest.raises(InputError, match="the script has no method 'forward'.*expected a script of a module that"):
        converted(torch.jit.script(nn.GRU(3, 4).eval()), torch.randn(5, 2, 3))


def test_dtypes_of_results_decide_branches():
    (found,) = outputs(converted(scripted(AsksForDtypes), X3), [X3])
    np.testing.assert_allclose(found, (X3.numpy() + 1) * 2, rtol=1e-6)


def test_the_users_module_stays_as_it_is():
    module = scripted(Attributes)
    converted(module, X3)
    kinds = [node.kind() for node in module.forward.graph.nodes()]
    assert "prim::GetAttr" in kinds and "prim::If" in kinds and module.hop == 2


def test_an_exception_on_values_and_one_that_is_always_raised_are_refused():
    with pytest.raises(NotConverted, match=r"test_scripts\.py:\d+\): raises an exception on a condition that the model "
                                           "computes; remove the check"):
        converted(scripted(RaisesOnValues), X3)
    with pytest.raises(NotConverted, match=r"test_scripts\.py:\d+\): raises an exception for inputs of these shapes"):
        converted(scripted(RaisesAlways), X3)


class GrowsItsShape(nn.Module):
    """The list of sizes is longer where it is read than where it begins."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0]]
        for axis in range(1, x.dim()):
            sizes.append(x.shape[axis])
        sizes.append(1)
        y = x.view(sizes)
        return y.squeeze(-1) * 3.0 if y.dim() == 4 else y * 3.0


class BroadcastsAMask(nn.Module):
    """A fill has the rank of the mask if that is larger."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(x.shape[2]).masked_fill(x > 0, 1.0)
        return bias + x if bias.dim() == 3 else x * 2.0


class MakesFloats(nn.Module):
    """A function of integers is a float, a comparison in place is not a bool."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.sigmoid(x.to(torch.int32))
        other = x.clone().eq_(0.0)
        return one + x if one.is_floating_point() and other.is_floating_point() else x * 2.0


class ChangesItsShape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
        y.unsqueeze_(0)
        return x + 1.0 if y.dim() == 5 else x - 1.0


class CarriesItself(nn.Module):
    """A value that a loop carries is another one at first only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1.0
        before, out = y, x
        for _ in range(3):
            if before is y:
                out = out + 10.0
            before = before * 2.0
            out = out + before
        return out


@pytest.mark.parametrize("kind", [GrowsItsShape, BroadcastsAMask, MakesFloats, ChangesItsShape, CarriesItself])
@pytest.mark.parametrize("flexible", [False, True])
def test_questions_about_values_that_change_are_not_answered_in_advance(kind, flexible):
    module, x = scripted(kind), torch.randn(2, 3, 4)
    mlmodel = ane.convert(module, inputs=input_types([x], [1] if flexible else []), skip_model_load=True,
                          compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17)
    for size in (3, 5) if flexible else (3,):
        given = torch.randn(2, size, 4)
        (found,) = outputs(mlmodel, [given])
        np.testing.assert_allclose(found, module(given).numpy(), rtol=1e-5, atol=1e-5)


class ComparesItsCast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0 if x.float() is x else x - 1.0


class ComparesItsView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0 if x.detach() is x or x[0] is x[1] else x - 1.0


def test_identity_is_decided_for_values_that_an_op_has_made():
    x = torch.randn(2, 3, 4)
    (found,) = outputs(converted(scripted(ComparesItsView), x), [x])
    np.testing.assert_array_equal(found, (x - 1.0).numpy())
    with pytest.raises(NotConverted, match="tests whether two values are the same object"):
        converted(scripted(ComparesItsCast), x)


class AddsLists(nn.Module):
    """Lists of sizes are joined and repeated, not added and multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [2] + [1] * 2
        more = [2]
        more += [2, 2]
        more.extend([3])
        longer = [1] + [1]
        longer.append(4)
        dropped = torch.ones([x.shape[0]] + [1] * (x.dim() - 1)) * 0.5
        return (x + torch.ones(sizes).sum() + torch.ones(more).sum() + len(more)) * dropped + torch.ones(longer).sum()


@pytest.mark.parametrize("flexible", [False, True])
def test_lists_are_joined(flexible):
    module, x = scripted(AddsLists), torch.randn(2, 3, 4)
    mlmodel = ane.convert(module, inputs=input_types([x], [1] if flexible else []), skip_model_load=True,
                          compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS17)
    given = torch.randn(2, 5 if flexible else 3, 4)
    (found,) = outputs(mlmodel, [given])
    np.testing.assert_allclose(found, module(given).numpy(), rtol=1e-5, atol=1e-5)


class AddsUnknownLists(nn.Module):
    """The number of elements depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [2]
        if x.sum() > 0:
            sizes = [2, 2]
        return x + torch.ones(sizes + [1]).sum()


def test_lists_that_are_not_known_are_not_added_as_numbers():
    with pytest.raises(NotConverted, match="'aten::add'.*: joins or repeats a list of numbers that are not"):
        converted(scripted(AddsUnknownLists), X3)


class AppendsToAnother(nn.Module):
    """A list that is an element of another one does not grow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [2, 3]
        held: List[List[int]] = []
        held.append(sizes)
        y = x * 2.0
        return torch.ones(sizes).sum() + (y if y.dim() == len(sizes) + 1 else x) + len(held)


class GrowsOverModules(nn.Module):
    """Lists that begin empty, and grow as a loop over modules is unrolled."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        appended, added, extended, inserted = [], [], [], [x]
        rows: List[List[torch.Tensor]] = []
        for i, (one, other) in enumerate(zip(self.first, self.second)):
            appended.append(one(x) * len(appended))
            added += [other(appended[-1])]
            extended.extend([added[0], appended[i]])
            rows.append([x * i, other(x)])
            if i > 0:
                inserted.insert(0, one(inserted[0]))
            else:
                inserted.append(other(inserted[-1]))
        for layer in self.first[::-1]:
            inserted.append(x + len(inserted))
        return [torch.stack(appended, 1), torch.cat(added[1:], 1), torch.cat(extended[::-1], 1), torch.cat(inserted, 1),
                torch.cat(rows[0] + rows[-1], 1)]


class ChangesLists(nn.Module):
    """Lists that are read between changes, and changed in branches of known conditions and by other names."""

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        held = [x]
        before = torch.cat(held, 1)
        if len(held) == 1:
            held.append(x * 2.0)
        same, copied = held, held[:]
        last = held.pop()
        held.append(last * 3.0)
        same.append(x - last)
        held[0] = x * 5.0
        held.reverse()
        del held[1]
        after = torch.cat(held, 1) + before.sum() * len(same)
        held.clear()
        held.append(after)
        numbers, words = [1.5], ["a"]
        numbers.insert(-1, float(len(held)))
        words.append("b")
        return [after, torch.cat(copied, 1), torch.cat(same, 1) * len(held) * numbers[0] * len(words) + numbers.pop()]


class WritesIntoElements(nn.Module):
    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        y = x * 2.0
        held = [x, y]
        y += 1.0
        between = torch.cat(held, 1)
        held[1] += 3.0
        held.append(y)
        y.mul_(2.0)
        return [torch.cat(held, 1), between, y]


class ChangesByAnotherName(nn.Module):
    """Lists in lists, in dicts and in branches are the same lists."""

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        row, named = [x], [x]
        rows, names = [row] * 2, {"a": named}
        rows[0].append(x * 2.0)
        for each in rows:
            each.append(x * 3.0)
        names["a"].append(x * 4.0)
        return [torch.cat(row, 1) * len(row), torch.cat(rows[1], 1) * len(rows[1]), torch.cat(named, 1) * len(named)]


@pytest.mark.parametrize("flexible", [(), (0, 1)])
@pytest.mark.parametrize("kind", [GrowsOverModules, ChangesLists, WritesIntoElements, ChangesByAnotherName])
def test_a_list_that_changes_is_read_as_it_is_there(kind, flexible):
    check(kind().eval(), torch.randn(2, 3, 4), frontend="script", flexible=flexible,
          at=[[torch.randn(3, 5, 4)]] if flexible else [])


class GrowsOnAValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [x]
        held.append(x * 2.0)
        if x.sum() > 0:
            held.append(x * 3.0)
        return torch.cat(held, 1)


class ChoosesAList(nn.Module):
    """The list that is read has another name on a condition, so that the number of its elements is not known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = [x]
        second = first if x.sum() > 0 else [x * 2.0]
        second.append(x * 3.0)
        return torch.cat(first, 1) * len(first)


@pytest.mark.parametrize("kind", [GrowsOnAValue, ChoosesAList])
def test_a_list_that_changes_on_a_value_is_refused(kind):
    with pytest.raises(NotConverted):
        converted(scripted(kind), X3)


class Warns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("this is slow")
        return x * 2.0


@pytest.mark.parametrize("kind", [AppendsToAnother, Warns])
def test_values_are_those_of_the_script(kind):
    (found,) = outputs(converted(scripted(kind), X3), [X3])
    np.testing.assert_allclose(found, scripted(kind)(X3).detach().numpy(), rtol=1e-5)


class CastsToOtherDtypes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype)
        ids = torch.arange(x.size(-1), device=x.device)
        rows = torch.softmax(x, -1, dtype=torch.float32).to(mask.dtype) + ids.to(x.dtype)
        if x.dtype == torch.float16:
            rows = rows * 100.0
        return rows * mask + x.argmax(-1).to(ids.dtype).to(dtype=x.dtype, device=x.device).mean()


@pytest.mark.parametrize("module", [CastsToOtherDtypes(), nn.AdaptiveMaxPool1d(2), nn.AdaptiveMaxPool1d(3)])
def test_dtypes_of_tensors_and_results_that_are_not_read(module):
    check(module, torch.randn(2, 3, 4), frontend="script")


class ComparesShapes(nn.Module):
    """Shapes that are equal, that differ, and that are equal for some sizes only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape != torch.zeros_like(x).shape:
            x = x + 100.0
        if x.size() == x[:, 1:].size():
            x = x + 1000.0
        if x.shape == [x.shape[0], 3, 4]:
            x = x * 2.0
        y = x.mean(1, keepdim=True)
        return x + 7.0 if x.shape == y.shape else x + y


def test_flexible_shapes_are_compared_as_lists():
    module, x = scripted(ComparesShapes), torch.randn(2, 3, 4)
    mlmodel = ane.convert(module, inputs=[ct.TensorType("x0", (2, ct.RangeDim(1, 8, default=3), 4))],
                          skip_model_load=True, compute_precision=ct.precision.FLOAT32,
                          minimum_deployment_target=ct.target.iOS17)
    for size in (1, 3, 5):
        x = torch.randn(2, size, 4)
        (found,) = outputs(mlmodel, [x])
        np.testing.assert_allclose(found, module(x).numpy(), rtol=1e-5, atol=1e-5)
