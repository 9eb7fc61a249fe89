"""Sources of the public functions, opened as programs with their package data."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from coremltools.converters.mil.mil import Program

from ..ir.clone import clone_program
from ..ir.query import is_computed_in_fp16, iterate_ops
from ..ir.scopes import copy_scopes
from ..neuralnetwork.loading import is_network, load, load_model, upgrade_to_package
from ..package import Package
from ..utils.errors import InputError, suggest_nearest
from ..utils.upgraded_source import UpgradedSource

__all__ = ["OpenedSource", "copy_source", "open_source", "select_function"]


@dataclass
class OpenedSource:
    """A source as a program, with its package, if any, and its name.

    `is_at_path`: the package was loaded from the path that the user gave. `function`: the function for which an MLModel
    of several was made; its default one, if the user named none.
    """

    program: Program
    package: Package | None
    name: str
    is_at_path: bool = False
    function: str | None = None

    @property
    def chosen_function(self) -> str | None:
        """The function for which an MLModel was made, unless it is the default one."""
        return None if self.function == self.program.default_function_name else self.function

    @property
    def is_pipeline(self) -> bool:
        return self.package is not None and self.package.is_pipeline

    @property
    def keeps_interface(self) -> bool:
        """True if a pipeline or an ExecuTorch program around the model declares its inputs and outputs, too."""
        return self.is_pipeline or (self.package is not None and self.package.is_delegate)

    @property
    def upgraded(self) -> tuple[UpgradedSource, ...]:
        """The NeuralNetwork that the program was made of; empty for an ML Program."""
        found = None if self.package is None else self.package.upgraded
        return () if found is None else (found,)

    def describe(self, function: str) -> Any:
        return None if self.package is None else self.package.description(function)

    def check_unchanged(self) -> None:
        """Raise AnePassesError when the source was written to since it was loaded, or is no longer at its path.

        A package in memory may have been moved, replaced or removed: its files are still open.
        """
        if self.package is None:
            return
        if self.is_at_path:
            self.package.check_source()
        self.package.files.check_opened()


def open_pair(before: Any, after: Any) -> tuple[OpenedSource, OpenedSource]:
    """Open two sources that are to be compared.

    A NeuralNetwork beside an ML Program that computes nothing in fp16 is upgraded with `--precision fp32`, as that was.
    """
    old, new = open_source(before), open_source(after)
    if old.upgraded and not new.upgraded and not _computes_in_fp16(new):
        old = open_source(before, "fp32")
    elif new.upgraded and not old.upgraded and not _computes_in_fp16(old):
        new = open_source(after, "fp32")
    return old, new


def _computes_in_fp16(source: OpenedSource) -> bool:
    return any(is_computed_in_fp16(op) for _, op in iterate_ops(source.program))


def open_source(source: Any, precision: str = "fp16") -> OpenedSource:
    """Open a source; a NeuralNetwork, as a path, an MLModel or a spec, is upgraded in memory at `precision`."""
    if isinstance(source, Program):
        return OpenedSource(source, None, "a program in memory")
    if isinstance(source, Package):
        return _open_package(source)
    if isinstance(source, (str, PathLike)):
        return replace(_open_package(load(source, precision), fspath(source)), is_at_path=True)
    if hasattr(source, "get_spec") and not isinstance(source, type):
        package = load_model(source, precision)
        converted = getattr(source, "_mil_program", None)
        if isinstance(converted, Program):
            copy_scopes(converted, package.program)
        function = getattr(source, "function_name", None)
        is_one_of_several = len(package.program.functions) > 1 and function in package.program.functions
        return replace(_open_package(package), function=function if is_one_of_several else None)
    if is_network(source):
        return _open_package(upgrade_to_package(source, "the model", precision))
    spec = "; save a spec first: ct.models.MLModel(spec, weights_dir=...).save(path)"
    kind = f"the class {source.__name__}" if isinstance(source, type) else f"an object of type {type(source).__name__}"
    raise InputError(f"cannot read {kind}; expected a path to an .mlpackage, an "
                     f"MLModel, a Package "
                     f"or a mil.Program{spec if hasattr(source, 'specificationVersion') else ''}")


def _open_package(package: Package, name: str | None = None) -> OpenedSource:
    if name is None:
        name = package.upgraded.source if package.upgraded else package.name or str(package.path)
    return OpenedSource(package.program, package, name)


def select_function(source: OpenedSource, function: str | None) -> OpenedSource:
    """Limit the source to one function, if one is named. Raises InputError if it has no function of that name."""
    if function is None:
        return source
    functions = source.program.functions
    if function not in functions:
        raise InputError(f"{source.name}: no function '{function}'; expected {' or '.join(functions)}"
                         f"{suggest_nearest(function, functions)}")
    view = copy.copy(source.program)
    view.functions, view.default_function_name, view.chain = {function: functions[function]}, function, ()
    return replace(source, program=view)


def copy_source(source: OpenedSource) -> OpenedSource:
    """Copy the program of a source for rewriting; the weights are shared and stay mapped."""
    clone = clone_program(source.program)
    if source.package is None:
        return OpenedSource(clone, None, source.name)
    package = copy.copy(source.package)
    package.program = clone
    return OpenedSource(clone, package, source.name)
