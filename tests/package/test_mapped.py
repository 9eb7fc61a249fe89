"""Weights are mapped: nothing is read at load, nothing is held in memory by a save, and time is linear in ops."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from types import SimpleNamespace

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.backend.mil import helper
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.type_mapping import nptype_from_builtin, string_to_builtin
from coremltools.libmilstoragepython import _BlobStorageReader, _BlobStorageWriter

from mil_ane_passes.ir.constants import LazyValue, get_blob_ref
from mil_ane_passes.package import files, load, save, weights
from mil_ane_passes.package.blobs import DTYPES, WeightFile, count_payload_bytes
from tests.without_torch import hide_torch

from .helpers import WEIGHTS, conv_program, host_program, linear_program, make, normal, op_named, replace, tree
from .test_unchanged import compressed

HUGE = """
import resource, sys
import coremltools
from coremltools.converters.mil.mil import Builder as mb
from mil_ane_passes.package import load, save
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = peak()
package = load(sys.argv[1])
function = package.program.functions["main"]
relu = [op for op in function.operations if op.op_type == "relu"][0]
with function, mb.set_before_op(relu):
    new = mb.sigmoid(x=relu.x, name="fresh")
function.replace_uses_of_var_after_op(anchor_op=relu, old_var=relu.outputs[0], new_var=new)
if sys.argv[3] == "repack":
    last = [op for op in function.operations if op.op_type == "matmul"][-1]
    weight = last.y.op
    with function, mb.set_before_op(last):
        tiled = mb.tile(x=last.x, reps=[1, 2], name="tiled")
    function.replace_uses_of_var_after_op(anchor_op=last, old_var=last.outputs[0], new_var=tiled)
    function.remove_ops([last])
    function.remove_ops([weight])
save(package, sys.argv[2])
unit = 1024 if sys.platform == "darwin" else 1
print((peak() - start) // unit)
"""


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """A package of 200 MB."""
    weights = [np.full((4096, 8192), index, np.float16) for index in range(3)]

    @mb.program(input_specs=[mb.TensorSpec((1, 4096), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x):
        for weight in weights[:2]:
            x = mb.matmul(x=mb.matmul(x=x, y=weight), y=weight, transpose_y=True)
        return mb.matmul(x=mb.relu(x=x, name="relu"), y=weights[2], name="out")

    path = tmp_path_factory.mktemp("huge") / "huge.mlpackage"
    make(path, program, ct.target.iOS17, compute_precision=ct.precision.FLOAT16)
    weights.clear()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("what", ["edit", pytest.param("repack", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_weights(huge, tmp_path, what):
    target = tmp_path / "saved.mlpackage"
    command = [sys.executable, "-c", HUGE, str(huge), str(target), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=hide_torch())
    assert int(done.stdout) < 40_000, "kilobytes more than after import"
    size, old = (target / WEIGHTS).stat().st_size, (huge / WEIGHTS).stat().st_size
    assert old > 200_000_000
    assert size == old if what == "edit" else size < 0.7 * old


MAPPED = """
import sys
import coremltools
from mil_ane_passes.package import load
def mapped():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssFile")).split()[1])
start = mapped()
package = load(sys.argv[1])
print(mapped() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of mapped files is told on Linux only")
def test_loading_maps_none_of_many_weights_into_memory(tmp_path):
    """Looking at what is said beside a blob, where it is mapped, would bring 64 KB of each into memory."""
    weights = [np.full((256, 256), index, np.float16) for index in range(256)]

    @mb.program(input_specs=[mb.TensorSpec((1, 256), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x):
        for weight in weights:
            x = mb.matmul(x=x, y=weight)
        return x

    source = make(tmp_path / "many.mlpackage", program, ct.target.iOS17, compute_precision=ct.precision.FLOAT16,
                  pass_pipeline=ct.PassPipeline.EMPTY)
    done = subprocess.run([sys.executable, "-c", MAPPED, str(source)], capture_output=True, text=True, check=True,
                          env=hide_torch())
    assert int(done.stdout) < 2_000, "kilobytes of 32 MB of weights"


def test_consts_are_views_of_the_file(tmp_path):
    source = make(tmp_path / "source.mlpackage", conv_program())
    package = load(source)
    weight = op_named(package.program, "conv").weight
    blob = get_blob_ref(weight)
    assert blob is not None and blob.file == source / WEIGHTS and blob.name == "@model_path/weights/weight.bin"
    mapped = package.files.files[blob.name].bytes
    assert np.shares_memory(weight.val, mapped)
    assert not weight.val.flags.writeable
    assert blob.nbytes == weight.val.nbytes
    assert np.array_equal(weight.val, op_named(host_program(source), "conv").weight.val)
    assert package.weight_bytes == (source / WEIGHTS).stat().st_size
    inline = op_named(package.program, "flat").shape.val
    assert inline.tolist() == [1, 16, 256] and not inline.flags.writeable


@pytest.mark.parametrize("kind", ["int4", "uint4", "palettized18", "sparse18"])
def test_packed_consts_are_unpacked_on_access_only(tmp_path, kind):
    source = compressed(tmp_path / "source.mlpackage", kind)
    package, host = load(source), host_program(source)
    lazy = 0
    for function in package.program.functions.values():
        for op in function.operations:
            if not op.op_type.startswith("constexpr_"):
                continue
            twin = op_named(host, op.outputs[0].name)
            for param, var in op.inputs.items():
                if isinstance(var._sym_val, LazyValue):
                    lazy += 1
                    assert var._sym_val._value is None, "not read by the load"
                assert np.array_equal(var.val, twin.inputs[param].val)
                assert var.dtype == twin.inputs[param].dtype
    assert lazy
    save(package, tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)


@pytest.mark.parametrize("dtype", DTYPES, ids=types.builtin_to_string)
def test_blob_dtypes_are_the_hosts(tmp_path, dtype):
    name = {"fp32": "float"}.get(types.builtin_to_string(dtype), types.builtin_to_string(dtype))
    values = np.arange(13) % 2
    stored = values.astype(nptype_from_builtin(dtype) if dtype != types.fp16 else np.float16)
    writer = _BlobStorageWriter(str(tmp_path / "w.bin"))
    offset = getattr(writer, f"write_{name}_data")(stored.view(np.uint16) if dtype == types.fp16 else stored)
    del writer
    file = WeightFile(tmp_path / "w.bin", "@model_path/w.bin")
    blob = file.blob(offset)
    assert (blob.dtype, blob.nbytes) == (DTYPES[dtype], count_payload_bytes(dtype, 13))
    if types.is_sub_byte(dtype):
        read = file.make_lazy(blob, dtype, (13,)).read()
        assert read.dtype.metadata == nptype_from_builtin(dtype).metadata
    else:
        read = file.view_elements(blob, dtype)
    assert read.astype(np.int64).tolist() == values.tolist()
    host = getattr(_BlobStorageReader(str(tmp_path / "w.bin")), f"read_{name}_data")(offset)
    assert string_to_builtin(types.builtin_to_string(dtype)) == dtype and len(host) == 13


@pytest.mark.parametrize("dtype", DTYPES, ids=types.builtin_to_string)
def test_new_blobs_are_written_as_the_host_writes_them(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(weights, "_PACK_PIECE_ELEMENTS", 8)
    np_type = np.dtype(nptype_from_builtin(dtype) if dtype != types.fp16 else np.float16)
    sizes, offsets = (13, 64, 1), []
    arrays = [(np.arange(size) % 2).astype(np_type) for size in sizes]
    writer = _BlobStorageWriter(str(tmp_path / "host.bin"))
    for array in arrays:
        offsets.append(helper._get_offset_by_writing_data(SimpleNamespace(dtype=dtype, val=array), writer))
    del writer
    made = [weights.NewBlob(offset, dtype, array) for offset, array in zip(offsets, arrays)]
    weights.write_weights(None, tmp_path / "first.bin", [], None, made[:1])
    first = WeightFile(tmp_path / "first.bin", "@model_path/first.bin")
    weights.write_weights(first, tmp_path / "ours.bin", [], None, made[1:])
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "host.bin").read_bytes()


def test_new_weights_are_written_without_a_copy(tmp_path):
    package = load(make(tmp_path / "source.mlpackage", conv_program()))
    function, new = package.program.functions["main"], np.ones((8, 1024, 1024), np.float32)
    with function, mb.set_before_op(op_named(package.program, "relu")):
        taken = mb.slice_by_size(x=mb.const(val=new, name="new"), begin=[0, 0, 0], size=[1, 1, 1], name="taken")
    out = function.outputs[0]
    replace(out.op, lambda: mb.add(x=out.op.x, y=taken), name=out.name)
    tracemalloc.start()
    save(package, tmp_path / "saved.mlpackage")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "saved.mlpackage" / WEIGHTS).stat().st_size > new.nbytes
    assert peak < new.nbytes / 4


def chain(length):
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8, 8))])
    def program(x):
        for _ in range(length):
            x = mb.relu(x=mb.max_pool(x=x, kernel_sizes=[1, 1], pad_type="valid"))
        return mb.identity(x=x, name="out")

    return program


@pytest.mark.slow
def test_load_and_save_are_linear_in_ops(tmp_path):
    seconds = {}
    for length in (200, 1000):
        source = make(tmp_path / f"{length}.mlpackage", chain(length), pass_pipeline=ct.PassPipeline.EMPTY)
        started = time.perf_counter()
        package = load(source)
        out = package.program.functions["main"].outputs[0].op
        replace(out, lambda out=out: mb.tanh(x=out.x), name=out.outputs[0].name)
        save(package, tmp_path / f"{length}.saved.mlpackage")
        seconds[length] = time.perf_counter() - started
    assert seconds[1000] < 5 * seconds[200] * 4


def test_shared_defaults_have_the_right_users(tmp_path):
    package = load(make(tmp_path / "source.mlpackage", chain(200), pass_pipeline=ct.PassPipeline.EMPTY))
    package.program.validate()
    synthetic = [op for op in package.program.functions["main"].operations if getattr(op, "synthetic", False)]
    assert len(synthetic) < 50


def test_copies_without_help_of_the_kernel(tmp_path, monkeypatch):
    source = make(tmp_path / "source.mlpackage", linear_program())
    monkeypatch.setattr(files, "clone_file", lambda *_: False)
    monkeypatch.setattr(files, "_copy_in_kernel", lambda *_: 0)
    package = load(source)
    save(package, tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)
    second = op_named(package.program, "second")
    weight = second.weight.op
    replace(second, lambda: mb.matmul(x=second.x, y=normal(128, 8)), name="second")
    weight.enclosing_block.remove_ops([weight])
    second_out = package.program.functions["main"].outputs[0]
    assert second_out.shape == (1, 8)
    save(package, tmp_path / "packed.mlpackage")
    assert np.array_equal(
        op_named(load(tmp_path / "packed.mlpackage").program, "first").weight.val,
        op_named(load(source).program, "first").weight.val,
    )
