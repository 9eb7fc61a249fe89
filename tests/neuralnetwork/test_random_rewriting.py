"""Random networks of broadcastable and ND layers: no rewrite changes the results, or fires twice on a layer."""

import random

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane

BINARY = ("add_add_broadcastable", "add_multiply_broadcastable", "add_max_broadcastable", "add_min_broadcastable",
          "add_subtract_broadcastable", "add_divide_broadcastable")


def thin(rng, shape):
    """A shape that broadcasts to `shape`: some axes 1, and maybe some leading ones left out."""
    sizes = [size if rng.random() < 0.5 else 1 for size in shape]
    return tuple(sizes[rng.randrange(len(sizes)) if rng.random() < 0.3 else 0:])


class Network:
    """A network that grows by random layers; `values` are the names and shapes of its values."""

    def __init__(self, seed):
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        rank = self.rng.choice((2, 3, 4, 4, 4, 5))
        shape = tuple(self.rng.choice((1, 2, 3, 4)) for _ in range(rank))
        self.builder = neural_network.NeuralNetworkBuilder(
            [("x", datatypes.Array(*shape))], [("out", None)], disable_rank5_shape_mapping=True)
        self.values = {"x": shape}
        self.count = 0

    def name(self):
        self.count += 1
        return f"v{self.count}"

    def grow(self):
        source = self.rng.choice(list(self.values))
        shape = self.values[source]
        getattr(self, self.rng.choice(("combine", "combine", "join", "cut", "weigh", "reduce", "move")))(source, shape)

    def combine(self, source, shape):
        other, target = self.name(), self.name()
        small = thin(self.rng, shape)
        if self.rng.random() < 0.5:
            numbers = self.numbers.uniform(0.5, 2, small) * self.numbers.choice((-1, 1), small)
            self.builder.add_load_constant_nd(f"constant {other}", other, numbers, small)
        else:
            axes = [axis for axis, size in enumerate(thin(self.rng, (2,) * len(shape))) if size == 1]
            self.builder.add_reduce_max(f"thin {other}", source, other, axes=axes or [0], keepdims=True,
                                        reduce_all=False)
        names = [source, other] if self.rng.random() < 0.6 else [other, source]
        getattr(self.builder, self.rng.choice(BINARY[:5] if names[1] == source else BINARY))(
            f"layer {target}", names, target)
        self.values[target] = shape

    def join(self, source, shape):
        target, axis = self.name(), self.rng.randrange(len(shape))
        self.builder.add_concat_nd(f"layer {target}", [source, source], target, axis=axis - self.rng.choice(
            (0, len(shape))))
        self.values[target] = tuple(size * (1 + (at == axis)) for at, size in enumerate(shape))

    def cut(self, source, shape):
        axis = self.rng.randrange(len(shape))
        if shape[axis] < 2:
            return
        first = self.rng.randrange(1, shape[axis])
        targets = [self.name(), self.name()]
        self.builder.add_split_nd(f"layer {targets[0]}", source, targets, axis=axis,
                                  split_sizes=[first, shape[axis] - first])
        for target, extent in zip(targets, (first, shape[axis] - first)):
            self.values[target] = tuple(extent if at == axis else size for at, size in enumerate(shape))

    def weigh(self, source, shape):
        target = self.name()
        self.builder.add_softmax_nd(f"layer {target}", source, target, self.rng.randrange(-len(shape), len(shape)))
        self.values[target] = shape

    def reduce(self, source, shape):
        target, axes = self.name(), sorted(self.rng.sample(range(len(shape)), self.rng.randrange(1, len(shape))))
        kind = self.rng.choice(("mean", "sum", "max", "min", "l2"))
        getattr(self.builder, f"add_reduce_{kind}")(
            f"layer {target}", source, target, axes=axes, keepdims=True, reduce_all=False)
        self.values[target] = tuple(1 if at in axes else size for at, size in enumerate(shape))

    def move(self, source, shape):
        target, axes = self.name(), list(range(len(shape)))
        self.rng.shuffle(axes)
        self.builder.add_transpose(f"layer {target}", axes, source, target)
        self.values[target] = tuple(shape[axis] for axis in axes)

    def finish(self):
        last = list(self.values)[-1]
        self.builder.add_activation("last", "TANH", last, "out")
        return self.builder.spec


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(24))
def test_random_networks_keep_their_results(seed, tmp_path):
    network = Network(seed)
    for _ in range(8):
        network.grow()
    spec = network.finish()
    (tmp_path / "in.mlmodel").write_bytes(spec.SerializeToString())
    report = ane.rewrite(tmp_path / "in.mlmodel", tmp_path / "out.mlmodel", preset="full", seeds=1)
    assert report.status in ("written", "unchanged"), str(report)
    # A reciprocal rounds, which a softmax of large values may make as large as anything.
    assert {each.rule for each in report.left_out_passes} <= {"replace_divide"}, str(report)
    assert report.off_ane_after <= report.off_ane_before
    made = ct.utils.load_spec(str(tmp_path / "out.mlmodel"))
    names = [layer.name for layer in made.neuralNetwork.layers]
    assert len(set(names)) == len(names) and made.description == spec.description
    again = ane.rewrite(tmp_path / "out.mlmodel", tmp_path / "again.mlmodel", preset="full", seeds=1)
    assert not again.changed, str(again)
