"""Skips work that coremltools and torch repeat in each conversion and that no fast test is about.

Measured as CPU time of tests that convert torch models: a third of it by the first three, and a quarter of the rest by
the others. `-m slow` converts without this.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest


def skip_repeated_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what each conversion does once more, or for a log that nobody reads."""
    _validate_once_a_pipeline(monkeypatch)
    monkeypatch.setattr("coremltools.converters._converters_entry.gc", SimpleNamespace(collect=lambda: 0))
    _look_up_kinds_of_types_once(monkeypatch)
    _propagate_compressed_vars_in_one_loop(monkeypatch)
    _print_no_program_for_debug_logs(monkeypatch)
    if "torch" in sys.modules:
        _list_composite_ops_once(monkeypatch)
        _register_kernels_without_annotations(monkeypatch)


def _validate_once_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate at the end of a pipeline of passes, not after each of about ninety."""
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    validate, apply_pipeline = Program.validate, PassPipelineManager.apply_pipeline
    code = getattr(apply_pipeline, "__wrapped__", apply_pipeline).__code__

    def validate_elsewhere(program: Any, *arguments: Any, **options: Any) -> None:
        if sys._getframe(1).f_code is not code:
            validate(program, *arguments, **options)

    def apply_and_validate(program: Any, pipeline: Any) -> None:
        apply_pipeline(program, pipeline)
        validate(program)

    monkeypatch.setattr(Program, "validate", validate_elsewhere)
    monkeypatch.setattr(PassPipelineManager, "apply_pipeline", staticmethod(apply_and_validate))


def _list_composite_ops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up torch's composite ops once, not in each of a dozen namespaces in each export."""
    from torch._export import utils

    if hasattr(utils, "_materialize_cpp_cia_ops"):
        monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops))


def _look_up_kinds_of_types_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up once for each type whether it is a tensor: coremltools describes its shape and dtype in each call."""
    from coremltools.converters.mil.mil import types

    for name in ("is_tensor", "is_list", "is_dict", "is_state"):
        monkeypatch.setattr(types, name, functools.cache(getattr(types, name)))


def _propagate_compressed_vars_in_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect the compressed constants upstream of each var as coremltools does at the end of each `with block`.

    It flattens the inputs of an op once for each output, and unites sets that are empty almost everywhere.
    """
    from coremltools.converters.mil.mil import Block

    def propagate(block: Any) -> None:
        for op in block.operations:
            for inner in op.blocks:
                propagate(inner)
            kind = op.op_type
            upstream = set()
            if kind not in ("const", "shape"):
                for bound in op._input_vars.values():
                    for var in bound if isinstance(bound, (list, tuple)) else (bound,) if bound is not None else ():
                        upstream |= var.nonreplaceable_vars_upstream
            for var in op.outputs or ():
                var.nonreplaceable_vars_upstream = {var} if kind.startswith("constexpr_") else set(upstream)

    monkeypatch.setattr(Block, "_propagate_nonreplaceable_vars", propagate)


def _print_no_program_for_debug_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave programs out of the debug logs of coremltools' passes, which print them whether or not they are kept."""
    from coremltools.converters.mil.mil import Function, Program

    for cls in (Function, Program):
        def print_elsewhere(*arguments: Any, print_whole: Any = cls.__str__, **options: Any) -> str:
            caller = sys._getframe(1).f_globals["__name__"]
            is_log = caller.startswith("coremltools.converters.mil.mil.passes.")
            return "" if is_log else print_whole(*arguments, **options)

        monkeypatch.setattr(cls, "__str__", print_elsewhere)


def _register_kernels_without_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register what torch.export overrides for a dispatch key, some thousands in each decomposition.

    torch defines a function for each, and evaluates its annotations, which takes longer than all else.
    """
    from torch._C import DispatchKey
    from torch._ops import OperatorBase

    register = OperatorBase.py_impl

    def py_impl(op: Any, key: Any) -> Any:
        if not isinstance(key, DispatchKey) or key == DispatchKey.Python or key in op.py_kernels:
            return register(op, key)

        def inner(function):
            op.py_kernels[key] = function
            op._dispatch_cache.clear()
            return function

        return inner

    monkeypatch.setattr(OperatorBase, "py_impl", py_impl)
