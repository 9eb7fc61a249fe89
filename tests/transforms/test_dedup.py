"""`edit --dedup-weights`: equal bytes once, every value as it was, nothing loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.converters.mil.mil import Builder as mb
from coremltools.libmilstoragepython import _BlobStorageReader, _BlobStorageWriter
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.package import duplicates
from mil_ane_passes.package.blob_refs import find_refs
from mil_ane_passes.package.blobs import WeightFiles
from mil_ane_passes.package.duplicates import find_duplicates
from mil_ane_passes.package.manifest import read_layout
from tests.package.helpers import MODEL, WEIGHTS, facts, host_program, make, normal, spec_of, tree, write_spec
from tests.package.test_unchanged import compressed, multifunction
from tests.without_torch import hide_torch

from .helpers import host_takes, same_outputs


def twins(path: Path, same: bool = True) -> Path:
    """Two layers with equal weights that the converter keeps apart, and one of another shape over the same bytes."""
    weight = normal(64, 64)
    other = weight if same else normal(64, 64, seed=1)

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x):
        y = mb.linear(x=x, weight=weight, name="one")
        y = mb.linear(x=mb.relu(x=y), weight=other.copy(), name="two")
        y = mb.reshape(x=y, shape=(1, 16, 1, 4))
        y = mb.conv(x=y, weight=other.reshape(256, 16, 1, 1).copy(), name="three")
        return mb.reshape(x=y, shape=(1, 1024), name="out")

    return make(path, program, ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)


def refs(path: Path) -> set[tuple[str, int]]:
    return find_refs((path / MODEL).read_bytes())


def deduped(source: Path, target: Path) -> ane.EditReport:
    report = ane.edit(source, target, dedup_weights=True)
    assert sorted(map(repr, facts(host_program(target)))) == sorted(map(repr, facts(host_program(source))))
    return report


def test_a_wrong_redirection_is_found(tmp_path, monkeypatch):
    """Redirections take effect in the file alone, which is read again."""
    source = twins(tmp_path / "source.mlpackage", same=False)
    assert ane.edit(source, tmp_path / "out.mlpackage", dedup_weights=True, verify=True).status == "written"
    for name in ("read_prefix", "compute_digest"):
        monkeypatch.setattr(duplicates._BlobReaders, name, lambda self, ref: b"same")
    monkeypatch.setattr(duplicates._BlobReaders, "select_equal", lambda self, refs: refs)
    with pytest.raises(ane.AnePassesError, match="not written, as its program would differ from the one in memory"):
        ane.edit(source, tmp_path / "wrong.mlpackage", dedup_weights=True, verify=True)
    assert not (tmp_path / "wrong.mlpackage").exists()


def test_equal_bytes_are_kept_once_whatever_their_shape(tmp_path):
    source = twins(tmp_path / "source.mlpackage")
    before = tree(source)
    report = deduped(source, tmp_path / "out.mlpackage")
    assert tree(source) == before
    assert report.status == "written" and report.exact
    saved = (source / WEIGHTS).stat().st_size - (tmp_path / "out.mlpackage" / WEIGHTS).stat().st_size
    assert saved == report.weight_bytes_before - report.weight_bytes_after >= 2 * 64 * 64 * 4
    assert (len(refs(source)), len(refs(tmp_path / "out.mlpackage"))) == (5, 2), "three weights and two biases"
    assert "5 blobs hold 2 different values; 33,024 bytes are saved" in str(report)
    same_outputs(source, tmp_path / "out.mlpackage")
    host_takes(tmp_path / "out.mlpackage")
    again = ane.edit(tmp_path / "out.mlpackage", tmp_path / "again.mlpackage", dedup_weights=True)
    assert again.status == "unchanged"
    assert tree(tmp_path / "again.mlpackage") == tree(tmp_path / "out.mlpackage")


def test_nothing_twice_is_copied_as_it_is(tmp_path):
    source = twins(tmp_path / "source.mlpackage", same=False)
    first = ane.edit(source, tmp_path / "first.mlpackage", dedup_weights=True)
    report = ane.edit(tmp_path / "first.mlpackage", tmp_path / "out.mlpackage", dedup_weights=True)
    assert first.changed and not report.changed and "twice" in str(report)
    assert tree(tmp_path / "out.mlpackage") == tree(tmp_path / "first.mlpackage")


def test_less_than_a_hundredth_is_dropped_too(tmp_path):
    source = twins(tmp_path / "source.mlpackage")
    spec, path = spec_of(source), source / WEIGHTS
    writer = _BlobStorageWriter(str(path), truncate_file=False)
    large = normal(1 << 20)
    offset = writer.write_float_data(large)
    del writer
    block = spec.mlProgram.functions["main"].block_specializations["CoreML7"]
    const = next(op for op in block.operations if "blobFileValue" in str(op.attributes["val"]))
    extra = block.operations.add()
    extra.CopyFrom(const)
    extra.outputs[0].name = "large"
    kind = extra.attributes["val"].type.tensorType
    kind.rank = 1
    del kind.dimensions[:]
    kind.dimensions.add().constant.size = 1 << 20
    extra.outputs[0].type.CopyFrom(extra.attributes["val"].type)
    extra.attributes["val"].blobFileValue.offset = offset
    write_spec(source, spec)
    report = ane.edit(source, tmp_path / "out.mlpackage", dedup_weights=True)
    assert 0 < report.weight_bytes_before - report.weight_bytes_after < 0.01 * report.weight_bytes_before


@pytest.mark.parametrize("kind", ["palettized16", "affine16", "sparse16", "palettized18", "int4", "sparse18"])
def test_parts_of_compressed_weights_are_found_too(tmp_path, kind):
    """Two functions over two copies of a compressed package's weights: all of the second is free."""
    source = compressed(tmp_path / "source.mlpackage", kind)
    raw = (source / WEIGHTS).read_bytes()
    spec, doubled = spec_of(source), tmp_path / "doubled.mlpackage"
    shutil.copytree(source, doubled)
    other = str(spec.mlProgram.functions["main"]).replace("weights/weight.bin", "weights/second.bin")
    text_format.Parse(other, spec.mlProgram.functions["second"])
    (doubled / WEIGHTS).with_name("second.bin").write_bytes(raw)
    write_spec(doubled, spec)
    report = ane.edit(doubled, tmp_path / "out.mlpackage", dedup_weights=True)
    out = tmp_path / "out.mlpackage"
    assert {name for name, _ in refs(out)} == {"@model_path/weights/second.bin"}
    assert report.weight_bytes_after <= len(raw) + 64 and report.weight_bytes_before == 2 * len(raw)
    values, expected = [_values(path) for path in (out, doubled)]
    assert values.keys() == expected.keys() and values
    assert all(np.array_equal(values[name], expected[name]) for name in values)


def _values(path: Path) -> dict[tuple[str, str, str], np.ndarray]:
    """The value of every const and of every input of compressed weights."""
    found = {}
    for name, function in ane.load(path).program.functions.items():
        for op in function.operations:
            for param, var in op.inputs.items():
                if hasattr(var, "val") and isinstance(var.val, np.ndarray):
                    found[name, op.outputs[0].name, param] = np.asarray(var.val)
    return found


def test_functions_share_after_as_before(tmp_path):
    source = multifunction(tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", dedup_weights=True)
    functions = spec_of(source).mlProgram.functions
    assert len(functions) == 2 and not report.changed, "they share already"
    assert tree(tmp_path / "out.mlpackage") == tree(source)


def test_equal_bytes_of_another_dtype_stay(tmp_path):
    source = twins(tmp_path / "source.mlpackage", same=False)
    spec = spec_of(source)
    consts = [op for op in spec.mlProgram.functions["main"].block_specializations["CoreML7"].operations
              if op.type == "const" and op.attributes["val"].HasField("blobFileValue")]
    writer = _BlobStorageWriter(str(source / WEIGHTS), truncate_file=False)
    zeros = [writer.write_float_data(np.zeros(64, np.float32)), writer.write_int32_data(np.zeros(64, np.int32))]
    del writer
    for const, offset, dtype in zip(consts, zeros, (proto.MIL_pb2.FLOAT32, proto.MIL_pb2.INT32), strict=False):
        value = const.attributes["val"]
        value.type.tensorType.dataType = dtype
        value.type.tensorType.rank = 1
        del value.type.tensorType.dimensions[:]
        value.type.tensorType.dimensions.add().constant.size = 64
        value.blobFileValue.offset = offset
    write_spec(source, spec)
    report = ane.edit(source, tmp_path / "out.mlpackage", dedup_weights=True)
    assert {name for name, _ in refs(source)} == {name for name, _ in refs(tmp_path / "out.mlpackage")}
    assert "different dtypes (256 bytes)" in str(report)


def test_bytes_are_compared_not_their_digests_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("mil_ane_passes.package.duplicates._BlobReaders.compute_digest", lambda self, ref: b"")
    monkeypatch.setattr("mil_ane_passes.package.duplicates._BlobReaders.read_prefix", lambda self, ref: b"")
    source = twins(tmp_path / "source.mlpackage", same=False)
    found = find_duplicates(WeightFiles(read_layout(source)), refs(source))
    assert [(len(group.places), group.nbytes) for group in found.equal] == [(2, 256)], "the biases, and no weight"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["float", "int8", "uint8", "uint4"]),
                          st.sampled_from([1, 63, 64, 70_000])), min_size=1, max_size=9))
def test_whatever_repeats_is_grouped(tmp_path, blobs):
    """Random blobs in two files, by coremltools' writer: the groups are those of equal dtype, size and bytes."""
    package = tmp_path / "random.mlpackage"
    if not package.exists():
        twins(package)
    folder = (package / WEIGHTS).parent
    writers = {}
    for name in ("a.bin", "b.bin"):
        (folder / name).unlink(missing_ok=True)
        writers[name] = _BlobStorageWriter(str(folder / name))
    expected: dict[tuple, set] = {}
    for number, (seed, kind, size) in enumerate(blobs):
        name = "ab"[number % 2] + ".bin"
        values = np.random.default_rng(seed).integers(0, 8, size)
        stored = values.astype({"float": np.float32, "int8": np.int8}.get(kind, np.uint8))
        offset = getattr(writers[name], f"write_{kind}_data")(stored)
        expected.setdefault((kind, size, values.tobytes()), set()).add((f"@model_path/weights/{name}", offset))
    writers.clear()
    places = set().union(*expected.values())
    found = find_duplicates(WeightFiles(read_layout(package)), places)
    assert {frozenset(group.places) for group in found.equal} == {
        frozenset(group) for group in expected.values() if len(group) > 1}


HUGE = """
import resource, sys
import mil_ane_passes as ane
ane.edit
import mil_ane_passes.transforms.dedup_weights, mil_ane_passes.package.package_writer
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = ane.edit(sys.argv[1], sys.argv[2], dedup_weights=True)
unit = 1024 if sys.platform == "darwin" else 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // unit)
"""


@pytest.mark.slow
def test_memory_is_flat(tmp_path):
    weight = np.full((2048, 8192), 0.5, np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 2048), dtype=ct.converters.mil.mil.types.fp16)],
                opset_version=ct.target.iOS17)
    def program(x):
        return mb.matmul(x=x, y=weight)

    source = make(tmp_path / "huge.mlpackage", program, ct.target.iOS17, compute_precision=ct.precision.FLOAT16)
    spec = spec_of(source)
    with open(source / WEIGHTS, "ab") as file:
        file.write((source / WEIGHTS).read_bytes()[64:])
    raw = bytearray((source / WEIGHTS).read_bytes()[:128])
    second = (source / WEIGHTS).stat().st_size // 2 + 32
    with open(source / WEIGHTS, "r+b") as file:
        raw[64 + 16 : 64 + 24] = (second + 64).to_bytes(8, "little")
        file.seek(second)
        file.write(raw[64:128])
    block = spec.mlProgram.functions["main"].block_specializations["CoreML7"]
    const = next(op for op in block.operations if op.attributes["val"].HasField("blobFileValue"))
    copy = block.operations.add()
    copy.CopyFrom(const)
    copy.outputs[0].name = "second"
    copy.attributes["val"].blobFileValue.offset = second
    write_spec(source, spec)
    target = tmp_path / "out.mlpackage"
    done = subprocess.run([sys.executable, "-c", HUGE, str(source), str(target)], capture_output=True, text=True,
                          env=hide_torch())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000, "kilobytes more than after import"
    assert (target / WEIGHTS).stat().st_size == second
    assert np.array_equal(_BlobStorageReader(str(target / WEIGHTS)).read_fp16_data(64)[:4].view(np.float16), [0.5] * 4)


def test_the_command_says_what_was_saved(tmp_path, capsys):
    source = twins(tmp_path / "source.mlpackage")
    capsys.readouterr()
    target = str(tmp_path / "out.mlpackage")
    assert main(["edit", str(source), "-o", target, "--dedup-weights", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "written" and report["exact"]
    assert report["weight_bytes"]["before"] - report["weight_bytes"]["after"] >= 32_768
