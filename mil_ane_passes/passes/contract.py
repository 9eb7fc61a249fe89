"""The contract of a rule: what it finds, why, on what evidence, and (for a rewrite) how it is fixed.

Invariants that every rewrite keeps, and that the engine checks or provides:

- SSA order is kept; function inputs and outputs keep name, dtype, shape and order;
- a new output takes over the name of the output it replaces; untouched values keep theirs;
- no dtype and no shape of a kept value changes; symbolic dimensions stay symbolic;
- weights are never decompressed and never duplicated: a reshaped const shares its bytes;
- state ops are neither moved nor removed; the opset is never raised;
- running a rewrite on its own result changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar
from weakref import ReferenceType

from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var

from ..ir.value_ranges import Range
from .evidence import Community, Evidence, Measured, Vendor
from .options import Option, get_options, make_with_options
from .severity import Severity
from .targets import ALL_TARGETS, GENERATIONS, Gate, Generation

if TYPE_CHECKING:
    from ..ir.builder import RewriteBuilder
    from .plan import Plan

__all__ = [
    "ANY_OP",
    "FP32_UNSUPPORTED_REASON",
    "STAGES",
    "BlockRewrite",
    "BlockRule",
    "Community",
    "Evidence",
    "Exactness",
    "Example",
    "Hit",
    "Measured",
    "Miss",
    "PlanRule",
    "ProgramRewrite",
    "Rewrite",
    "Rule",
    "Severity",
    "Vendor",
]

_Result = TypeVar("_Result")
ANY_OP = "*"
"""In a rule's `roots`: every op type except const."""

FP32_UNSUPPORTED_REASON = "computed in fp32, which is unsupported on the ANE"
"""Reason why a rewrite that targets the ANE skips an fp32 op."""

STAGES = ("structure", "precision", "numerics", "decompose", "layout", "cleanup")
"""The order of stages in a pipeline; within a stage, `after` and then the name decide.

structure: loops, branches and constants, so that later stages see plain ops.
"""


class Exactness(Enum):
    """Guarantee of a rewrite about the values of the rewritten program."""

    BITWISE = "bitwise"
    "Same bits: data movement, or one identical op on the same numbers."
    ROUNDING = "rounding"
    "Same algebra; only the order or the number of roundings differs, within the stated bound."
    APPROXIMATE = "approximate"
    "Another function that is close; never part of a preset."


class Hit:
    """A match of a rule. Keyword facts found by `match` are attributes: everything `rewrite` needs.

    `op` is the op the finding is reported at, `note` a sentence with numbers for the trace. `exactness` overrides the
    rewrite's own where one of its forms guarantees more.

    For rules that find unsupported ops: `sure` is False where the form lies between what was measured to pass and what
    was measured to fail, and `likely` makes the prediction count such an op as supported nevertheless. `message` is
    the literal message of Core ML for such an op, where it was measured. `covers` are all ops that one finding stands
    for, where there are more than `op`. `evidence` are the sources on these ops, where the rule's own are not about
    them. `fixed_by` is the pass that fixes this match, in the spelling of `--passes` (`fp16_compute{mixed=true}`),
    where the rule knows it. `split_at` are cuts that put `op` in a package of its own:
    for each, the names of the values to cut after; each cut is made in the first part of the one before it.
    """

    def __init__(
        self, op: Operation, *, note: str = "", exactness: Exactness | None = None, sure: bool = True,
        likely: bool = False, message: str | None = None, covers: Sequence[Operation] = (), fixed_by: str = "",
        split_at: Sequence[Sequence[str]] = (), evidence: Sequence[Evidence] = (), **facts: Any,
    ) -> None:
        self.op = op
        self.note = note
        self.exactness = exactness
        self.sure = sure
        self.likely = likely
        self.message = message
        self.covers = tuple(covers) or (op,)
        self.fixed_by = fixed_by
        self.split_at = tuple(map(tuple, split_at))
        self.evidence = tuple(evidence)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(f"hit has no fact '{name}'; it has {sorted(self.__dict__.get('facts', ()))}") from None


@dataclass(frozen=True)
class Miss:
    """A reason why a rule does not match `op`. `near=False` marks ops that were not candidates, which reports omit."""

    op: Operation
    reason: str
    near: bool = True


@dataclass(frozen=True)
class Example:
    """A program that a rule matches, or (with `reason`) a near miss with the exact reason reported for it.

    `build` makes a fresh `mil.Program`; `options` are the rule's options for this example. `within` is the largest
    magnitude of inputs for which the original program behaves as intended: values are compared up to it. `scale`
    multiplies the default random feeds, whose standard deviation is 1, for effects that only large values trigger. A
    rule with `measures` receives the ranges measured on such feeds, unless `measured` is False.
    """

    name: str
    build: Callable[[], Program]
    reason: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    within: float = float("inf")
    scale: float = 1.0
    measured: bool = True


class Rule:
    """A pattern to find in programs. A module contains the rules about one subject."""

    name: ClassVar[str] = ""
    "The class name in snake case (`conv_1d_kernel` for `Conv1dKernel`), unless the class states another."
    code: ClassVar[str] = ""
    slug: ClassVar[str] = ""
    "The slug names the problem, not the fix."
    stage: ClassVar[str] = "numerics"
    after: ClassVar[tuple[str, ...]] = ()
    "Names of rules that must run before this one, where both run."
    roots: ClassVar[tuple[str, ...]] = ()
    "Op types that `match` is called for."
    targets: ClassVar[Gate] = ALL_TARGETS
    evidence: ClassVar[tuple[Evidence, ...]] = ()
    refuses: ClassVar[bool] = False
    "True if a hit means that the op is unsupported on the ANE (of some generation of the target)."
    unmeasured: ClassVar[bool] = False
    "True if a hit means that the op was not measured on the ANE (of some generation of the target)."
    confidence: ClassVar[Literal["high", "medium", "low"]] = "medium"
    "high: stated by Apple, or reproduced by several; medium: one good reproduction; low: an anecdote, or contradicted."
    severity: ClassVar[Severity | None] = None
    "The harm of the problem. If None: that of what it fixes; else UNSUPPORTED if it `refuses`, and SLOW if not."
    advice: ClassVar[str] = ""
    "What the user can do, in one sentence; reports add the names of the rewrites that fix it."
    measures: ClassVar[bool] = False
    "True if the rule uses value ranges measured in runs: `measured` is set before `match` is called."
    accepts_sampled: ClassVar[bool] = False
    "True if seeded random feeds suffice for that when the user supplies neither feeds nor ranges."
    _measured: Mapping[Var, Range] | None = None
    _generations: tuple[Generation, ...] = GENERATIONS
    _program: ReferenceType[Program] | None = None
    _computed: dict[Hashable, Any] | None = None

    @property
    def functions(self) -> list[Function]:
        """The functions of the current program, in the order in which the rule visits them; empty outside a run."""
        program = None if self._program is None else self._program()
        return [] if program is None else list(program.functions.values())

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The generations being targeted; limits are those of the strictest among them."""
        return self._generations

    @property
    def measured(self) -> Mapping[Var, Range] | None:
        """The value ranges of the current program, measured in runs on the user's feeds; None without such runs."""
        return self._measured

    def compute_once(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Return `compute()`, which is called once for each `key` until the run ends or the rule changes the program.

        For facts about an entire program that each match needs. Outside a run it is called every time.
        """
        if self._computed is None:
            return compute()
        if key not in self._computed:
            self._computed[key] = compute()
        result: _Result = self._computed[key]
        return result

    def match(self, op: Operation) -> Hit | Miss:
        """Match one op whose type is in `roots`; preconditions come first, one per line, each with a reason."""
        raise AssertionError(f"{type(self).__name__} must define match()")

    def reports_op(self, op: Operation) -> bool:
        """Return whether a finding of this rule covers `op`; a rule about blocks or plans overrides it where it can."""
        return op.op_type in self.roots and isinstance(self.match(op), Hit)

    def examples(self) -> Iterable[Example]:
        """Yield programs that the rule matches and programs that it must not.

        The first is the page's before and after.
        """
        return ()

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the rule's options: its annotated class attributes that are not `ClassVar`."""
        return get_options(cls)

    @classmethod
    def configured(cls, **values: Any) -> Rule:
        """Create an instance with options set; strings are parsed.

        Raises InputError for unknown names and bad values.
        """
        return make_with_options(cls, values)

    @classmethod
    def get_severity(cls) -> Severity:
        """Return the severity of the findings."""
        return cls.severity or (Severity.UNSUPPORTED if cls.refuses else Severity.SLOW)

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().split("\n", 1)[0]


class Rewrite(Rule):
    """A change of the program, registered with coremltools as the graph pass `ane::<name>`.

    It either fixes problems that rules find (`fixes`), and then has the code and slug of the first of them, or finds a
    problem of its own and states a code, a slug and evidence like any rule.
    """

    fixes: ClassVar[tuple[type[Rule], ...]] = ()
    "The rules whose findings this rewrite fixes."
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    bound: ClassVar[str] = ""
    "For ROUNDING and APPROXIMATE: the bound, in words and numbers."
    preset: ClassVar[Literal["safe", "full", "named"]] = "named"
    fixes_nonfinite: ClassVar[bool] = False
    "True if infinite or NaN values may become finite: the fault that is fixed. Finite values keep `exactness`."
    moves: ClassVar[float] = 0.0
    """For a fix that changes a constant: maximum change of outputs at full precision, relative to an output's largest
    value."""
    moves_of: ClassVar[Literal["", "operands", "result"]] = ""
    """Values of the op to whose largest `moves` is relative, too; the check propagates that error through later ops.

    A hit whose op moves by another share has that share as the fact `moves_at_op`.
    """
    reach: ClassVar[float] = math.inf
    "Magnitude of the op's operands up to which the guarantee holds; what only float64 can represent is not judged."
    raises_constants: ClassVar[bool] = False
    "True if the op's scalar constants from 0 to below 2^-24, the smallest fp16 number, are raised to 2^-24."
    ulps: ClassVar[float] = 0.0
    "For ROUNDING where `bound` is in ulps: how many units in the last place a result may be off, in the stored dtype."
    within: ClassVar[tuple[float, float]] = (0.0, math.inf)
    "Magnitudes of the model's inputs, except zero, between which `exactness` and `moves` hold at full precision."
    keeps_nonfinite: ClassVar[bool] = True
    "True if NaN and infinity reach the same results as before and no others; a product with 0 spreads them."
    interface: ClassVar[bool] = False
    "True if it may change the dtypes of the function's inputs and outputs; such a rewrite is never in a preset."
    repeats: ClassVar[bool] = False
    "True if it runs again after all other rewrites, on their result."
    _asked: bool = False

    def find_problem(self, op: Operation) -> type[Rule]:
        """Return the first rule in `fixes` that reports `op` on this target, or the rewrite itself if none does."""
        for problem in self.fixes:
            rule = problem()
            rule._generations = self._generations
            if any(map(problem.targets.includes, self._generations)) and rule.reports_op(op):
                return problem
        return type(self)

    @classmethod
    def get_severity(cls) -> Severity:
        """Return the severity of the findings: of a rewrite that runs only by name they are suggestions."""
        if cls.preset == "named" and not cls.refuses:
            return Severity.SUGGESTION
        return cls.severity or (cls.fixes[0].get_severity() if cls.fixes else super().get_severity())

    @property
    def asked(self) -> bool:
        """True if the user requested the rewrite by name."""
        return self._asked

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var | list[Var]:
        """Build the replacement with `mb`. Returns one var per output of `hit.op`, in order."""
        raise AssertionError(f"{type(self).__name__} must define rewrite()")


class BlockRule(Rule):
    """A rule that matches an entire block at once; `match_block` must be linear in the block's ops."""

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        raise AssertionError(f"{type(self).__name__} must define match_block()")


class PlanRule(Rule):
    """A rule about the predicted plan of the entire model: its segments, its sizes, its weights."""

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        raise AssertionError(f"{type(self).__name__} must define match_plan()")


class BlockRewrite(Rewrite, BlockRule):
    """A fix that moves across several ops of one block."""

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        """Build the replacement. Returns a mapping from each replaced var to its replacement."""
        raise AssertionError(f"{type(self).__name__} must define rewrite_block()")


class ProgramRewrite(Rewrite):
    """A fix that needs the entire program, such as a pass of coremltools."""

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        raise AssertionError(f"{type(self).__name__} must define match_program()")

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        """Change `program` in place; `hits` are all hits of `match_program`."""
        raise AssertionError(f"{type(self).__name__} must define rewrite_program()")
