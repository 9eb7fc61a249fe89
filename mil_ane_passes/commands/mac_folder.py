"""Writer of the folder of `mac-script`: packages, feeds, expected outputs, and the measurement script."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

from ..equivalence.callable_comparison import get_default_tolerance
from ..equivalence.execution import Plan, Run, build_plans, execute_plans
from ..equivalence.user_inputs import UserInputs
from ..package import save
from ..package.destination import find_enclosing_package
from ..package.staging import Staging
from ..package.swap import move_to_free_path
from ..package.write_errors import convert_write_errors
from ..runtime.feeds import split_inputs
from ..runtime.images import array_from_image, pixels_from_array
from ..utils.errors import InputError, NotSupported
from ..utils.npz import Array, write_npz
from .mac_script import MacFolder, format_readme
from .options import Progress
from .sources import OpenedSource

__all__ = ["FolderWriter", "require_package", "stage_folder"]


def require_package(source: OpenedSource) -> OpenedSource:
    if source.package is None:
        raise InputError("a mil.Program in memory is not a package; expected the path of an .mlpackage, or an MLModel")
    if source.is_pipeline:
        raise InputError(f"{source.name} is a pipeline, and Core ML cannot load its parts separately; use the "
                         f"packages it was made from")
    return source


@contextmanager
def stage_folder(folder: str | PathLike[str]) -> Iterator[Path]:
    """Create a folder that replaces `folder` at the end, and is removed if anything fails."""
    goal = Path(os.path.abspath(folder))
    if not goal.parent.is_dir():
        raise InputError(f"{goal}: the folder {goal.parent} does not exist; create it first")
    if (around := find_enclosing_package(goal)) is not None:
        raise InputError(f"{goal}: is inside the package {around}; expected a path outside of packages")
    if os.path.lexists(goal) and (goal.is_symlink() or not goal.is_dir() or any(goal.iterdir())):
        raise InputError(f"{goal}: exists and is not an empty folder; expected a free path or an empty folder")
    with convert_write_errors(goal, "the folder"), Staging(goal) as staging:
        staged = staging.folder / "new"
        staged.mkdir()
        yield staged
        if goal.is_dir():
            try:
                goal.rmdir()
            except OSError as error:
                raise InputError(f"{goal}: is no longer an empty folder, as another program wrote to it; expected a "
                                 "free path or an empty folder") from error
        move_to_free_path(staged, goal)


@dataclass
class FolderWriter:
    """Writer of the folder; `first` has the file and names of the first package's outputs, by function and label."""

    folder: Path
    made: MacFolder
    sides: dict[str, OpenedSource]
    progress: Progress

    def write(self, user_inputs: UserInputs, seeds: int) -> None:
        self.first: dict[tuple[str, str], tuple[str, set[str]]] = {}
        packages, tolerances, plans = [], {}, self._build_plans(self.sides["before"], user_inputs, seeds)
        for name, side in self.sides.items():
            if name != "before":
                plans = self._replan_for(side, plans, seeds)
            save(_get_package(side), self.folder / f"{name}.mlpackage")
            self.made.packages.append(f"{name}.mlpackage")
            tolerances[name] = get_default_tolerance(side.program)
            packages.append({
                "name": name, "path": f"{name}.mlpackage", "tolerance": tolerances[name],
                "functions": self._write_functions(name, side, plans)})
        manifest = {"schema": 1, "made_by": self.made.build_provenance(), "packages": packages}
        self._write_text("manifest.json", json.dumps(manifest, indent=1))
        script = resources.files(f"{__package__.rpartition('.')[0]}.report.mac").joinpath("measure.py")
        self._write_text("measure.py", script.read_text(encoding="utf-8"))
        self._write_text("README.txt", format_readme(self.made, tolerances))

    def _build_plans(self, side: OpenedSource, user_inputs: UserInputs, seeds: int) -> list[Plan]:
        """Build the runs of `before`. Feeds are rounded to the narrower dtype of both packages."""
        sampled = build_plans(side.program, seeds, side.describe)
        if user_inputs:
            default = side.program.default_function_name
            others = [run for run in sampled if run.function != default]
            sampled = [*user_inputs.plans(side.program, side.describe), *others]
        narrow = {(function, name) for each in self.sides.values() for function, name in _iterate_fp16_inputs(each)}
        return [replace(run, feeds={name: value.astype(np.float16).astype(value.dtype)
                                    if (run.function, name) in narrow and value.dtype.kind == "f" else value
                                    for name, value in _convert_feeds_to_pixels(side, run).items()}) for run in sampled]

    def _replan_for(self, side: OpenedSource, plans: Sequence[Plan], seeds: int) -> list[Plan]:
        """Return the same runs for another package where its inputs are the same, else random feeds of its own."""
        functions = side.program.functions
        own = [
            replace(run, feeds=_convert_feeds_to_pixels(side, run))
            for run in build_plans(side.program, seeds, side.describe)
        ]
        same = [run for run in plans if run.function in functions
                and {*run.feeds, *run.state} == set(functions[run.function].inputs)]
        return same + [run for run in own if run.function not in {run.function for run in same}]

    def _write_functions(self, name: str, side: OpenedSource, plans: Sequence[Plan]) -> list[dict[str, Any]]:
        several = bool(_get_package(side).spec.description.functions)
        skipped = {each: _explain_unfeedable_input(side.describe(each)) for each in side.program.functions}
        runs = self._execute_plans(name, side, [run for run in plans if not skipped[run.function]])
        images = {each: [feature.name for feature in side.describe(each).input if feature.type.HasField("imageType")]
                  for each in side.program.functions}
        self.made.images |= any(images.values())
        return [{"name": each, "load_as": each if several else None, "skipped": skipped[each], "images": images[each],
                 "feeds": [self._write_run(side, run) for run in runs if run.plan.function == each]}
                for each in side.program.functions]

    def _execute_plans(self, name: str, side: OpenedSource, plans: Sequence[Plan]) -> list[Run]:
        """Run the feeds at float32 and return the runs with their outputs. Runs that fail are left out, with a note."""
        try:
            runs = execute_plans(side.program, plans, ("float32",), self.progress).runs
        except NotSupported as lacking:
            self.made.notes.append(f"{name}: no expected outputs, because the reference runtime cannot run it "
                                   f"({lacking})")
            return [Run(plan) for plan in plans]
        self.made.notes += [f"{name}, {run.plan.function}, {run.plan.label}: skipped, because it cannot be run "
                            f"({run.error})"
                            for run in runs if run.error]
        return [run for run in runs if not run.error]

    def _write_run(self, side: OpenedSource, run: Run) -> dict[str, Any]:
        """Write the files of one run, and return its entry in the manifest."""
        number, plan = self.made.feeds, run.plan
        self.made.feeds += 1
        colours = _get_color_layouts(side.describe(plan.function).input)
        fed = {each: pixels_from_array(value, colours[each]) if each in colours else value
               for each, value in plan.feeds.items()}
        references = []
        if run.results:
            self.made.expected += 1
            found = _convert_outputs_for_script(
                run.results["float32"], _get_color_layouts(side.describe(plan.function).output)
            )
            file = self._write_arrays(f"expected/{number:03d}.npz", found)
            references.append({"name": "expected", "file": file})
            reference, outputs = self.first.setdefault((plan.function, plan.label), (file, set(found)))
            if reference != file and outputs == set(found):
                references.append({"name": "expected of before", "file": reference})
        return {"label": plan.label, "inputs": self._write_arrays(f"feeds/{number:03d}.npz", fed),
                "states": self._write_arrays(f"states/{number:03d}.npz", plan.state) if plan.state else None,
                "references": references}

    def _write_arrays(self, name: str, arrays: dict[str, Array]) -> str:
        (self.folder / name).parent.mkdir(exist_ok=True)
        with open(self.folder / name, "xb") as file:
            write_npz(file, arrays)
        return name

    def _write_text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


def _get_package(side: OpenedSource) -> Any:
    return side.package


def _iterate_fp16_inputs(side: OpenedSource) -> Iterator[tuple[str, str]]:
    for name, function in side.program.functions.items():
        yield from ((name, each) for each, var in split_inputs(function)[0].items() if var.dtype == types.fp16)


def _get_color_layouts(features: Any) -> dict[str, int]:
    """Return the colour layout of each image among inputs or outputs."""
    return {each.name: each.type.imageType.colorSpace for each in features if each.type.HasField("imageType")}


def _convert_feeds_to_pixels(side: OpenedSource, run: Plan) -> dict[str, Array]:
    """Return the feeds of a run, with images rounded to pixel values."""
    colours = _get_color_layouts(side.describe(run.function).input)
    return {name: array_from_image(name, pixels_from_array(value, colours[name]), colours[name]).astype(value.dtype)
            if name in colours else value for name, value in run.feeds.items()}


def _convert_outputs_for_script(outputs: dict[str, Array], colours: dict[str, int]) -> dict[str, Array]:
    """Convert outputs to the form that the script compares: images as pixels, a classifier's numbers in label order."""
    found = dict(outputs)
    for name, value in outputs.items():
        labels = outputs.get(f"{name} labels")
        if labels is not None:
            texts = np.asarray([str(each) for each in labels.tolist()])
            order = np.argsort(texts, kind="stable")
            found[name], found[f"{name} labels"] = value[order], texts[order]
        elif name in colours:
            found[name] = pixels_from_array(value, colours[name]).astype(np.float32)
    return found


def _explain_unfeedable_input(description: Any) -> str | None:
    """Return why the script cannot feed a function, or None if it can."""
    for feature in description.input:
        kind = feature.type.WhichOneof("Type")
        if kind not in ("multiArrayType", "imageType"):
            return f"input '{feature.name}' is of {kind}; the script can feed arrays and images only"
    return None
