"""Text models as packages: NaN or wrong under the published fault before, PyTorch's numbers after, and verified."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.lab.versions.needs import coremltools_from
from tests.rewrites.helpers import half
from tests.rewrites.masked_models import MODELS, example, model

QUICK = ("DistilBERT, eager", "minGPT")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
EXPORTED = {name: ct.target.iOS18 if name.endswith("sdpa") else ct.target.iOS17 for name in MODELS}
BY_HAND = ("minGPT", "OpenAI")
"Of these every row sees a key, and no mask is multiplied by infinity: right under the fault, too, as it is modelled."
TRACED = [name for name in MODELS if not name.startswith(("BERT", "Llama"))]
"coremltools cannot convert those as torch.jit traces them: int() of a shape."


def converted(name, exported=True, frontend=ct.convert, convert_to="mlprogram", **settings):
    inputs = example(name)
    return convert_model(half(model(name)), *inputs, way="exported" if exported else "traced", check_trace=False,
                         names=[f"input_{number}" for number in range(len(inputs))], convert=frontend,
                         convert_to=convert_to, minimum_deployment_target=EXPORTED[name], **settings)


def outputs(program, inputs, **how):
    function = program.functions["main"]
    given = {}
    for (name, var), each in zip(function.inputs.items(), inputs):
        kind = np.int32 if not each.is_floating_point() else np.float16 if "fp16" in str(var.dtype) else np.float32
        given[name] = each.numpy().astype(kind)
    (found,) = Runtime(program, **how)(given).values()
    return found.astype(np.float64)


def torchs(name):
    """PyTorch's numbers, without its fused attention: that is wrong for a float32 mask of float64 scores."""
    inputs = [each.double() if each.is_floating_point() else each for each in example(name)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return half(model(name)).double()(*inputs).numpy()


def infinite(program, least=65504):
    """Ops with a float constant beyond fp16, or of its largest number, which coremltools 9.1 makes of those."""
    return [op.op_type for _, op in iterate_ops(program) if op.op_type != "const" for var in op.get_flattened_inputs()
            if var.val is not None and np.asarray(var.val).dtype.kind == "f"
            and np.any(np.abs(np.asarray(var.val, dtype=np.float64)) >= least)]


def close(found, truth, share):
    np.testing.assert_allclose(found, truth, rtol=0, atol=share * np.abs(truth).max())


@coremltools_from("9.0", "rejects the _assert_tensor_metadata that torch.export writes")
@pytest.mark.parametrize("name", NAMES)
def test_a_package_is_rewritten_proved_and_right_despite_the_fault(name, tmp_path):
    source, target = tmp_path / "source.mlpackage", tmp_path / "target.mlpackage"
    converted(name).save(str(source))
    report = ane.rewrite(source, target, passes="finite_mask")
    (trace,) = report.traces
    assert trace.fired and not trace.near_misses and target.exists(), str(report)
    truth, inputs = torchs(name), example(name)
    before, after = ane.load(source).program, ane.load(target).program
    assert infinite(before) and not infinite(after)
    if name not in BY_HAND and infinite(before, np.inf):  # the fault is about infinities
        faulty = outputs(before, inputs, precision="float16", quirks=["infinite_mask"])
        assert not np.allclose(faulty, truth, rtol=0, atol=0.1 * np.abs(truth).max())
    close(outputs(after, inputs, precision="float64"), truth, 0.01)
    close(outputs(after, inputs, precision="float16", quirks=["infinite_mask"]), truth, 0.05)


@pytest.mark.parametrize("name", [each for each in NAMES if getattr(each, "values", (each,))[0] in TRACED])
def test_a_traced_model_in_the_hosts_pipeline(name):
    made = converted(name, exported=False, convert_to="milinternal",
                     pass_pipeline=ane.pipeline(passes="finite_mask"))
    assert not infinite(made)
    close(outputs(made, example(name), precision="float16", quirks=["infinite_mask"]), torchs(name), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_our_frontend_and_the_rewrite_live_together(name, tmp_path):
    """What the frontend makes finite stays as it is; what it leaves infinite goes below that; all of it is right."""
    made = converted(name, frontend=ane.convert)
    made.save(str(tmp_path / "ours.mlpackage"))
    program = ane.load(tmp_path / "ours.mlpackage").program
    assert not find_matches(find_rewrite("finite_mask").configured(), program).fired
    close(outputs(program, example(name), precision="float16", quirks=["infinite_mask"]), torchs(name), 0.05)


def test_the_pass_is_one_of_the_safe_ones():
    assert find_rewrite("finite_mask").preset == "safe" and "ane::finite_mask" in ane.pipeline().passes
