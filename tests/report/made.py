"""Reports of small programs by rules of the tests' own, so that no rule of the package is needed to read them."""

from __future__ import annotations

from coremltools.converters.mil.mil import Builder, Function, Program, types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import Community, Hit, Measured, Miss, Rewrite, Rule, Severity
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.report.lint import LintReport

SEEN = (Measured("seen refused", source="a list of ops", chip="M4", os="macOS 27", date="2026"),)
MESSAGE = "ANE: this op is not for me"


class NoRelu(Rule):
    """relu is unsupported on the ANE."""

    name, code, slug = "no_relu", "ANE216", "no-relu"
    roots, refuses, confidence, evidence = ("relu",), True, "high", SEEN
    advice = "Use a tanh."

    def match(self, op):
        return Hit(op, note=f"relu of rank {op.x.rank}", message=MESSAGE)


class PerhapsExp(Rule):
    """Nobody knows whether an exp is supported on the ANE."""

    name, code, slug = "perhaps_exp", "ANE292", "perhaps-exp"
    roots, refuses, confidence, evidence = ("exp",), True, "low", SEEN

    def match(self, op):
        return Hit(op, note=f"exp '{op.name}' lies between", sure=False)


class WrongTanh(Rewrite):
    """Make a tanh right."""

    name, code, slug = "wrong_tanh", "ANE391", "wrong-tanh"
    severity = Severity.WRONG
    roots, preset, evidence = ("tanh",), "safe", (Community("a tanh is wrong", source="a blog"),)

    def match(self, op):
        return Hit(op, note=f"tanh '{op.name}' is wrong") if op.x.rank < 3 else Miss(op, f"rank {op.x.rank}, not 2")


class ByName(Rewrite):
    """Make a sigmoid another one."""

    name, code, slug = "by_name", "ANE191", "by-name"
    roots, preset, evidence = ("sigmoid",), "named", (Community("one could", source="a blog"),)

    def match(self, op):
        return Hit(op, note="could be another")


class Remark(Rule):
    """A square is worth a remark."""

    name, code, slug = "remark", "ANE591", "remark"
    roots, severity, evidence = ("square",), Severity.SUGGESTION, (Community("a remark", source="a blog"),)

    def match(self, op):
        return Hit(op, note="a square")


RULES = (ByName, NoRelu, PerhapsExp, Remark, WrongTanh)


def chain(*kinds, shape=(2, 3)):
    """The ops in a row, named kind_0, kind_1, ..."""

    def body(x):
        for number, kind in enumerate(kinds):
            x = getattr(Builder, kind)(x=x, name=f"{kind}_{number}")
        return x

    return build_program(body, x=shape)


def two_functions():
    """`main` with a relu, `other` with a tanh and a relu."""
    built = Program()
    for name, kinds in (("main", ("relu",)), ("other", ("tanh", "relu"))):
        with Function({"x": Builder.placeholder(shape=(2, 3), dtype=types.fp16)}) as function:
            x = function.inputs["x"]
            for kind in kinds:
                x = getattr(Builder, kind)(x=x, name=f"{name}_{kind}")
            function.set_outputs([x])
        built.add_function(name, function)
    return built


def empty():
    """A program that computes nothing."""
    with Function({"x": Builder.placeholder(shape=(2, 3), dtype=types.fp16)}) as function:
        function.set_outputs([function.inputs["x"]])
    built = Program()
    built.add_function("main", function)
    return built


def report(built, rules=RULES, target="m4", model="a program in memory"):
    return LintReport.of(model, target, *predict_plan(built, [rule() for rule in rules], target=target))


