"""What a user's typed program makes of the public functions. It is read by mypy and never run.

Each `type: ignore` stands where the checker has to object: one that is not needed is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import mil_ane_passes as ane

Arrays = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


def rewritten(source: Path, feeds: Arrays) -> ane.Package:
    report = ane.rewrite(source, source.with_name("out.mlpackage"), preset="full", target="H16", feeds=feeds,
                         ranges={"image": (0.0, 1.0)}, options={"undilate_conv": {"factor": 2}}, overwrite=True)
    status: str = report.status
    fired: list[int] = [len(trace.fired) for trace in report.traces]
    proved: bool = report.verified and report.verify is not None and report.verify.equal
    print(status, fired, proved, report.to_dict()["schema"], report.predicted and report.predicted[1].to_dict())
    return ane.load(source)


def passes() -> None:
    ane.rewrite("in.mlpackage", passes="lift_conv_1d,finite_mask{limit=3e4}")
    ane.rewrite("in.mlpackage", passes=["lift_conv_1d", "finite_mask"], feeds=[{"x": np.zeros(3)}, {"x": np.ones(3)}])
    ane.rewrite("in.mlpackage", passes={"lift_conv_1d": {}, "finite_mask": None}, max_growth=None)
    ane.rewrite("in.mlpackage", passes=3)  # type: ignore[arg-type]
    ane.rewrite("in.mlpackage", feeds=np.zeros(3).tolist)  # type: ignore[arg-type]
    ane.rewrite("in.mlpackage", ranges={"x": 3})  # type: ignore[dict-item]
    ane.rewrite("in.mlpackage", verify="no")  # type: ignore[arg-type]
    ane.rewrite("in.mlpackage", presets="full")  # type: ignore[call-arg]
    ane.pipeline(preset="full", target="H14", passes=("lift_conv_1d",), ranges={"x": [0, 1]})
    ane.pipeline(target=14)  # type: ignore[arg-type]


def edited(source: str) -> list[str]:
    report = ane.edit(source, Path("out.mlpackage"), rename={"x": "image"}, drop_output="y", io="fp16", link=True)
    ane.edit(source, dry_run=True, fix_shape={"x": (1, 3, 8, 8)}, expose=["h"], io={"fp16": ["x"]})
    ane.edit(source, dry_run=True, fix_shape=[{"x": (1, 3)}, {"x": (2, 3)}], split_at="h")
    ane.edit(source, dry_run=True, fix_shape={"small": {"x": [1, 3]}, "large": {"x": [2, 3]}})
    ane.edit(source, dry_run=True, fix_shape={"x": 3})  # type: ignore[arg-type]
    ane.edit(source, dry_run=True, rename=["x"])  # type: ignore[arg-type]
    ane.edit(source, dry_run=True, expose=3)  # type: ignore[arg-type]
    return report.outputs


def linted(source: str) -> float:
    report = ane.lint(source, target="H15", select="ANE3", ignore=["int-inputs"], after="other.mlpackage",
                      measured={"program": {}}, baseline=Path("lint.json"))
    codes: list[str] = [finding.rule.code for finding in report.findings]
    print(codes, report.after is not None and report.after.share, report.left_out.get("part"))
    ane.lint(source, select=3)  # type: ignore[arg-type]
    ane.lint(source, measured=3)  # type: ignore[arg-type]
    return report.share


def ran(source: str, feeds: Mapping[str, NDArray[np.float32]]) -> Arrays:
    state: dict[str, NDArray[np.float32]] = {}
    out = ane.run(source, feeds, precision="float16", state=state, quirks=["infinite_mask"])
    traced = ane.trace(source, feeds)
    if traced.first is not None:
        print(traced.first.value, [row.inf for row in traced.rows])
    told = ane.calibrate(source, ranges={"x": (0, 1)}, worst=3)
    print(told.runs, told.first is None)
    ane.run(source, [feeds])  # type: ignore[arg-type]
    ane.run(source)  # type: ignore[call-arg]
    return out


def proved(source: str) -> bool:
    report = ane.verify(source, abs, precision="float32", seeds=1, tolerance=1e-3, progress=print)
    for case in report.cases:
        print(case.function, case.passed, [output.equal_bits for output in case.outputs])
    ane.verify(source, source, exactness=3)  # type: ignore[arg-type]
    return report.equal


def in_one_go(folder: Path) -> int:
    done = ane.batch("rewrite", [folder, "*.mlpackage"], "out", jobs=2, preset="full")
    print(done.counts(), [item.status for item in done.items])
    ane.batch("rewrite", folder)  # type: ignore[call-arg]
    return done.exit_code


def saved(package: ane.Package) -> str:
    ane.save(package, "out.mlpackage", overwrite=True)
    ane.save("in.mlpackage", "out.mlpackage")  # type: ignore[arg-type]
    functions: tuple[str, ...] = package.functions
    return f"{package.path.name}, {package.weight_bytes} bytes, {functions}, {ane.__version__.upper()}"


def predicted(feeds: Arrays) -> Mapping[str, object]:
    with ane.torch_frontend.patched():
        model = ane.convert("traced.pt", check=True)
    ane.convert("traced.pt", check="yes")  # type: ignore[arg-type]
    state = ane.runtime.predictor(model).make_state()
    missing: list[tuple[str, str]] = ane.runtime.missing_ops(model)
    print(state, missing, sorted(ane.runtime.QUIRKS))
    try:
        return ane.runtime.Runtime(model, precision="float64")(feeds)
    except (ane.NotSupported, ane.InputError, ane.RuleError, ane.torch_frontend.NotConverted) as error:
        assert isinstance(error, ane.AnePassesError)
        raise


def misspelt() -> None:
    ane.pipelines()  # type: ignore[attr-defined]
