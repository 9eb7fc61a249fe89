"""Stand-ins for what coremltools has on a Mac only. All but three methods are coremltools' own classes.

`MLModel.predict` is the reference runtime, with published faults where the ANE may be used; the compute plan is what
the test says.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import types as python
from pathlib import Path

import coremltools as ct
from coremltools.models import compute_device, compute_plan

import mil_ane_passes as ane
from mil_ane_passes.runtime import predictor

SCRIPT = Path(ane.__file__).parent / "report" / "mac" / "measure.py"

REAL = ct.models.MLModel
CPU, GPU, ANE = (object.__new__(each) for each in (
    compute_device.MLCPUComputeDevice, compute_device.MLGPUComputeDevice, compute_device.MLNeuralEngineComputeDevice))
DEVICES = {"cpu": CPU, "gpu": GPU, "ane": ANE, None: None}
FACTS = {"hw.model": "Mac16,12", "machdep.cpu.brand_string": "Apple M4", "hw.memsize": "17179869184",
         "-productVersion": "26.1", "-buildVersion": "25B78"}


def bridged(value):
    """An array as coremltools' bridge to Core ML takes it: of four types."""
    if value.dtype.str[1:] not in ("i1", "i4", "f4", "f8"):
        raise RuntimeError(f"value type not convertible: {value.dtype}")
    return value


def fake_mac(monkeypatch, *, quirks=(), answer=None, broken=(), facts=FACTS):
    """Turn this machine into one that Core ML seems to run on.

    `quirks` are published faults of the ANE, `answer(function, op)` gives (supported, preferred, cost) of an op or
    None, `broken` names compute units with which nothing loads.
    """

    class FakeMLModel(REAL):
        def __init__(self, model, is_temp_package=False, mil_program=None, skip_model_load=False,
                     compute_units=ct.ComputeUnit.ALL, weights_dir=None, function_name=None, optimization_hints=None):
            super().__init__(model, is_temp_package, mil_program, True, compute_units, weights_dir, function_name,
                             optimization_hints)
            if compute_units.name in broken:
                raise RuntimeError(f"Error compiling model for {compute_units.name}")
            faults = () if compute_units.name == "CPU_ONLY" else quirks
            self.stand_in = predictor(REAL(model, skip_model_load=True, function_name=function_name),
                                      precision="float16", quirks=faults)

        def predict(self, data, state=None):
            return {name: value.convert("RGBA") if getattr(value, "mode", None) == "RGB" else value
                    for name, value in self.stand_in.predict(data, state).items()}

        def make_state(self):
            made = self.stand_in.make_state()
            proxy, write = made.__proxy__, made.__proxy__.write_state
            proxy.write_state = lambda name, value: write(name, bridged(value))
            return made

        def get_compiled_model_path(self):
            return self.package_path

    class FakeMLComputePlan(compute_plan.MLComputePlan):
        def __init__(self, proxy):
            self.program, self.units = proxy, None

        @property
        def model_structure(self):
            functions = {name: compute_plan.MLModelStructureProgramFunction([], self.block(name, function))
                         for name, function in self.program.functions.items()}
            return compute_plan.MLModelStructure(None, compute_plan.MLModelStructureProgram(functions), None)

        def block(self, name, block):
            made = [compute_plan.MLModelStructureProgramOperation(
                inputs={}, operator_name=op.op_type if op.op_type == "const" else f"ios17.{op.op_type}",
                outputs=[python.SimpleNamespace(name=var.name, type=None) for var in op.outputs],
                blocks=[self.block(name, inner) for inner in op.blocks], __proxy__=(name, op))
                for op in block.operations]
            return compute_plan.MLModelStructureProgramBlock([], made, [])

        def measured_op(self, operation):
            name, op = operation.__proxy__
            return None if op.op_type == "const" or answer is None else answer(name, op)

        def get_compute_device_usage_for_mlprogram_operation(self, operation):
            told = self.measured_op(operation)
            return told and compute_plan.MLComputePlanDeviceUsage(DEVICES[told[1]], [DEVICES[each] for each in told[0]])

        def get_estimated_cost_for_mlprogram_operation(self, operation):
            told = self.measured_op(operation)
            return told and compute_plan.MLComputePlanCost(told[2])

        @classmethod
        def load_from_path(cls, path, compute_units=ct.ComputeUnit.ALL):
            return cls(ane.load(path).program)

    def run(command, **how):
        with contextlib.suppress(KeyError):
            return subprocess.CompletedProcess(command, 0, f"{facts[command[-1]]}\n", "")
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(ct.models, "MLModel", FakeMLModel)
    monkeypatch.setattr(compute_plan, "MLComputePlan", FakeMLComputePlan)
    monkeypatch.setattr(subprocess, "run", run)
    return FakeMLModel, FakeMLComputePlan


def script(folder):
    """The names in the folder's own copy of the script, which runs under the name of the package's, to be counted."""
    source = Path(folder) / "measure.py"
    assert source.read_bytes() == SCRIPT.read_bytes()
    scope = {"__name__": "measure", "__file__": str(SCRIPT)}
    exec(compile(source.read_text(encoding="utf-8"), str(SCRIPT), "exec"), scope)
    scope["__file__"] = str(source)
    return scope


def measured(folder, *arguments):
    """Run the script in the folder, as on a Mac; returns what it wrote."""
    assert script(folder)["main"](["--runs", "2", *arguments]) == 0
    return json.loads((Path(folder) / "result.json").read_text())
