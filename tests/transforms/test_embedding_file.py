"""`--embedding-file`: the table of a lookup becomes a file, as it is stored, and the model reads its rows."""

from __future__ import annotations

import json
import os

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.report.decoder.generate import open_table, read_rows
from tests.commands.test_adapt import TABLES, twice_scaled, vectors
from tests.package.helpers import make, normal, spec_of, tree, with_functions
from tests.transforms.helpers import host_takes

WIDTH, COUNT = 4, 9
HALF = np.float16


def make_model(path, body=None, *, shape=(1, 2), table=None, target=ct.target.iOS18, state=True, tied=False):
    """A model that adds a state to rows that `body` looks up, and multiplies it with a weight, the table if tied."""
    def build(ids, held=None):
        rows = normal(COUNT, WIDTH).astype(HALF) if table is None else table(np.float16)
        x = body(ids, rows) if body else mb.gather(x=rows, indices=ids, axis=0)
        if held is not None:
            x = mb.coreml_update_state(state=held, value=mb.add(x=mb.tanh(x=x), y=mb.read_state(input=held)))
        weight = rows if tied else normal(7, int(x.shape[-1])).astype(HALF)
        if target == ct.target.iOS15:
            return mb.cast(x=mb.linear(x=x, weight=weight), dtype="fp32", name="logits")
        return mb.linear(x=x, weight=weight, name="logits")

    specs = [mb.TensorSpec(shape, dtype=types.int32)]
    if state:
        specs.append(mb.StateTensorSpec((*shape, WIDTH), dtype=types.fp16))
    program = mb.program(input_specs=specs, opset_version=target)(
        (lambda ids, held: build(ids, held)) if state else lambda ids: build(ids))
    return make(path, program, target, pass_pipeline=ct.PassPipeline.EMPTY)


def edit(source, tmp_path, **options):
    options.setdefault("embedding_file", {"ids": tmp_path / "table.npy"})
    return ane.edit(source, tmp_path / "out.mlpackage", verify=True, **options)


def listed(folder):
    return sorted(each.name for each in folder.iterdir())


def test_the_model_reads_rows_of_the_written_table_over_steps_of_a_state(tmp_path):
    source = make_model(tmp_path / "source.mlpackage")
    before = tree(source)
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    assert len(report.verification.cases) == 6 and not report.verification.notes
    assert {"logits", "state held"} <= {each.output for case in report.verification.cases for each in case.outputs}
    found = np.load(tmp_path / "table.npy")
    assert found.dtype == HALF and np.array_equal(found, normal(COUNT, WIDTH).astype(HALF))
    function = ane.load(tmp_path / "out.mlpackage").program.functions["main"]
    assert list(function.inputs) == ["held", "ids_rows"]
    assert function.inputs["ids_rows"].dtype == types.fp16 and tuple(function.inputs["ids_rows"].shape) == (1, 2, WIDTH)
    assert not [op for op in function.operations if op.op_type == "gather"] and tree(source) == before
    assert "the table (9, 4) is written as it is stored, fp16, 72 bytes; it leaves the package" in str(report)
    assert report.files == [str(tmp_path / "table.npy"), str(tmp_path / "table.json")]
    assert report.to_dict()["files"] == report.files and str(tmp_path / "table.npy") in str(report).splitlines()[-1]
    assert json.loads((tmp_path / "table.json").read_text()) == {
        "schema": 1, "kind": "embedding", "form": "npy", "ids": "ids", "input": "ids_rows", "dtype": "float16",
        "width": WIDTH, "files": {"data": "table.npy"}}
    host_takes(tmp_path / "out.mlpackage")


@pytest.mark.parametrize("name", TABLES)
def test_a_compressed_table_is_written_as_it_is_stored(tmp_path, name):
    table, target, more, shape = TABLES[name]
    source = make_model(tmp_path / "source.mlpackage", table=table, target=target, state=target >= ct.target.iOS18)
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    names = sorted(["table.npy", *(f"table_{each}.npy" for each in more)])
    assert sorted(each.name for each in tmp_path.glob("*.npy")) == names
    stored = sum(np.load(tmp_path / each).nbytes for each in names)
    assert f" {stored:,} bytes" in str(report) and ("as it is compressed" in str(report)) is bool(more)
    described = json.loads((tmp_path / "table.json").read_text())
    assert sorted(described["files"].values()) == names
    opened = open_table(tmp_path, described)
    state = {"held": np.zeros((1, 2, WIDTH))}
    for ids in ([8, 0], [3, 5]):
        feeds = {"ids": np.int32([ids])}
        rows = read_rows(opened, np.array(ids)).astype(described["dtype"])[None]
        old, new = ({} if target < ct.target.iOS18 else {"held": state["held"].copy()} for _ in range(2))
        one = ane.run(source, feeds, state=old)["logits"]
        other = ane.run(tmp_path / "out.mlpackage", {"ids_rows": rows}, state=new)["logits"]
        assert np.abs(one - other).max() < 0.01
    assert (ane.load(tmp_path / "out.mlpackage").path / "Data").is_dir()


def test_a_table_that_the_head_reads_stays_in_the_package(tmp_path):
    source = make_model(tmp_path / "source.mlpackage", tied=True)
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    assert "it stays in the package, too: the op 'logits' (linear) reads it" in str(report)
    assert np.array_equal(np.load(tmp_path / "table.npy"), normal(COUNT, WIDTH).astype(HALF))


def test_the_weights_are_smaller_by_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.transforms.test_embedding_file.COUNT", 500)
    source = make_model(tmp_path / "source.mlpackage")
    report = edit(source, tmp_path)
    assert report.weight_bytes_after <= report.weight_bytes_before - 500 * WIDTH * 2, str(report)


def test_functions_that_share_the_table_write_it_once(tmp_path):
    one, other = (make_model(tmp_path / f"{each}.mlpackage", shape=(1, each), state=False) for each in (1, 3))
    source = with_functions(tmp_path / "source.mlpackage", {"decode": one, "prefill": other}, "decode")
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    functions = ane.load(tmp_path / "out.mlpackage").program.functions
    assert {name: tuple(each.inputs["ids_rows"].shape) for name, each in functions.items()} == {
        "decode": (1, 1, WIDTH), "prefill": (1, 3, WIDTH)}
    assert str(report).count("the table (9, 4)") == 1


def test_one_of_two_functions_leaves_the_table_to_the_other(tmp_path):
    one, other = (make_model(tmp_path / f"{each}.mlpackage", shape=(1, each), state=False) for each in (1, 3))
    source = with_functions(tmp_path / "source.mlpackage", {"decode": one, "prefill": other}, "decode")
    report = edit(source, tmp_path, function="decode")
    assert report.verification.equal and "it stays in the package, too: the op" in str(report), str(report)
    functions = ane.load(tmp_path / "out.mlpackage").program.functions
    assert {name: list(each.inputs) for name, each in functions.items()} == {
        "decode": ["ids_rows"], "prefill": ["ids"]}


def wrapped(ids, rows):
    """Counts ids below 0 from the end, as converters do."""
    return mb.gather(x=rows, axis=0, indices=mb.select(
        cond=mb.greater_equal(x=ids, y=0), a=ids, b=mb.add(x=ids, y=COUNT)))


def squeezed(ids, rows):
    return mb.expand_dims(x=mb.gather(x=rows, indices=mb.squeeze(x=ids, axes=[0]), axis=0), axes=[0])


def twice(ids, rows):
    return mb.add(x=mb.gather(x=rows, indices=ids, axis=0), y=mb.exp(x=mb.gather(x=rows, indices=ids, axis=0)))


def nested(ids, rows):
    """Looks up inside a condition."""
    return mb.cond(pred=mb.squeeze(x=mb.greater(x=mb.reduce_sum(x=mb.gather(
        x=rows, indices=ids, axis=0), axes=[0, 1, 2], keep_dims=False), y=HALF(0))),
        _true_fn=lambda: mb.gather(x=rows, indices=ids, axis=0), _false_fn=lambda: mb.exp(x=mb.gather(
            x=rows, indices=ids, axis=0)))


@pytest.mark.parametrize("body", [wrapped, squeezed, twice, nested])
def test_lookups_in_other_forms(tmp_path, body):
    source = make_model(tmp_path / "source.mlpackage", body)
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    assert list(ane.load(tmp_path / "out.mlpackage").program.functions["main"].inputs) == ["held", "ids_rows"]


@pytest.mark.parametrize("shape", [(3,), (1, 2), (1, 1, 2), (1, 2, 1, 2)])
@pytest.mark.parametrize("option", ["embedding_file", "one_hot"])
def test_ids_of_any_rank(tmp_path, shape, option):
    source = make_model(tmp_path / "source.mlpackage", shape=shape, state=len(shape) < 4)
    report = edit(source, tmp_path, **({"embedding_file": None, "one_hot": {"ids": "ids_rows"}} if option == "one_hot"
                                       else {}))
    assert report.status == "written" and report.verification.equal, str(report)
    function = ane.load(tmp_path / "out.mlpackage").program.functions["main"]
    assert tuple(function.inputs["ids_rows"].shape) == (*shape, COUNT if option == "one_hot" else WIDTH)


@pytest.mark.parametrize("option", ["embedding_file", "one_hot"])
def test_a_model_whose_inputs_cannot_be_fp16_reads_fp32(tmp_path, option):
    source = make_model(tmp_path / "source.mlpackage", target=ct.target.iOS15, state=False)
    report = edit(source, tmp_path, **({"embedding_file": None, "one_hot": {"ids": "ids_rows"}} if option == "one_hot"
                                       else {}))
    assert report.status == "written" and report.verification.equal, str(report)
    function = ane.load(tmp_path / "out.mlpackage").program.functions["main"]
    assert function.inputs["ids_rows"].dtype == types.fp32
    host_takes(tmp_path / "out.mlpackage")
    if option == "embedding_file":
        assert np.load(tmp_path / "table.npy").dtype == HALF
        assert json.loads((tmp_path / "table.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("option", ["embedding_file", "one_hot"])
def test_rows_that_are_returned_keep_the_name_of_the_output(tmp_path, option):
    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids):
        found = mb.gather(x=normal(COUNT, WIDTH).astype(HALF), indices=ids, axis=0, name="rows")
        return found, mb.exp(x=found, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)
    report = edit(source, tmp_path, **({"embedding_file": None, "one_hot": {"ids": "ids_rows"}} if option == "one_hot"
                                       else {}))
    assert report.status == "written" and report.verification.equal, str(report)
    assert [each.name for each in spec_of(tmp_path / "out.mlpackage").description.output] == ["rows", "out"]
    assert {"rows", "out"} == {each.output for case in report.verification.cases for each in case.outputs}


def offset(ids, rows):
    return mb.gather(x=rows, indices=mb.add(x=ids, y=2, name="places"), axis=0)


def counted(ids, rows):
    kinds = mb.cast(x=ids, dtype="fp16", name="kinds")
    return mb.add(x=mb.gather(x=rows, indices=ids, axis=0), y=mb.expand_dims(x=kinds, axes=[2]))


def two_tables(ids, rows):
    return mb.add(x=mb.gather(x=rows, indices=ids, axis=0),
                  y=mb.gather(x=normal(COUNT, WIDTH, seed=1).astype(HALF), indices=ids, axis=0))


def computed(ids, rows):
    return mb.gather(x=mb.mul(x=rows, y=HALF(2), name="scaled"), indices=ids, axis=0)


def not_looked_up(ids, rows):
    return mb.mul(x=mb.expand_dims(x=mb.cast(x=ids, dtype="fp16"), axes=[2]), y=rows[:1])


def columns(ids, rows):
    return mb.transpose(x=mb.gather(x=rows, indices=ids, axis=1), perm=[1, 2, 0])


def squeezed_often(ids, rows):
    return mb.squeeze(x=mb.gather(x=rows, indices=mb.squeeze(x=ids, axes=[0, 1]), axis=0), axes=[0])


FLEXIBLE = "the input 'ids' has a flexible shape; expected token ids of fixed shape: fix_shape= or pad_shape="
REFUSED = {
    "no lookup": ({"body": not_looked_up}, "the input 'ids' is not looked up in a table by a gather op"),
    "another use": ({"body": counted}, "the op 'kinds' (cast) reads the token ids 'ids' in addition to the lookup"),
    "several tables": ({"body": two_tables}, "the input 'ids' is looked up in several tables, "),
    "positions": ({"body": offset}, "the op 'places' (add) computes other integers from the input 'ids', and these"),
    "computed": ({"body": computed}, "'scaled', which the op mul computes; expected a stored table"),
    "columns": ({"body": columns, "state": False}, "has the shape (9, 4), along axis 1; expected entire rows"),
    "symbolic": ({"shape": (1, None), "state": False}, FLEXIBLE),
    "symbolic batch": ({"shape": (None, 2), "state": False}, FLEXIBLE),
    "rank 5": ({"shape": (1, 1, 1, 1, 2), "state": False, "body": squeezed_often}, "so that its rows have rank 6"),
    "scaled twice": ({"table": twice_scaled}, "is compressed by constexpr_blockwise_shift_scale, or several times"),
    "vectors": ({"table": vectors}, "the table is compressed by palettes of vectors of 2; expected numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_out_is_named(tmp_path, name):
    options, reason = REFUSED[name]
    shape = tuple(get_new_symbol() if size is None else size for size in options.get("shape", (1, 2)))
    source = make_model(tmp_path / "source.mlpackage", **{**options, "shape": shape})
    with pytest.raises(ane.InputError, match="expected") as refusal:
        edit(source, tmp_path)
    assert reason in str(refusal.value), str(refusal.value)
    assert listed(tmp_path) == ["source.mlpackage"]


def test_functions_with_different_tables_are_refused(tmp_path):
    one = make_model(tmp_path / "one.mlpackage", state=False)
    other = make_model(tmp_path / "other.mlpackage", state=False, table=lambda kind: normal(
        COUNT, WIDTH, seed=3).astype(HALF))
    source = with_functions(tmp_path / "source.mlpackage", {"a": one, "b": other}, "a")
    with pytest.raises(ane.InputError, match="the functions 'a' and 'b' look up 'ids' in different tables"):
        edit(source, tmp_path)
    report = edit(source, tmp_path, function="b")
    assert report.verification.equal and np.array_equal(
        np.load(tmp_path / "table.npy"), normal(COUNT, WIDTH, seed=3).astype(HALF))


@pytest.mark.parametrize(("arguments", "reason"), [
    (["ids"], "--embedding-file ids: expected A=B, such as --embedding-file ids=table.npy"),
    (["ids=table.bin"], "'table.bin' is not the name of a table; expected one that ends in .npy"),
    (["ids=table.npy", "--embedding-file", "id=table.npy"], "the table of 'ids' is written to 'table.npy' as well"),
    (["id=table.npy"], "there is no input 'id' in the model; did you mean 'ids'?"),
    (["ids=nowhere/table.npy"], "nowhere does not exist; create it first"),
    (["ids=source.mlpackage/Data/table.npy"], "is inside the package"),
    (["ids=taken.npy"], "taken.npy: exists already; expected a path that does not exist, or --overwrite"),
    (["ids=folder.npy", "--overwrite"], "folder.npy: is not a regular file, and is not overwritten"),
    (["ids=linked.npy", "--overwrite"], "linked.npy: is not a regular file, and is not overwritten"),
    (["ids=notes.npy", "--overwrite"], "notes.json: exists and is not the description of a table"),
])
def test_paths_and_names_that_cannot_be(tmp_path, monkeypatch, capsys, arguments, reason):
    make_model(tmp_path / "source.mlpackage")
    (tmp_path / "taken.npy").write_bytes(b"precious")
    (tmp_path / "notes.json").write_text('{"kind": "notes"}')
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "linked.npy").symlink_to("taken.npy")
    monkeypatch.chdir(tmp_path)
    before = listed(tmp_path)
    capsys.readouterr()
    assert main(["edit", "source.mlpackage", "-o", "out.mlpackage", "--embedding-file", *arguments]) == 2
    printed = capsys.readouterr().err
    assert reason in printed and printed.count("\n") == 1, printed
    assert listed(tmp_path) == before and (tmp_path / "taken.npy").read_bytes() == b"precious"


def test_a_table_beside_is_replaced_only_when_asked(tmp_path):
    source = make_model(tmp_path / "source.mlpackage", table=TABLES["blocks"][0])
    assert edit(source, tmp_path).status == "written"
    before = {name: (tmp_path / name).read_bytes() for name in listed(tmp_path) if name.startswith("table")}
    assert list(before) == ["table.json", "table.npy", "table_offset.npy", "table_scale.npy"]
    with pytest.raises(ane.InputError, match="out.mlpackage: exists already"):
        edit(source, tmp_path)
    for name in ("table.npy", "table.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ane.InputError, match=r"table_scale\.npy: exists already"):
        ane.edit(source, tmp_path / "other.mlpackage", embedding_file={"ids": tmp_path / "table.npy"})
    assert not (tmp_path / "table.npy").exists() and not (tmp_path / "other.mlpackage").exists()
    assert edit(source, tmp_path, overwrite=True).status == "written"
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert not [each for each in os.listdir(tmp_path) if each.endswith(".mil-ane-passes")]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("there", [False, True])
def test_all_files_appear_or_none(tmp_path, monkeypatch, number, there):
    from mil_ane_passes.package import package_writer

    source = make_model(tmp_path / "source.mlpackage")
    if there:
        assert edit(source, tmp_path, rename={"logits": "scores"}).status == "written"
    before = {name: value for each in sorted(tmp_path.iterdir()) for name, value in (
        tree(each) if each.is_dir() else {each.name: each.read_bytes()}).items()}
    names, publish, seen = listed(tmp_path), package_writer.publish_output, []

    def fail(*arguments):
        seen.append(arguments[1].name)
        if len(seen) == number + 1:
            raise OSError(28, "No space left on device")
        publish(*arguments)

    monkeypatch.setattr(package_writer, "publish_output", fail)
    with pytest.raises(ane.InputError, match="cannot be written"):
        edit(source, tmp_path, overwrite=there)
    assert seen == ["table.npy", "table.json", "out.mlpackage"][:number + 1] and listed(tmp_path) == names
    assert {name: value for each in sorted(tmp_path.iterdir()) for name, value in (
        tree(each) if each.is_dir() else {each.name: each.read_bytes()}).items()} == before


def test_a_row_of_the_file_that_is_not_the_model_s_is_found(tmp_path, monkeypatch):
    """The comparison reads the file that was written, not the table that it was made of."""
    from mil_ane_passes.commands import table_files

    save = table_files._save_array
    monkeypatch.setattr(table_files, "_save_array", lambda array, file: save(array[::-1].copy(), file))
    source = make_model(tmp_path / "source.mlpackage")
    report = edit(source, tmp_path)
    assert report.status == "rejected" and not report.files, str(report)
    assert listed(tmp_path) == ["source.mlpackage"]


def test_a_dry_run_compares_and_writes_nothing(tmp_path):
    source = make_model(tmp_path / "source.mlpackage")
    report = ane.edit(source, dry_run=True, verify=True, embedding_file={"ids": tmp_path / "table.npy"})
    assert report.verification.equal and report.status == "dry run"
    assert listed(tmp_path) == ["source.mlpackage"]


def test_ids_of_flexible_number_are_padded_before(tmp_path):
    specs = [mb.TensorSpec((1, get_new_symbol()), dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(ids):
        found = mb.gather(x=normal(COUNT, WIDTH).astype(HALF), indices=ids, axis=0)
        return mb.linear(x=mb.tanh(x=found), weight=normal(3, WIDTH).astype(HALF), name="logits")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY,
                  inputs=[ct.TensorType("ids", (1, ct.RangeDim(1, 6)), dtype=np.int32)])
    report = edit(source, tmp_path, pad_shape={"ids": [1, 6]})
    assert report.status == "written" and report.verification.equal, str(report)
    function = ane.load(tmp_path / "out.mlpackage").program.functions["main"]
    assert tuple(function.inputs["ids_rows"].shape) == (1, 6, WIDTH) and "ids" not in function.inputs
    assert len(report.verification.cases) >= 2


def test_a_function_for_each_number_of_ids(tmp_path):
    source = make_model(tmp_path / "source.mlpackage", shape=(1, get_new_symbol()), state=False)
    report = edit(source, tmp_path, fix_shape=[{"ids": [1, 1]}, {"ids": [1, 2]}])
    assert report.status == "written" and report.verification.equal, str(report)
    functions = ane.load(tmp_path / "out.mlpackage").program.functions
    assert sorted(tuple(each.inputs["ids_rows"].shape) for each in functions.values()) == [(1, 1, WIDTH), (1, 2, WIDTH)]


def test_a_table_of_fp32_stays_fp32(tmp_path):
    """Rounded rows would be other numbers than those of the source."""
    table = normal(COUNT, WIDTH)

    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids):
        return mb.tanh(x=mb.gather(x=table, indices=ids, axis=0), name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18)
    report = edit(source, tmp_path)
    assert report.status == "written" and report.verification.equal, str(report)
    found = np.load(tmp_path / "table.npy")
    assert found.dtype == np.float32 and np.array_equal(found, table)
    assert "is written as it is stored, fp32, 144 bytes" in str(report)
    assert json.loads((tmp_path / "table.json").read_text())["dtype"] == "float32"


def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch):
    from mil_ane_passes.commands import table_files

    def fail(array, file):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_files, "_save_array", fail)
    source = make_model(tmp_path / "source.mlpackage")
    with pytest.raises(ane.InputError, match=r"table\.npy: the file cannot be written \(No space left on device\); "
                                             "nothing was written there: free some space"):
        edit(source, tmp_path)
    assert listed(tmp_path) == ["source.mlpackage"]


def test_a_name_that_is_taken_and_two_files_of_one_name_are_refused(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32), mb.TensorSpec((1, 2), dtype=types.int32)],
                opset_version=ct.target.iOS18)
    def program(ids, ids_rows):
        return mb.add(x=mb.gather(x=TABLES["blocks"][0](HALF), indices=ids, axis=0),
                      y=mb.gather(x=normal(COUNT, WIDTH).astype(HALF), indices=ids_rows, axis=0), name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)
    with pytest.raises(ane.InputError, match="'ids_rows' is already an input or output; expected a free name"):
        edit(source, tmp_path)
    free = tmp_path / "free.mlpackage"
    ane.edit(source, free, rename={"ids_rows": "kinds"})
    with pytest.raises(ane.InputError, match=r"a_scale\.npy: two tables have a file of this name; expected other"):
        edit(free, tmp_path, embedding_file={"ids": tmp_path / "a.npy", "kinds": tmp_path / "a_scale.npy"})
    assert listed(tmp_path) == ["free.mlpackage", "source.mlpackage"]
    report = edit(free, tmp_path, embedding_file={"ids": tmp_path / "a.npy", "kinds": tmp_path / "b.npy"})
    assert report.status == "written" and report.verification.equal, str(report)
    assert [os.path.basename(each) for each in report.files] == [
        "a.npy", "a_scale.npy", "a_offset.npy", "a.json", "b.npy", "b.json"]


@pytest.mark.parametrize("option", ["embedding_file", "one_hot"])
def test_ids_that_are_returned_stay(tmp_path, option):
    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids):
        rows = mb.gather(x=normal(COUNT, WIDTH).astype(HALF), indices=ids, axis=0)
        return mb.tanh(x=rows, name="out"), mb.identity(x=ids, name="same")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)
    given = {"embedding_file": {"ids": tmp_path / "table.npy"}, "one_hot": {"ids": "rows"}}
    with pytest.raises(ane.InputError, match=r"the op 'same' \(identity\) reads the token ids 'ids' in addition"):
        ane.edit(source, tmp_path / "out.mlpackage", **{option: given[option]})
    assert listed(tmp_path) == ["source.mlpackage"]
