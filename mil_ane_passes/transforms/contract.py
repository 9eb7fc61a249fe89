"""The contract of transforms: whole-model changes that may alter the interface, on request.

A transform changes a `Draft`, which is a program in pymil with what is known about it, in place, or makes several of
it. It declares each change of the interface (`Draft.change_interface`), so that the result can be checked against the
source across the change. The `package` room writes what changed and keeps the rest byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..passes.interface_change import InterfaceChange, InterfaceMapping
from ..utils.errors import InputError, suggest_nearest

# The names of packages are checked, and copies of weights started, before coremltools is there.
if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Function, Program

    from ..package import Package
    from ..package.weight_plan import WeightPlan

__all__ = ["MAX_PARTS", "PART_SUFFIXES", "Draft", "EditRecord", "Transform", "apply_transforms", "build_part_path"]

PART_SUFFIXES = ("1", "2")
"Suffixes of the names of the two packages that `--split-at` makes."
MAX_PARTS = 64
"The most packages that are made of one: 64 parts of a gigabyte are more than any device's memory."


@dataclass(frozen=True)
class EditRecord:
    """One action of a transform: the option that requested it, the function and value it was applied to, and the note.

    `changed` is false if there was nothing to do. `exact` is true if results keep the same bits (None where no numbers
    are affected).
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


@dataclass
class Draft:
    """A program that transforms change.

    `interfaces` map each function to the function of the source that it was made of. `done` lists the actions, `gone`
    the names of removed values. `part` is empty, or distinguishes the drafts that one became. `package` is the source
    package, None for a program in memory. `redirected` maps places of weights (file and offset) to others that hold the
    same bytes. Blobs that nothing refers to any more are dropped from each weight file of which they are more than the
    part `dead_limit` (None: the default of `package`).
    """

    program: Program
    where: str
    package: Package | None = None
    part: str = ""
    done: list[EditRecord] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    interfaces: dict[str, InterfaceMapping] = field(default_factory=dict)
    dead_limit: float | None = None
    redirected: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

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
        """Declare changes of the interface of `function`, made at once."""
        self.interfaces[function] = self.interfaces[function].followed_by(*changes)

    def replace_function(self, function: str, made: Mapping[str, Function]) -> None:
        """Replace `function` by functions made of it, each with the mapping that it had."""
        mapping = self.interfaces.pop(function)
        self.program.functions = {new: each for name, old in self.program.functions.items()
                                  for new, each in (made.items() if name == function else [(name, old)])}
        self.interfaces |= dict.fromkeys(made, mapping)

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
                       gone=set(self.gone), interfaces=dict(self.interfaces))


class Transform:
    """One whole-model change with all of its arguments."""

    in_pipelines: ClassVar[bool] = False
    "True if it can change the functions of a pipeline's parts."

    def apply(self, draft: Draft) -> list[Draft]:
        """Change the draft. Returns it, changed in place, or the drafts that it became.

        Actions are added to `draft.done`, changes of the interface are declared with `draft.change_interface`. Raises
        InputError with the reason when the change cannot be made; nothing is written then, so the draft may be left
        half changed.
        """
        raise AssertionError(f"{type(self).__name__} must define apply()")


def apply_transforms(draft: Draft, transforms: Sequence[Transform]) -> list[Draft]:
    """Apply transforms one after the other, each to all drafts that the ones before it made.

    Raises InputError for a pipeline and a transform without `in_pipelines`.
    """
    drafts = [draft]
    for transform in transforms:
        if draft.is_pipeline and not transform.in_pipelines:
            raise InputError(f"{draft.where}: the model is a pipeline, whose parts take what others give; of all "
                             "edits only names can be changed there: edit the packages in it and build it again")
        drafts = [made for each in drafts for made in transform.apply(each)]
    return drafts


def build_part_path(target: Path, part: str) -> Path:
    """Return the path a draft is written to: `target`, or beside it with the part appended to the name.

    Raises InputError for a path that ends in no name, such as "." and "/".
    """
    if not target.name:
        raise InputError(f"'{target}': is not the name of a package; expected one that ends in .mlpackage")
    return target.with_name(f"{target.stem}_{part}{target.suffix}") if part else target
