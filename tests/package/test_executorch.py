"""ExecuTorch programs: their Core ML delegates are linted and rewritten, and all else is kept byte for byte."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from coremltools.models.datatypes import Array
from coremltools.models.neural_network import NeuralNetworkBuilder
from coremltools.models.utils import save_spec

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.package import executorch_blob, executorch_program
from tests.without_torch import hide_torch

PROGRAMS = Path(__file__).parents[2] / "fixtures" / "executorch"
NAMES = ("mixed", "shared", "inline", "state")
SETTINGS = {"preset": "full", "target": "m4", "verify": False}
needs_flatbuffers = pytest.mark.skipif(find_spec("flatbuffers") is None, reason="needs flatbuffers")


def read(path: Path) -> executorch_program.ExecutorchProgram:
    return executorch_program.ExecutorchProgram(path)


def read_blob(path: Path, name: str) -> bytes:
    """The bytes of a delegate's model."""
    blob = read(path).blobs[name]
    return path.read_bytes()[blob.start:blob.start + blob.size]


def read_json(path: Path, name: str, file: str) -> dict[str, object]:
    return json.loads(bytes(read(path).blobs[name].folder[file]))


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rewritten")
    for name in NAMES:
        report = ane.rewrite(PROGRAMS / f"{name}.pte", folder / f"{name}.pte", **SETTINGS)
        assert report.status == "written" and report.changed
    return {name: folder / f"{name}.pte" for name in NAMES}


@needs_flatbuffers
@pytest.mark.parametrize(("name", "blobs", "others"), [
    ("mixed", {"forward/0": {"forward/0": ""}, "forward/2": {"forward/2": ""}}, {"forward/1": "XnnpackBackend"}),
    ("shared", {"decode/0": {"decode/0": "decode", "prefill/0": "prefill"}}, {}),
    ("inline", {"forward/0": {"forward/0": ""}}, {}),
    ("state", {"forward/0": {"forward/0": ""}}, {}),
    ("xnnpack", {}, {"forward/0": "XnnpackBackend"}),
])
def test_delegates_are_found_and_their_folders_flattened_to_the_same_bytes(name, blobs, others):
    path = PROGRAMS / f"{name}.pte"
    program = read(path)
    assert {each: blob.users for each, blob in program.blobs.items()} == blobs and program.others == others
    for each, blob in program.blobs.items():
        parts = executorch_blob.flatten_folder(blob.root, blob.folder)
        assert b"".join(map(bytes, parts)) == read_blob(path, each)


@needs_flatbuffers
@pytest.mark.parametrize("name", NAMES)
def test_all_but_the_models_is_kept(name, rewritten):
    before, after = PROGRAMS / f"{name}.pte", rewritten[name]
    old, new = read(before), read(after)
    assert list(old.blobs) == list(new.blobs) and old.others == new.others
    for each, blob in new.blobs.items():
        was = old.blobs[each]
        assert (blob.users, blob.root, list(blob.folder)) == (was.users, was.root, list(was.folder))
        if name != "inline":
            assert blob.start % (was.start & -was.start) == 0, "the alignment is kept"
    changed = {each for each in new.blobs if read_blob(before, each) != read_blob(after, each)}
    assert changed == {next(iter(new.blobs))}, "the second model of mixed has nothing to rewrite"
    (first,) = changed
    was, now = (read_json(path, first, "metadata.json") for path in (before, after))
    assert {**was, "identifier": ""} == {**now, "identifier": ""}
    assert was["identifier"] != now["identifier"], "devices keep compiled models by it"
    assert len(was["identifier"]) == len(now["identifier"])


@needs_flatbuffers
def test_segments_of_other_backends_are_kept_byte_for_byte(rewritten):
    before, after = (path.read_bytes() for path in (PROGRAMS / "mixed.pte", rewritten["mixed"]))
    start = before.index(b"XH00") - 4
    assert before[start:start + 300] in after and after.count(b"XH00") == 1
    assert len(after) > len(before)


@needs_flatbuffers
def test_debug_handles_follow_the_new_model(rewritten):
    old, new = (read_json(path, "forward/0", "debug_info.json") for path in (PROGRAMS / "mixed.pte",
                                                                             rewritten["mixed"]))
    handles = [{number for each in info["debugSymbolToHandles"].values() for number in each} for info in (old, new)]
    assert handles[0] == handles[1], "no handle is lost"
    assert set(new["debugSymbolToHandles"]) == set(new["debugSymbolToOperationPath"])
    assert set(new["debugSymbolToHandles"]) != set(old["debugSymbolToHandles"])


@needs_flatbuffers
@pytest.mark.parametrize(
    ("name", "delegate"), [("mixed", "forward/0"), ("shared", "prefill/0"), ("inline", "forward/0"),
                           ("state", "forward/0")])
def test_values_and_interface_are_those_of_the_original(name, delegate, rewritten):
    pytest.importorskip("torch")
    before, after = f"{PROGRAMS / name}.pte/{delegate}", f"{rewritten[name]}/{delegate}"
    report = ane.verify(before, after)
    assert report.equal, report
    old, new = (ane.load(path).spec.description for path in (before, after))
    assert old == new


@needs_flatbuffers
def test_where_no_rewrite_fires_the_file_is_copied(rewritten, tmp_path):
    out = tmp_path / "out.pte"
    report = ane.rewrite(rewritten["mixed"], out, passes="split_conv_transpose_bias", verify=False)
    assert report.status == "unchanged" and out.read_bytes() == rewritten["mixed"].read_bytes()


@needs_flatbuffers
def test_one_delegate_alone_is_rewritten(tmp_path):
    out = tmp_path / "out.pte"
    report = ane.rewrite(PROGRAMS / "mixed.pte/forward/2", out, **SETTINGS)
    assert list(report.delegates) == ["forward/2"] and report.status == "unchanged"
    assert out.read_bytes() == (PROGRAMS / "mixed.pte").read_bytes()


@needs_flatbuffers
def test_the_command_reports_every_delegate(tmp_path, capsys):
    assert main(["lint", f"{PROGRAMS}/mixed.pte", "--target", "m4", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [Path(each["model"]).parts[-3:] for each in found["reports"]] == [
        ("mixed.pte", "forward", "0"), ("mixed.pte", "forward", "2")]
    assert main(["lint", f"{PROGRAMS}/inline.pte", "--target", "m4"]) == 1
    text = capsys.readouterr().out
    assert "-o OUT.pte" in text and "OUT.mlpackage" not in text and "fp16_io" not in text
    assert main(["rewrite", f"{PROGRAMS}/mixed.pte", "--dry-run", "--preset", "full", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "dry run" and report["others"] == {"forward/1": "XnnpackBackend"}
    assert list(report["delegates"]) == ["forward/0", "forward/2"]


def check_refused(capsys, expected: list[str], *arguments: object) -> None:
    assert main([str(each) for each in arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(each in message for each in expected), message


@needs_flatbuffers
@pytest.mark.parametrize(("arguments", "expected"), [
    (["lint", "{}/xnnpack.pte"], ["no Core ML delegate", "forward/0 is of XnnpackBackend"]),
    (["rewrite", "{}/xnnpack.pte", "-o", "{out}/out.pte"], ["no Core ML delegate", "CoreMLPartitioner"]),
    (["rewrite", "{}/mixed.pte/forward/7", "-o", "{out}/out.pte"], ["no Core ML delegate 'forward/7'", "forward/2"]),
    (["rewrite", "{}/mixed.pte", "-o", "{out}/out.mlpackage"], ["has 2 models", "mixed.pte/forward/2"]),
    (["rewrite", "{}/mixed.pte", "-o", "{}/mixed.pte", "--overwrite"], ["is the source"]),
    (["rewrite", "{}/mixed.pte", "-o", "{}/shared.pte"], ["exists already", "--overwrite"]),
    (["rewrite", "{}/mixed.pte", "-o", "{out}/out.pte/"], ["out.pte/: names a folder", "a .pte file"]),
    (["rewrite", "{}/mixed.pte"], ["no output", "OUT.pte"]),
    (["lint", "{}/inline.pte", "--fix"], ["inline.pte", "--fix", "rewrite", "OUT.pte"]),
    (["lint", "{}/inline.pte", "--fix", "--in-place"], ["inline.pte", "--fix", "rewrite", "OUT.pte"]),
    (["lint", "{}/inline.pte", "--fix", "-o", "{out}/out.pte"], ["inline.pte", "--fix", "rewrite", "OUT.pte"]),
    (["rewrite", "{}/inline.pte", "-o", "{out}/out.pte", "--passes", "fp16_io"], ["fp16_io", "inputs and outputs"]),
    (["rewrite", "{}/mixed.pte", "-o", "{out}/out.pte", "--ranges", "x=0:1"], ["--ranges", "has 2"]),
    (["rewrite", "{}/absent.pte", "-o", "{out}/out.pte"], ["absent.pte: no such file", "a .pte file"]),
    (["rewrite", "{}/mixxed.pte", "-o", "{out}/out.pte"], ["no such file", "did you mean '", "mixed.pte'?"]),
    (["calibrate", "{}/mixxed.pte/forward/0"], ["mixxed.pte: no such file", "mixed.pte'?"]),
])
def test_what_cannot_be_done_is_refused(arguments, expected, tmp_path, capsys):
    check_refused(capsys, expected, *(each.replace("{out}", str(tmp_path)).replace("{}", str(PROGRAMS))
                                      for each in arguments))
    assert not any(tmp_path.iterdir())


@needs_flatbuffers
@pytest.mark.parametrize("name", ["mixed.pte", "net.mlmodel"])
def test_a_file_that_another_run_puts_there_meanwhile_stays(name, tmp_path):
    source = PROGRAMS / name if name == "mixed.pte" else make_network(tmp_path / name)
    target = tmp_path / f"out{source.suffix}"
    settings = {**SETTINGS, "target": "all"} if name == "mixed.pte" else {}

    def write_another(text):
        if not target.exists():
            target.write_text("of another run")

    with pytest.raises(ane.InputError, match=r"out\.\w+: another run has written a file to this path"):
        ane.rewrite(source, target, **settings, progress=write_another)
    assert target.read_text() == "of another run"
    ane.rewrite(source, target, **settings, overwrite=True)
    assert target.read_bytes() != b"of another run"


def make_network(path: Path) -> Path:
    """A network of one layer."""
    builder = NeuralNetworkBuilder([("x", Array(2, 3, 4))], [("y", None)], disable_rank5_shape_mapping=True)
    builder.add_softmax_nd("softmax", "x", "y", 1)
    builder.spec.description.output[0].type.multiArrayType.shape.extend([2, 3, 4])
    save_spec(builder.spec, str(path))
    return path


@needs_flatbuffers
def test_a_compiled_model_is_refused_by_name(tmp_path, capsys):
    raw = (PROGRAMS / "mixed.pte").read_bytes()
    path = tmp_path / "compiled.pte"
    path.write_bytes(raw.replace(b"egakcaplm.ledom", b"cledomlm_.ledom").replace(b'"cledomlm_.ledom"',
                                                                                b'"cledomlm.ledom" '))
    check_refused(capsys, ["compiled.pte/forward/0", "model.mlmodelc", "MODEL_TYPE.MODEL"], "rewrite", path, "-o",
                  tmp_path / "out.pte")


@needs_flatbuffers
@pytest.mark.parametrize("name", ["mixed", "shared", "inline"])
def test_damaged_programs_are_refused_without_a_crash(name, tmp_path):
    """Truncated anywhere, and with numbers of the flatbuffer or of the list of files replaced."""
    raw = (PROGRAMS / f"{name}.pte").read_bytes()
    path = tmp_path / "damaged.pte"
    end = raw.rindex(b'"sedon"{')
    variants = [raw[:length] for length in (0, 3, 8, 40, 100, 1000, len(raw) // 2, end)]
    variants += [raw[:at] + struct.pack("<I", value) + raw[at + 4:] for at in (0, *range(8, 1200, 28))
                 for value in (0xFFFFFFFF, 0x7FFFFFFF)]
    refused = 0
    for variant in variants:
        path.write_bytes(variant)
        try:
            read(path).select_blobs(None)
        except ane.InputError as error:
            assert str(error).startswith(str(path)), error
            refused += 1
    assert refused >= 8, "all that are truncated, at least"


@pytest.mark.parametrize("index", [
    b"", b"[]", b'{"nodes":[]}', b'{"nodes":' + b"[" * 100_000, b'{"nodes":[{"kind":2}]}',
    b'{"nodes":[{"kind":0,"name":"a","dataRegion":{"offset":0,"size":99}}]}',
    b'{"nodes":[{"kind":1,"name":"a","children":{"a":0}}]}',
    b'{"nodes":[{"kind":0,"name":"a","dataRegion":{"offset":0,"size":1}},{"kind":1,"name":"b","children":{"../a":0}}]}',
    b'{"nodes":[{"kind":0,"name":"a","dataRegion":{"offset":0,"size":1}},'
    b'{"kind":1,"name":"b","children":{"a":0,"c":0}}]}',
    b'{"nodes":[{"kind":0,"name":"a","dataRegion":{"offset":0,"size":1}},{"kind":1,"name":"b","children":{}}]}',
])
def test_a_blob_that_contradicts_itself_is_refused(index):
    with pytest.raises(ValueError):
        executorch_blob.read_folder(memoryview(b"12345678" + index[::-1]))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("executorch") is not None, reason="coremltools imports ExecuTorch, which "
                    "imports flatbuffers")
def test_without_flatbuffers_the_message_names_what_to_install(tmp_path):
    hidden = "import sys; sys.modules['flatbuffers'] = None; from mil_ane_passes.commands.main import main; "
    done = subprocess.run([sys.executable, "-c", f"{hidden}sys.exit(main(['lint', {str(PROGRAMS / 'mixed.pte')!r}]))"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'mil-ane-passes[executorch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_program_is_refused(tmp_path, capsys):
    path = tmp_path / "text.pte"
    path.write_text("something else")
    check_refused(capsys, ["is not an ExecuTorch program", "to_executorch"], "lint", path)


@needs_flatbuffers
def test_a_delegate_is_run_by_its_own_function(tmp_path, capsys):
    """Two methods share a model, and each names the function of it that it calls."""
    pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((1, 8, 96)).astype(np.float32)
    prefill = f"{PROGRAMS}/shared.pte/prefill/0"
    (found,) = ane.run(prefill, {"x": x}).values()
    (expected,) = ane.run(f"{PROGRAMS}/shared.pte", {"x": x}, function="prefill").values()
    assert np.array_equal(found, expected)
    with pytest.raises(ane.InputError, match="axis 2 differs"):
        ane.run(f"{PROGRAMS}/shared.pte/decode/0", {"x": x})
    np.savez(tmp_path / "feeds.npz", x=x)
    out = tmp_path / "out.pte"
    assert main(["rewrite", prefill, "-o", str(out), "--feeds", str(tmp_path / "feeds.npz")]) == 0, capsys.readouterr()
    old, new = (ane.load(f"{path}/prefill/0") for path in (PROGRAMS / "shared.pte", out))
    assert old.spec.description == new.spec.description, "its default function is that of before"


@needs_flatbuffers
def test_a_function_that_the_model_lacks_is_named(tmp_path):
    path = tmp_path / "in.pte"
    path.write_bytes((PROGRAMS / "shared.pte").read_bytes().replace(b'"functionName": "prefill"',
                                                                    b'"functionName": "prefilx"'))
    with pytest.raises(ane.InputError, match="prefill/0: .*'prefilx'.*decode or prefill"):
        ane.load(f"{path}/prefill/0")


@needs_flatbuffers
@pytest.mark.parametrize("name", ["in.pte", "./in.pte", "hard.pte", "link.pte"])
def test_results_do_not_replace_the_program_of_a_delegate(name, tmp_path, monkeypatch, capsys):
    """Not as the program itself, nor as a file of its own that is a link to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(PROGRAMS / "inline.pte", "in.pte")
    os.link("in.pte", "hard.pte")
    os.symlink("in.pte", "link.pte")
    np.savez("feeds.npz", x=np.zeros((1, 8, 64), np.float32))
    for arguments in (["run", "in.pte/forward/0", "--feeds", "feeds.npz", "-o", name],
                      ["run", "in.pte/forward/0/", "--feeds", "feeds.npz", "-o", name],
                      ["lint", "in.pte/forward/0", "--format", "html", "-o", name],
                      ["verify", "in.pte/forward/0", "in.pte", "--report", name]):
        check_refused(capsys, ["is read by this run", "expected another file"], *arguments)
    assert Path("in.pte").read_bytes() == (PROGRAMS / "inline.pte").read_bytes()


@needs_flatbuffers
def test_a_check_of_delegates_is_repeated(rewritten, tmp_path, capsys):
    pytest.importorskip("torch")
    evidence = tmp_path / "evidence.json"
    models = f"{PROGRAMS}/mixed.pte/forward/0", f"{rewritten['mixed']}/forward/0"
    assert main(["verify", *models, "--report", str(evidence)]) == 0
    capsys.readouterr()
    assert main(["verify", "--replay", str(evidence)]) == 0
    assert "repeated: the recorded models" in capsys.readouterr().out
    assert main(["verify", models[0], f"{PROGRAMS}/inline.pte/forward/0", "--replay", str(evidence)]) == 1
    assert "not repeated: after is not the recorded model" in capsys.readouterr().out
    check_refused(capsys, ["absent.pte: no such file", "a .pte file written by ExecuTorch"], "verify",
                  tmp_path / "absent.pte/forward/0", models[1], "--report", evidence)


@needs_flatbuffers
@pytest.mark.parametrize("address", ["inline.pte", "mixed.pte/forward/0"])
@pytest.mark.parametrize("command", [
    ["edit", "{}", "-o", "{out}/a.mlpackage", "--rename", "x=y"], ["adapt", "{}", "-o", "{out}/a"],
    ["upgrade", "{}", "-o", "{out}/a.mlpackage"], ["rewrite", "{}", "-o", "{out}/a.mlmodel"]])
def test_commands_for_packages_name_the_way_to_one(command, address, tmp_path, capsys):
    check_refused(capsys, [address, "ExecuTorch program", "IN.pte/METHOD/N -o OUT.mlpackage"], *(
        each.replace("{out}", str(tmp_path)).replace("{}", f"{PROGRAMS}/{address}") for each in command))
    assert not any(tmp_path.iterdir())


@needs_flatbuffers
def test_a_batch_names_the_way_to_a_package(tmp_path, capsys):
    assert main(["batch", "rewrite", f"{PROGRAMS}/inline.pte", "-o", str(tmp_path / "out"), "--jobs", "0"]) == 2
    assert "IN.pte/METHOD/N -o OUT.mlpackage" in capsys.readouterr().out


@needs_flatbuffers
@pytest.mark.sampled(1)
@pytest.mark.parametrize("address", ["in.pte", "in.pte/forward/0"])
@pytest.mark.parametrize("size", [0, 5000])
def test_a_program_that_is_cut_while_it_is_read_is_refused(size, address, tmp_path):
    """In a process of its own: a read of what is no longer there ended it by a signal."""
    shutil.copy(PROGRAMS / "mixed.pte", tmp_path / "in.pte")
    script = f"""
import os, sys
from mil_ane_passes.commands import main, rewrite_executorch
rewrite = rewrite_executorch.rewrite_model
def cut(options):
    made = rewrite(options)
    os.truncate("in.pte", {size})
    return made
rewrite_executorch.rewrite_model = cut
sys.exit(main.main(["rewrite", sys.argv[1], "-o", "out.pte", "--no-verify"]))
"""
    done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, cwd=tmp_path,
                          env=hide_torch())
    assert done.returncode == 2 and "in.pte: was modified while it was read" in done.stderr, done
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.pte"]


@pytest.mark.parametrize("handles", [
    {"1": None}, {"1": [[]]}, {"1": [None]}, {"1": [[{}, []]]}, {"1": 3},
    {"x": [[{"Output": "a", "Operator": "b"}]]}, []])
def test_debug_handles_of_another_form_are_left_as_they_are(handles, tmp_path):
    (tmp_path / "executorch_debug_handle_mapping.json").write_text(json.dumps({"mapping": handles}))
    made = executorch_blob.replace_model({"debug_info.json": b"kept"}, tmp_path)
    assert made["debug_info.json"] == b"kept"


@needs_flatbuffers
def test_a_name_that_no_file_can_have_is_reported_of_the_program(tmp_path):
    program = read(PROGRAMS / "inline.pte")
    blob = program.blobs["forward/0"]
    folder = {**blob.folder, "model.mlpackage": {**blob.folder["model.mlpackage"], "a" * 300: b"x"}}
    with open(tmp_path / "in.pte", "wb") as file:
        program.write({"forward/0": executorch_blob.flatten_folder(blob.root, folder)}, file)
    with pytest.raises(ane.InputError, match=f"^{tmp_path}/in.pte: .*too long"):
        ane.load(tmp_path / "in.pte")


@pytest.mark.slow
@needs_flatbuffers
@pytest.mark.parametrize("name", NAMES)
def test_executorch_reads_the_result(name, rewritten, tmp_path):
    """Its deserializer finds the same program, its backend the same debug handles, its runtime's verifier no fault."""
    pytest.importorskip("executorch")
    from executorch.backends.apple.coreml import executorchcoreml
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.runtime import Runtime, Verification

    before, after = (deserialize_pte_binary(path.read_bytes()) for path in (PROGRAMS / f"{name}.pte", rewritten[name]))
    old, new = ([bytes(each.data) for each in found.program.backend_delegate_data] for found in (before, after))
    assert [one == other for one, other in zip(old, new, strict=True)].count(False) == (name != "shared")
    before.program.backend_delegate_data = after.program.backend_delegate_data = []
    assert before.program == after.program
    for each in read(rewritten[name]).blobs:
        folder = tmp_path / each.replace("/", "_")
        folder.mkdir()
        assert executorchcoreml.unflatten_directory_contents(read_blob(rewritten[name], each), str(folder))
        (root,) = folder.iterdir()
        if (root / "debug_info.json").exists():
            info = CoreMLBackend.get_model_debug_info(root / "model.mlpackage")
            assert dataclasses.asdict(info) == json.loads((root / "debug_info.json").read_text())
    program = Runtime.get().load_program(rewritten[name].read_bytes(), verification=Verification.InternalConsistency)
    assert {each.partition("/")[0] for each in read(rewritten[name]).blobs} <= set(program.method_names)
