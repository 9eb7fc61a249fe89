"""Example programs that write rows and read them back, for the page and the tests of lists_as_stack."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var

from ...passes.examples import build_program

__all__ = ["build_computed_scatter", "build_list_scatter", "build_list_writes", "build_row_writes"]


def build_row_writes(first: Any = None) -> Program:
    def body(x: Var) -> Var:
        x = first(x) if first else x
        held = Builder.fill(shape=[3, 8], value=np.float16(0))
        for step in range(2):
            row = Builder.gather(x=x, indices=np.array([step], np.int32), axis=0)
            before = Builder.gather(x=held, indices=np.array([step], np.int32), axis=0)
            held = Builder.scatter(data=held, indices=np.array([step + 1], np.int32), axis=0, mode="add",
                                   updates=Builder.tanh(x=Builder.add(x=row, y=before)))
        result: Var = Builder.slice_by_index(x=held, begin=[1, 0], end=[3, 8], name="y")
        return result

    return build_program(body, x=(2, 8))


def build_list_writes() -> Program:
    def body(x: Var) -> list[Var]:
        held = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(2, 3), dtype="fp16")
        held = Builder.list_write(ls=held, index=np.int32(0), value=x)
        again = Builder.list_read(ls=held, index=np.int32(0))
        held = Builder.list_write(ls=held, index=np.int32(1), value=Builder.relu(x=again))
        return [Builder.list_gather(ls=held, indices=np.array([0, 1, 0], np.int32), name="y")]

    return build_program(body, x=(2, 3))


def build_list_scatter() -> Program:
    def body(x: Var) -> list[Var]:
        held = Builder.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), dtype="fp16")
        held = Builder.list_scatter(ls=held, indices=np.array([1, 0], np.int32), value=x)
        return [Builder.list_gather(ls=held, indices=np.array([0, 1], np.int32), name="y"),
                Builder.list_read(ls=held, index=np.int32(1), name="z")]

    return build_program(body, x=(2, 3))


def build_computed_scatter() -> Program:
    def body(x: Var) -> Var:
        first = Builder.slice_by_size(x=x, begin=[0, 0], size=[1, 3])
        place = Builder.cast(x=Builder.reduce_max(x=first, axes=[1]), dtype="int32")
        result: Var = Builder.scatter(data=x, indices=place, updates=first, axis=0, name="y")
        return result

    return build_program(body, x=(2, 3))
