"""Transforms for language models together: each alone, all that go together, in any order on the command line.

Models are hostile: two functions, tied and compressed weights, names that are no identifiers, a flexible number of ids.
"""

from __future__ import annotations

import itertools

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import make, normal, spec_of, tree, with_functions, write_spec
from tests.transforms.helpers import host_takes

ROWS, WIDTH, HALF = 64, 48, np.float16
NAMES = {"ids": "token ids.1", "k": "k/0", "v": "v-1", "logits": "9logits \u00e9"}
IDS = {"fixed": (1, 2), "largest": (1, 6)}


def make_decoder(path, steps=2, *, tied=False, flexible=False):
    """A decoder of two layers with a state each, a table of embeddings, and a head, which may be the table."""
    table = normal(ROWS, WIDTH).astype(HALF)
    head = table if tied else normal(ROWS, WIDTH, seed=5).astype(HALF)
    weight = normal(WIDTH, WIDTH, seed=7).astype(HALF)  # of both layers
    count = get_new_symbol() if flexible else steps
    specs = [mb.TensorSpec((1, count), dtype=types.int32),
             *(mb.StateTensorSpec((1, 2, 4, WIDTH), dtype=types.fp16) for _ in range(2))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(ids, k, v):
        x = mb.gather(x=table, indices=ids, axis=0)
        for state in (k, v):
            mean = mb.expand_dims(x=mb.reduce_mean(x=x, axes=[1], keep_dims=True), axes=[0])
            held = mb.coreml_update_state(state=state, value=mb.add(
                x=mb.mul(x=mb.read_state(input=state), y=HALF(0.5)), y=mean))
            x = mb.add(x=x, y=mb.reduce_mean(x=held, axes=[0, 1, 2], keep_dims=False))
            x = mb.tanh(x=mb.linear(x=x, weight=weight))
        return mb.linear(x=x, weight=head, name="logits")

    more = {"inputs": [ct.TensorType("ids", (1, ct.RangeDim(1, 6)), dtype=np.int32)]} if flexible else {}
    return make(path, program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY, **more)


def rename_values(path):
    """Give inputs, states and outputs names that are no identifiers."""
    spec = spec_of(path)
    for function in spec.mlProgram.functions.values():
        for each in function.inputs:
            each.name = NAMES.get(each.name, each.name)
        for block in function.block_specializations.values():
            for op in block.operations:
                for argument in (one for bound in op.inputs.values() for one in bound.arguments):
                    if argument.WhichOneof("binding") == "name":
                        argument.name = NAMES.get(argument.name, argument.name)
                for output in op.outputs:
                    output.name = NAMES.get(output.name, output.name)
            block.outputs[:] = [NAMES.get(name, name) for name in block.outputs]
    for feature in (*spec.description.input, *spec.description.output, *spec.description.state):
        feature.name = NAMES.get(feature.name, feature.name)
    write_spec(path, spec)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The model of a kind, made once."""
    folder, made = tmp_path_factory.mktemp("decoders"), {}

    def build(kind):
        path = folder / f"{kind}.mlpackage"
        if kind == "two functions":
            one, other = (make_decoder(folder / f"{count}.mlpackage", count) for count in (1, 3))
            return with_functions(path, {"decode": one, "prefill": other}, "decode")
        plain = make_decoder(path, tied=kind == "tied", flexible=kind == "flexible")
        if kind == "compressed":
            model = cto.linear_quantize_weights(
                ct.models.MLModel(str(plain), skip_model_load=True), cto.OptimizationConfig(
                    cto.OpLinearQuantizerConfig(dtype="int4", granularity="per_block", block_size=4,
                                                weight_threshold=32)))
            model.save(str(folder / "int4.mlpackage"))
            return folder / "int4.mlpackage"
        return rename_values(plain) if kind == "names" else plain

    def get(kind):
        if kind not in made:
            made[kind] = build(kind)
        return made[kind]

    return get


def options_of(kind, names, folder):
    """The options `names` for a model of a kind; a flexible one is padded unless it is fixed."""
    ids, logits = (NAMES[each] if kind == "names" else each for each in ("ids", "logits"))
    every = {"fix_shape": {ids: IDS["fixed"]}, "pad_shape": {ids: IDS["largest"]}, "merge_states": "cache",
             "state_to_io": "all", "one_hot": {ids: "rows"}, "embedding_file": {ids: folder / "table.npy"},
             "tile_output": {logits: 3}, "split_inputs": [ids], "split_parts": 2, "fold_sizes": True,
             "one_hot_rows": True, "add_masks": True, "narrow_masks": True}
    found = {name: every[name] for name in names}
    if kind == "flexible" and "fix_shape" not in found:
        found["pad_shape"] = every["pad_shape"]
    return found


KINDS = ("plain", "tied", "two functions", "compressed", "names", "flexible")
ALONE = ("merge_states", "state_to_io", "one_hot", "embedding_file", "tile_output", "split_inputs", "split_parts")
TOGETHER = (
    ("merge_states", "state_to_io", "embedding_file", "tile_output", "split_parts"),
    ("state_to_io", "one_hot", "tile_output", "split_parts"), ("merge_states", "tile_output", "split_inputs"),
    ("embedding_file", "split_parts", "fold_sizes", "one_hot_rows", "add_masks", "narrow_masks"))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("names", [*((each,) for each in ALONE), *TOGETHER], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_source_over_steps(source, tmp_path, kind, names):
    before = tree(source(kind))
    report = ane.edit(source(kind), tmp_path / "out.mlpackage", verify=True, **options_of(kind, names, tmp_path))
    assert report.status == "written" and report.verification.equal and not report.verification.notes, str(report)
    functions = 2 if kind == "two functions" else 1
    assert len(report.verification.cases) == 6 * functions  # two seeds, three steps of the states
    compared = {each.output for case in report.verification.cases for each in case.outputs}
    renamed = NAMES if kind == "names" else {name: name for name in NAMES}
    assert {renamed["logits"], f"state {renamed['k']}", f"state {renamed['v']}"} <= compared
    assert len(report.outputs) == 1 + any(name.startswith("split") for name in names)
    for path in report.outputs:
        host_takes(ane.load(path).path)
    assert tree(source(kind)) == before


@pytest.mark.parametrize(("kind", "name"), [
    ("plain", "fix_shape"), ("flexible", "fix_shape"), ("flexible", "pad_shape")])
def test_shapes_alone(source, tmp_path, kind, name):
    report = ane.edit(source(kind), tmp_path / "out.mlpackage", verify=True, **options_of(kind, [name], tmp_path))
    assert report.status == ("unchanged" if kind == "plain" else "written") and report.verification.equal, str(report)
    assert len(report.verification.cases) == 6


def test_the_order_on_the_command_line_does_not_matter(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = (["--split-parts", "2"], ["--tile-output", "logits=2"], ["--state-to-io", "all"],
             ["--embedding-file", "ids=table.npy"])
    found = []
    for order in itertools.permutations(given):
        assert main(["edit", str(source("plain")), "-o", "out.mlpackage", "--overwrite", *sum(order, [])]) == 0
        found.append({str(path.relative_to(tmp_path)): path.read_bytes() for path in sorted(tmp_path.rglob("*"))
                      if path.is_file()})
    assert len(found) == 24 and all(each == found[0] for each in found)
    assert {"table.npy", "table.json"} <= found[0].keys() and any(name.startswith("out_2") for name in found[0])


@pytest.mark.parametrize(("names", "more", "reason"), [
    (["merge_states"], {"merge_states": "my cache"}, "'my cache' is not a name that Core ML accepts"),
    (["merge_states"], {"merge_states": "state"}, "'state' is a reserved word of the MIL language; expected"),
    (["one_hot"], {"one_hot": {"ids": "rows.1"}}, "'rows.1' is not a name that Core ML accepts"),
    (["merge_states", "split_parts"], {}, "states are used on both sides of others: cache; expected them as inputs and "
                                          "outputs, by state_to_io="),
    (["one_hot", "embedding_file"], {}, "'ids' is replaced by one_hot= already; expected only one of the two"),
    (["split_inputs", "split_parts"], {}, "split_inputs and split_parts: each makes several packages; expected one"),
    (["embedding_file", "split_inputs"], {}, "'ids' is replaced by embedding_file= already; expected only one of"),
])
def test_edits_that_do_not_go_together_are_named(source, tmp_path, names, more, reason):
    with pytest.raises(ane.InputError) as refusal:
        ane.edit(source("plain"), tmp_path / "out.mlpackage", **{**options_of("plain", names, tmp_path), **more})
    assert reason in str(refusal.value), str(refusal.value)
    assert not list(tmp_path.iterdir())
