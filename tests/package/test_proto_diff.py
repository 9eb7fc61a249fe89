"""The diff that the other tests trust sees what it is for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from coremltools import proto

from .helpers import MODEL, WEIGHTS, linear_program, main_block, make, spec_of
from .proto_diff import Ops, blob, consts, proto_diff, reads
from .test_unchanged import control_flow, multifunction


def _named(spec, name):
    return next(op for op in main_block(spec).operations if op.outputs[0].name == name)


def _attribute(spec):
    _named(spec, "relu").attributes["IntendedBackend"].CopyFrom(_named(spec, "relu").attributes["name"])


def _swap(spec):
    ops = main_block(spec).operations
    ops.insert(0, ops.pop(1))


def _add(spec):
    new = main_block(spec).operations.add()
    new.CopyFrom(_named(spec, "relu"))
    new.outputs[0].name = "fresh"


OPS = {
    "an attribute": (_attribute, Ops(changed={"relu"})),
    "a doc string": (lambda spec: setattr(_named(spec, "relu").attributes["name"], "docString", "new"),
                     Ops(changed={"relu"})),
    "a new op": (_add, Ops(added={"fresh"})),
    "an op less": (lambda spec: main_block(spec).operations.remove(_named(spec, "relu")), Ops(removed={"relu"})),
    "the order": (_swap, Ops(same_order=False)),
}
OUTSIDE = {
    "model": lambda spec: setattr(spec.description.metadata, "author", "another"),
    "program": lambda spec: setattr(spec.mlProgram, "docString", "new"),
    "function main": lambda spec: spec.mlProgram.functions["main"].inputs.add(name="more"),
    "function main/block": lambda spec: main_block(spec).outputs.append("relu"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make(tmp_path_factory.mktemp("built") / "source.mlpackage", linear_program())


@pytest.fixture
def pair(built, tmp_path):
    return built, Path(shutil.copytree(built, tmp_path / "other.mlpackage"))


def changed(pair, change):
    spec = spec_of(pair[0])
    (pair[1] / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    shutil.copy(pair[1] / MODEL, pair[0] / MODEL)
    change(spec)
    (pair[1] / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    return proto_diff(*pair)


def test_a_copy_does_not_differ(pair):
    assert not proto_diff(*pair) and not proto_diff(*pair, moved=True)


@pytest.mark.parametrize("what", OPS)
def test_ops(pair, what):
    found = changed(pair, OPS[what][0])
    assert (found.outside, found.functions) == ([], {"main": OPS[what][1]})


@pytest.mark.parametrize("where", OUTSIDE)
def test_outside_of_ops(pair, where):
    (found,) = changed(pair, OUTSIDE[where]).outside
    assert found.split(": ")[0] == where


def test_ops_in_blocks_are_named_with_the_op_around(tmp_path):
    source = make(tmp_path / "a.mlpackage", control_flow())
    other = Path(shutil.copytree(source, tmp_path / "b.mlpackage"))

    def change(spec):
        cond = next(op for op in main_block(spec).operations if op.type == "cond")
        inner = next(op for op in cond.blocks[0].operations if op.outputs[0].name == "one")
        inner.type = "sub"

    (ops,) = changed((source, other), change).functions.values()
    assert len(ops.changed) == 1 and ops.changed.pop().endswith("/0/one")


def test_functions_in_another_order_and_other_functions(tmp_path):
    source = multifunction(tmp_path / "a.mlpackage")
    other = Path(shutil.copytree(source, tmp_path / "b.mlpackage"))
    data = (source / MODEL).read_bytes()
    spec = proto.Model_pb2.Model.FromString(data)
    spec.mlProgram.functions["beta"].CopyFrom(spec.mlProgram.functions["alpha"])
    (other / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    assert proto_diff(source, other).outside == ["program/functions"]


def test_weights_elsewhere_are_the_same_by_their_bytes_only(pair):
    """The bytes of a weight change in its place: seen where bytes are asked for, not where places are."""
    assert proto_diff(*pair).functions == {}
    place = consts(pair[1])["main", _weight(pair[1])]
    data = bytearray((pair[1] / WEIGHTS).read_bytes())
    data[int.from_bytes(data[place[1] + 16 : place[1] + 24], "little")] ^= 1
    (pair[1] / WEIGHTS).write_bytes(data)
    assert not proto_diff(*pair)
    assert proto_diff(*pair, moved=True).functions == {"main": Ops(changed={_weight(pair[1])})}
    assert blob(pair[0], place)[1] != blob(pair[1], place)[1]


def _weight(path):
    first = _named(spec_of(path), "first")
    name = first.inputs["weight"].arguments[0].name
    assert name in reads(first.SerializeToString())
    return name
