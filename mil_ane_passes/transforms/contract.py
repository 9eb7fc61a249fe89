"""The contract of transforms: whole-model changes that may alter the interface, on request.

A transform changes a `Draft` (a pymil program with its metadata) in place, or makes several drafts of it. It declares
each change of the interface (`Draft.change_interface`), so that the equivalence check can map feeds and results between
the source and the result. The `package` room writes the changed parts and keeps the rest byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..passes.interface_change import InterfaceChange, InterfaceMapping
from ..utils.errors import InputError, suggest_nearest

# Names of packages are checked, and copies of weights started, before coremltools is imported.
if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function, Program

    from ..package import Package
    from ..package.weight_plan import WeightPlan

__all__ = ["MAX_PARTS", "PART_SUFFIXES", "Draft", "EditRecord", "RoundedConstant", "Transform", "apply_transforms",
           "build_part_path"]

PART_SUFFIXES = ("1", "2")
"Suffixes of the names of the two packages that `--split-at` writes."
MAX_PARTS = 64
"Most packages into which one is split: 64 parts of 1 GB need more memory than any device has."


@dataclass(frozen=True)
class EditRecord:
    """One action of a transform: the option that requested it, the function and value it was applied to, and the note.

    `changed` is false if there was nothing to do. `exact` is true if results keep the same bits (None if the action
    does not affect numbers).
    """

    option: str
    function: str
    value: str
    note: str
    changed: bool = True
    exact: bool | None = True

    def to_dict(self) -> dict[str, object]:
        """Return the record as in the report's JSON."""
        return {"option": self.option, "function": self.function, "value": self.value, "note": self.note,
                "changed": self.changed, "exact": self.exact}


@dataclass(frozen=True)
class RoundedConstant:
    """The value of a constant before it was rounded, and the largest difference that rounding explains."""

    exact: Any
    error: float


@dataclass
class Draft:
    """A program that transforms change.

    `interfaces` maps each function to its mapping from a function of the source. `done` lists the actions, `gone` maps
    the names of removed values to the option that removed them. `part` distinguishes the drafts into which one was
    split; it is empty otherwise. `package` is the source package, None for a program in memory. `redirected` maps
    references to weights (file and offset) to other references with the same bytes. Unreferenced blobs are dropped from
    a weight file if they are more than the fraction `dead_limit` of it (None: the default of `package`). `rounded` has,
    for each function, the exact values of constants that were computed from sizes and stored in their dtype, by name.
    """

    program: Program
    where: str
    package: Package | None = None
    part: str = ""
    done: list[EditRecord] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)
    interfaces: dict[str, InterfaceMapping] = field(default_factory=dict)
    dead_limit: float | None = None
    redirected: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    rounded: dict[str, dict[str, RoundedConstant]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.program.functions:
            self.interfaces.setdefault(name, InterfaceMapping(name))

    @property
    def is_pipeline(self) -> bool:
        return self.package is not None and self.package.is_pipeline

    def select_functions(self, function: str | None) -> dict[str, Function]:
        """Return the functions to change: those made of `function` of the source, or all.

        Raises InputError for an unknown function.
        """
        sources = sorted({mapping.function for mapping in self.interfaces.values()})
        if function is not None and function not in sources:
            has = "the parts have" if self.is_pipeline else "the model has"
            raise InputError(f"{self.where}: no function '{function}'; {has} {', '.join(sources)}"
                             f"{suggest_nearest(function, sources)}")
        return {name: each for name, each in self.program.functions.items()
                if function in (None, self.interfaces[name].function)}

    def change_interface(self, function: str, *changes: InterfaceChange) -> None:
        """Declare simultaneous changes of the interface of `function`."""
        self.interfaces[function] = self.interfaces[function].followed_by(*changes)

    def replace_function(self, function: str, made: Mapping[str, Function]) -> None:
        """Replace `function` by functions derived from it; each inherits its mapping."""
        mapping = self.interfaces.pop(function)
        self.program.functions = {new: each for name, old in self.program.functions.items()
                                  for new, each in (made.items() if name == function else [(name, old)])}
        self.interfaces |= dict.fromkeys(made, mapping)
        rounded = self.rounded.pop(function, {})
        self.rounded |= {name: dict(rounded) for name in made}

    def emit(self) -> tuple[bytes, WeightPlan | None]:
        """Return the model file of the package with this program, and the plan for its weights if they change."""
        from ..package.blob_refs import find_refs, redirect_refs

        assert self.package is not None
        made = copy.copy(self.package)
        made.program = self.program
        model, plan = made.emit(interface=True)
        model = redirect_refs(model, self.redirected)
        if model == made.raw or not (plan.added or find_refs(made.raw) - find_refs(model)):
            return model, None
        plan.dead_limit = plan.dead_limit if self.dead_limit is None else self.dead_limit
        return model, plan

    def copy(self, part: str = "") -> Draft:
        """Return a draft with a clone of the program; weights are shared."""
        from ..ir.clone import clone_program

        return replace(self, program=clone_program(self.program), part=part or self.part, done=list(self.done),
                       gone=dict(self.gone), interfaces=dict(self.interfaces),
                       rounded={name: dict(each) for name, each in self.rounded.items()})


class Transform:
    """One whole-model change with all of its arguments."""

    in_pipelines: ClassVar[bool] = False
    "True if it can change the functions of a pipeline's parts."

    def apply(self, draft: Draft) -> list[Draft]:
        """Change the draft in place and return it, or return the drafts into which it was split.

        Actions are added to `draft.done`, and changes of the interface are declared with `draft.change_interface`.
        Raises InputError with the reason if the change is not possible. The draft may then be changed in part, because
        nothing is written.
        """
        raise AssertionError(f"{type(self).__name__} must define apply()")


def apply_transforms(draft: Draft, transforms: Sequence[Transform]) -> list[Draft]:
    """Apply transforms one after the other, each to all drafts made by the previous ones.

    Raises InputError if the model is a pipeline and a transform is not `in_pipelines`.
    """
    drafts = [draft]
    for transform in transforms:
        if draft.is_pipeline and not transform.in_pipelines:
            raise InputError(f"{draft.where}: the model is a pipeline, whose parts read outputs of other parts; of all "
                             "edits only names can be changed there: edit the packages in it and build it again")
        drafts = [made for each in drafts for made in transform.apply(each)]
    return drafts


def build_part_path(target: Path, part: str) -> Path:
    """Return the path to which a draft is written: `target`, or for a part, `target` with the part in its name.

    Raises InputError for a path without a name, such as "." and "/".
    """
    if not target.name:
        raise InputError(f"'{target}': is not the name of a package; expected one that ends in .mlpackage")
    return target.with_name(f"{target.stem}_{part}{target.suffix}") if part else target
