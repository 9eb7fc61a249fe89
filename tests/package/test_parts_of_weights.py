"""Parts of large weights in mapped files: written piece by piece, without a copy of them in memory."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.package import weight_plan, weights
from mil_ane_passes.utils import mapped_files
from mil_ane_passes.utils.mapped_files import file_of, iterate_rows
from tests.package.helpers import make, normal, with_functions

WEIGHT = normal(64, 48).astype(np.float16)


@pytest.fixture
def package(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x):
        return mb.matmul(x=x, y=WEIGHT, name="out")

    return make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)


def find_weight(program):
    return next(op.y for function in program.functions.values() for op in function.operations
                if op.op_type == "matmul").val


def test_rows_of_a_part_are_read_from_the_file_again_and_again(package, monkeypatch):
    monkeypatch.setattr(mapped_files, "_CHUNK_BYTES", 500)
    whole = find_weight(ane.load(package).program)
    part = whole[:, 5:40]
    assert file_of(part) is not None and not part.flags.c_contiguous
    for _ in range(2):
        pieces = [rows.copy() for rows in iterate_rows(part)]
        assert len(pieces) > 2 and all(each.flags.c_contiguous for each in pieces)
        np.testing.assert_array_equal(np.concatenate(pieces), WEIGHT[:, 5:40])
    np.testing.assert_array_equal(whole, WEIGHT)  # what was given back is read from the file again
    plain = np.arange(12).reshape(3, 4)[:, 1:3]
    np.testing.assert_array_equal(np.concatenate(list(iterate_rows(plain))), plain)


@pytest.mark.parametrize("functions", [1, 2])
def test_parts_are_written_without_a_copy_and_once_for_two_functions(tmp_path, package, monkeypatch, functions):
    if functions == 2:
        package = with_functions(tmp_path / "both.mlpackage", {"first": package, "second": package}, "first")
    written, write = [], weights._write_blob
    monkeypatch.setattr(weights, "_write_blob", lambda out, blob, offset: (written.append(blob.value),
                                                                           write(out, blob, offset)))
    monkeypatch.setattr(weight_plan, "_MIN_VIEW_BYTES", 1)
    monkeypatch.setattr(mapped_files, "_CHUNK_BYTES", 500)
    report = ane.edit(package, tmp_path / "out.mlpackage", tile_output={"out": 2}, verify=True)
    assert report.status == "written", str(report)
    assert len(written) == 2 and all(file_of(each) is not None and not each.flags.c_contiguous for each in written)
    for function in ane.load(tmp_path / "out.mlpackage").program.functions.values():
        found = [op.y.val for op in function.operations if op.op_type == "matmul"]
        np.testing.assert_array_equal(np.concatenate(found, 1), WEIGHT)
