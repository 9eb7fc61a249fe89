"""What a preset brings for place and speed is undone where the prediction gets worse; nothing else is."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.pipeline import make_forecaster
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Evidence, Hit, Rewrite
from mil_ane_passes.passes.engine import RunSettings
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.forecast import ChipLatency, Forecast
from mil_ane_passes.passes.guard import Guard, run_guarded
from mil_ane_passes.passes.max_growth import check_max_growth, parse_max_growth
from mil_ane_passes.passes.pipeline import apply_rewrites
from mil_ane_passes.utils.errors import InputError
from tests.conversions import save_program
from tests.lab.latency.programs import linear_chain


class _Twice(Rewrite):
    """One op becomes two."""

    code, slug, preset, evidence = "X1", "x", "full", (Evidence("", ""),)
    found, made = "relu", ("abs", "sqrt")
    asked_for, called = False, ""

    def __init__(self):
        self.name, self.roots = self.called or f"{self.found}_twice", (self.found,)
        self._asked = self.asked_for

    def match(self, op):
        return Hit(op)

    def rewrite(self, hit, mb):
        return getattr(mb, self.made[1])(x=getattr(mb, self.made[0])(x=hit.op.x))


def rule(found, *made, **more):
    return type("_R", (_Twice,), {"found": found, "made": made, **more})()


PRICES = {"relu": 10.0, "tanh": 1.0, "abs": 6.0, "sqrt": 6.0, "sigmoid": 1.0, "exp": 4.0, "erf": 0.0}


def foresee(prog):
    counted = Counter(op.op_type for _, op in iterate_ops(prog) if op.op_type != "const")
    return Forecast(counted.total(), counted["erf"], counted["erf"],
                    sum(PRICES[kind] * number for kind, number in counted.items()), 0)


def chain(*kinds):
    def body(x):
        for kind in kinds:
            x = getattr(mb, kind)(x=x)
        return x

    return build_program(body, x=(2, 3))


def kinds(prog):
    return [op.op_type for _, op in iterate_ops(prog) if op.op_type != "const"]


def ran(rules, prog, most=0.01):
    return {trace.rule: trace for trace in apply_rewrites(rules, prog, guard=Guard(foresee, most))}


def test_what_costs_more_is_undone_and_says_so():
    built = chain("relu", "tanh")
    traces = ran([rule("relu", "abs", "sqrt"), rule("tanh", "sigmoid", "sigmoid")], built, most=0.1)
    assert kinds(built) == ["relu", "sigmoid", "sigmoid"]
    assert traces["relu_twice"].reverted == "14.000 ms instead of 11.000 (predicted), +27.3%"
    assert traces["relu_twice"].places == 1 and not traces["relu_twice"].fired
    assert traces["tanh_twice"].fired and not traces["tanh_twice"].reverted
    assert traces["relu_twice"].to_dict()["reverted"]


def test_the_limit_is_the_users():
    built = chain("relu")
    assert ran([rule("relu", "abs", "sqrt")], built, most=0.25)["relu_twice"].fired
    assert kinds(built) == ["abs", "sqrt"]


def test_more_refused_ops_are_not_let_stand_however_cheap():
    built = chain("relu")
    assert ran([rule("relu", "erf", "erf")], built)["relu_twice"].reverted == (
        "2 unsupported ops instead of 0 (predicted)")
    assert kinds(built) == ["relu"]


@pytest.mark.parametrize("how", [{"asked_for": True}, {"fixes_nonfinite": True}, {"preset": "safe"}])
def test_fixes_and_what_was_asked_for_by_name_stand(how):
    built = chain("relu")
    assert ran([rule("relu", "abs", "sqrt", **how)], built)["relu_twice"].fired
    assert kinds(built) == ["abs", "sqrt"]


def test_what_fixes_cost_is_not_held_against_the_others():
    built = chain("relu", "tanh", "exp")
    fix, other = rule("relu", "abs", "sqrt", fixes_nonfinite=True), rule("exp", "tanh", "sigmoid")
    traces = ran([fix, other], built)
    assert not any(trace.reverted for trace in traces.values()) and kinds(built)[:2] == ["abs", "sqrt"]


def test_a_dear_step_that_another_one_pays_back_stands():
    built = chain("relu")
    traces = ran([rule("relu", "abs", "sqrt"), rule("abs", "tanh", "tanh")], built)
    assert kinds(built) == ["tanh", "tanh", "sqrt"] and not any(trace.reverted for trace in traces.values())


def test_the_program_is_the_same_when_all_is_undone():
    built = chain("relu", "tanh", "relu")
    before = format_program(built)
    traces = ran([rule("relu", "abs", "sqrt"), rule("tanh", "abs", "abs")], built)
    assert format_program(built) == before and {trace.reverted != "" for trace in traces.values()} >= {True}
    built.validate()


def test_what_fires_in_the_place_of_another_is_looked_at_too():
    built = chain("relu")
    traces = ran([rule("relu", "abs", "sqrt"), rule("relu", "abs", "abs", called="other")], built)
    assert kinds(built) == ["relu"] and [traces[name].places for name in ("relu_twice", "other")] == [1, 1]
    assert all(trace.reverted for trace in traces.values() if not trace.fired and trace.places)


def test_what_was_left_out_first_is_tried_again_without_what_came_after():
    """tanh looks dearest by itself, but others pay it back; what is too dear is exp."""
    built = chain("tanh", "exp")
    traces = ran([rule("tanh", "abs", "sqrt"), rule("abs", "sigmoid", "sigmoid"), rule("sqrt", "sigmoid", "sigmoid"),
                  rule("exp", "relu", "sigmoid")], built, most=0.8)
    assert kinds(built) == ["sigmoid"] * 4 + ["exp"]
    assert [name for name, trace in traces.items() if trace.reverted] == ["exp_twice"]


def test_each_rewrite_may_add_what_no_model_is_worse_for():
    """So a second run, which would measure by what the first one left, finds nothing to do."""
    def small(prog):
        made = foresee(prog)
        return Forecast(made.ops, made.unsupported, made.off, made.cost * 1e-4, made.transitions)

    built, rules = chain("tanh", "abs"), [rule("tanh", "sigmoid", "exp"), rule("abs", "exp", "exp")]
    assert all(trace.fired for trace in apply_rewrites(rules, built, guard=Guard(small, 0.01)))
    assert not any(trace.fired or trace.reverted for trace in apply_rewrites(rules, built, guard=Guard(small, 0.01)))


def test_the_allowances_of_several_rewrites_add_up_as_the_page_says(capsys):
    before = forecast_of(spent(35, call=5))
    for steps in (1, 2, 3):
        within, beyond = (forecast_of(spent(35 * 1.01 + 0.5 * steps + more, call=5)) for more in (-0.01, 0.1))
        assert fault_of(before, within, steps=steps) is None and fault_of(before, beyond, steps=steps) is not None
    assert main(["explain", "guard"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "each rewrite may add 0.5 us" in said and "two rewrites may add 2.9 % to a model of 35 us" in said


def test_nothing_is_predicted_where_nothing_guarded_fires():
    def never(prog):
        raise AssertionError("predicted")

    built = chain("tanh")
    run_guarded([rule("relu", "abs", "sqrt")], built, RunSettings(), Guard(never))
    run_guarded([rule("tanh", "abs", "sqrt", fixes_nonfinite=True)], built, RunSettings(), Guard(never))
    assert kinds(built) == ["abs", "sqrt"]


def wide():
    """A convolution that `factor_conv_stride` makes more expensive."""
    return build_program(
        lambda x: mb.conv(x=x, weight=make_weight(64, 64, 7, 7), strides=[7, 7], name="y"), x=(1, 64, 224, 224)
    )


def test_inside_the_hosts_pipeline(caplog):
    built, left = wide(), wide()
    with caplog.at_level(logging.INFO, logger="mil_ane_passes"):
        PassPipelineManager.apply_pipeline(built, ane.pipeline(ct.PassPipeline.EMPTY, preset="full"))
    undone = [record.message for record in caplog.records if "reverted" in record.message]
    assert len(undone) == 1 and undone[0].startswith("ane::factor_conv_stride reverted: ")
    assert format_program(built) == format_program(left)
    PassPipelineManager.apply_pipeline(left, ane.pipeline(ct.PassPipeline.EMPTY, preset="full", max_growth=None))
    assert format_program(built) != format_program(left)


def test_a_pipeline_serves_several_conversions():
    pipeline = ane.pipeline(ct.PassPipeline.EMPTY, preset="full")
    for _ in range(2):
        built = wide()
        PassPipelineManager.apply_pipeline(built, pipeline)
        assert format_program(built) == format_program(wide()) and not hasattr(built, "_ane_original")
    assert not [name for name in ane.pipeline(preset="safe").passes if name.startswith("ane::guard")]


def test_the_report_and_the_command_say_it(tmp_path, capsys):
    source = tmp_path / "in.mlpackage"
    save_program(wide(), source)
    report = ane.rewrite(source, preset="full")
    assert [trace.rule for trace in report.reverted] == ["factor_conv_stride"] and not report.changed
    assert "ane::factor_conv_stride  reverted at 1 match: " in str(report)
    assert "all rewrites that matched were reverted" in str(report)
    before, after = report.to_dict()["predicted"]["before"], report.to_dict()["predicted"]["after"]
    assert before == after and before["est_ms"] > 0
    wanted = ["rewrite", str(source), "-o", str(tmp_path / "out.mlpackage"), "--preset", "full"]
    assert main([*wanted, "--max-growth", "none"]) == 0
    assert "on the ANE: " in capsys.readouterr().out
    assert main([*wanted, "--overwrite", "--max-growth", "lots"]) == 2
    assert "--max-growth: found 'lots'; expected percent such as 1, or none" in capsys.readouterr().err
    named = ane.rewrite(source, passes="full,factor_conv_stride")
    assert named.changed and not named.reverted


def test_shares_are_checked():
    assert (
        check_max_growth(0.5),
        check_max_growth(None),
        parse_max_growth("1"),
        parse_max_growth("2.5%"),
        parse_max_growth("None"),
    ) == (0.5, None, 0.01, 0.025, None)
    for wrong in (True, -0.1, "1", float("inf"), float("nan")):
        with pytest.raises(InputError, match=r"expected a share such as 0\.01"):
            ane.pipeline(preset="full", max_growth=wrong)


class TestWhereNothingRunsOnTheAne:
    """Ops are not added to a model that the CPU runs alone, before and after."""

    @staticmethod
    def foreseeing(before, after):
        """`before` and `after` are the ops on the ANE of programs with and without a relu."""
        def foresee(prog):
            found = kinds(prog)
            return Forecast(len(found), 0, 0, 1.0, 0, on_ane=before if "relu" in found else after)

        return foresee

    @staticmethod
    def lengthening(count, called="lengthening", found="relu", made="tanh"):
        def rewrite(self, hit, mb):
            x = hit.op.x
            for _ in range(count):
                x = getattr(mb, made)(x=x)
            return x

        return type("_Many", (_Twice,), {"found": found, "called": called, "rewrite": rewrite})()

    @pytest.mark.parametrize(("before", "after", "count", "stands"), [
        (0, 0, 18, False), (0, 0, 17, True), (0, 3, 18, True), (3, 0, 18, True), (None, None, 18, True)])
    def test_what_adds_many_ops_is_undone(self, before, after, count, stands):
        built = chain("relu")
        guard = Guard(self.foreseeing(before, after), 0.01)
        (*_, trace) = apply_rewrites([self.lengthening(count)], built, guard=guard)
        assert bool(trace.fired) is stands and len(kinds(built)) == (count if stands else 1)
        assert stands or trace.reverted == (
            f"{count} ops instead of 1, although no op is predicted to run on the ANE before or after")

    def test_what_adds_few_stands_beside_it(self):
        built = chain("relu", "abs")
        guard = Guard(self.foreseeing(0, 0), 0.01)
        traces = {
            trace.rule: trace
            for trace in apply_rewrites([rule("abs", "exp", "exp"), self.lengthening(30)], built, guard=guard)
        }
        assert traces["abs_twice"].fired and traces["lengthening"].reverted
        assert kinds(built) == ["relu", "exp", "exp"]

    def test_several_that_add_few_stand_and_a_second_run_adds_nothing(self):
        built = chain("relu", "abs", "exp")
        rules = [self.lengthening(30), self.lengthening(12, "first", "abs", "sqrt"),
                 self.lengthening(12, "second", "exp", "sigmoid")]
        for fired in ({"first", "second"}, set()):
            traces = apply_rewrites(rules, built, guard=Guard(self.foreseeing(0, 0), 0.01))
            assert {trace.rule for trace in traces if trace.fired} == fired
            assert [trace.rule for trace in traces if trace.reverted] == ["lengthening"]
            assert kinds(built) == ["relu", *["sqrt"] * 12, *["sigmoid"] * 12]


def test_a_small_recurrent_layer_stays_whole():
    """Its steps would be 17 products on the CPU, too."""
    def body(x):
        return mb.rnn(x=x, initial_h=np.zeros((1, 8), np.float16), weight_ih=np.eye(8, dtype=np.float16),
                      weight_hh=np.eye(8, dtype=np.float16), output_sequence=True, name="y")[0]

    report = ane.rewrite(build_program(body, x=(16, 1, 8)), preset="full", target="m4")
    assert report.status == "unchanged" and "no op is predicted to run on the ANE" in str(report)
    assert ane.rewrite(build_program(body, x=(16, 1, 8)), passes="unroll_rnn", target="m4").status != "unchanged"


def spent(total, extrapolated=0.0, chip="m4", call=100.0, spread=1.5):
    return ChipLatency(chip, total, total / spread, total * spread, call, extrapolated)


def forecast_of(*latencies, unsupported=0, transitions=0, on_ane=10, padded=0):
    return Forecast(10, unsupported, unsupported, 1.0, transitions, padded, on_ane, latencies=latencies)


def fault_of(before, after, most=0.01, **more):
    return Guard(foresee, most).find_fault(before, after, **more)


@pytest.mark.parametrize("before, after, words", [
    (spent(1000), spent(1100), "latency on m4 of 1.100 ms instead of 1.000 (estimated), +10.0%"),
    (spent(1000), spent(1009), None),  # within the limit
    (spent(1000, 500), spent(1150, 650), None),  # only ops that no measurement covers take longer
    (spent(1000, 500), spent(1250, 750), "latency on m4 of 1.250 ms instead of 1.000 (estimated), +25.0%"),
    (spent(1000, 500), spent(1100, 500), "latency on m4 of 1.100 ms instead of 1.000 (estimated), +10.0%"),
    (spent(100, call=20), spent(190, call=110), None),  # the call costs more on the ANE, whatever the rewrite does
    (spent(1000), spent(700), None),
])
def test_a_longer_run_time_is_a_fault_as_far_as_measurements_say_so(before, after, words):
    fault = fault_of(forecast_of(before), forecast_of(after))
    assert (fault and fault.words) == words and (fault is None or fault.kind == "latency")


def test_what_no_measurement_covers_counts_where_the_segmenter_expects_more_time_too():
    before, after = forecast_of(spent(1000, 500)), forecast_of(spent(1150, 650))
    assert fault_of(before, after) is None
    costlier = replace(after, cost=1.005)  # within the limit of the cost
    assert fault_of(before, costlier).words == "latency on m4 of 1.150 ms instead of 1.000 (estimated), +15.0%"
    assert fault_of(replace(before, transitions=1), costlier) is not None, "a transition less is no run time"


def test_the_limit_of_the_run_time_is_the_users_too():
    assert fault_of(forecast_of(spent(1000)), forecast_of(spent(1100)), most=0.15) is None


@pytest.mark.parametrize(("on_ane", "cost", "limit"), [((8, 10), 0.9, 1.2), ((8, 10), 1.005, 1.02),
                                                        ((10, 8), 0.9, 1.02)],
                         ids=["from the CPU", "from the CPU, costlier for the segmenter", "to the CPU"])
def test_where_ops_change_the_processor_the_best_estimate_decides(on_ane, cost, limit):
    """The time on the CPU is a guess with a wide range, before or after; that the ranges overlap is no excuse."""
    def fault(total, **more):
        return fault_of(forecast_of(spent(1000, 900, spread=3.0), on_ane=on_ane[0]),
                        replace(forecast_of(spent(total, 500), on_ane=on_ane[1]), cost=cost), **more)

    assert fault(500) is None and fault(1000 * limit - 5) is None
    slower = 1000 * limit + 20
    assert fault(slower).kind == "latency" and fault(slower, most=0.5) is None
    assert fault(slower).words == (f"latency on m4 of {slower / 1000:.3f} ms instead of 1.000 (estimated), "
                                   f"{slower / 1000 - 1:+.1%}")


def test_a_loss_on_one_chip_of_several_is_a_fault():
    before = forecast_of(spent(1000, chip="m1"), spent(900, chip="m2"))
    fault = fault_of(before, forecast_of(spent(500, chip="m1"), spent(990, chip="m2")))
    assert fault.words.startswith("latency on m2 of 0.990 ms")


def test_a_further_transition_is_a_fault_unless_fewer_ops_are_on_the_cpu():
    before = forecast_of(transitions=1, on_ane=8)
    assert fault_of(before, forecast_of(transitions=2, on_ane=8)).words == (
        "2 transitions instead of 1 (predicted), without moving an op off the CPU")
    assert fault_of(before, forecast_of(transitions=2, on_ane=9)) is None


def test_a_graph_that_leaves_the_ane_is_not_better_placed_for_its_fewer_transitions():
    """hoist_row_slice made a toy GPT-2 so cheap that all of it was predicted to run on the CPU, and slower."""
    before = forecast_of(spent(210, spread=2.0), transitions=1, on_ane=10)
    after = replace(forecast_of(spent(360, spread=2.0), on_ane=0), cost=0.9)
    assert fault_of(before, after).words == "latency on m4 of 0.360 ms instead of 0.210 (estimated), +71.4%"


@pytest.mark.parametrize("target", ["m2", "all"])
def test_weights_that_are_streamed_again_are_reverted_though_the_segmenter_sees_no_loss(target):
    """One product over 4096 values re-streams its weights, two over 2048 each and a sum do not."""
    forecast = make_forecaster(target)
    split, whole = (forecast(linear_chain(1024, 4096, 4096, inner_tile=tile)) for tile in (2048, 0))
    assert whole.cost <= split.cost and whole.unsupported == split.unsupported
    assert fault_of(split, whole).kind == "latency"


def test_parts_of_a_sum_are_paid_by_the_chip_on_which_they_were_measured_to_be_faster():
    """The segmenter's cost grows by 12 %, padded buffers 2.5 times, those live at the same time twice."""
    whole, split = (make_forecaster("m2")(linear_chain(1024, 4096, 4096, inner_tile=tile)) for tile in (0, 2048))
    assert split.cost > 1.1 * whole.cost and split.padded > 2 * whole.padded and split.peak == 2 * whole.peak
    assert fault_of(whole, split) is None
    short = [make_forecaster("m2")(linear_chain(32, 4096, 4096, inner_tile=tile)) for tile in (0, 2048)]
    assert fault_of(*short).kind == "cost"  # weights are streamed once: parts are not faster


@pytest.mark.parametrize("target", ["m1", "m4", "a17", "all"])
def test_parts_of_a_sum_are_reverted_where_nobody_measured_that_weights_are_streamed_again(target):
    fault = fault_of(*(make_forecaster(target)(linear_chain(1024, 4096, 4096, inner_tile=tile)) for tile in (0, 2048)))
    assert fault.kind == "memory" and "a lower latency does not outweigh it: on " in fault.words


def dear(*latencies, cost=2.0, **more):
    return replace(forecast_of(*latencies, **more), cost=cost)


@pytest.mark.parametrize("before, after, words", [
    (forecast_of(spent(1000)), dear(spent(900)), None),
    (forecast_of(spent(1000)), dear(spent(951)), ""),
    (forecast_of(spent(1000)), dear(spent(1000)), ""),
    (forecast_of(), dear(), ""),
    (forecast_of(spent(1000, 500)), dear(spent(600, 100)),
     "; a lower latency does not outweigh it: on m4 measurements account for 0.0%, less than 5%"),
    (forecast_of(spent(1000)), dear(spent(900, 50)),  # 150 of measured ops, less three times 50
     "; a lower latency does not outweigh it: on m4 measurements account for 0.0%, less than 5%"),
    (forecast_of(spent(1000)), dear(spent(900, 20)), None),  # 120, less three times 20
    (forecast_of(spent(1000), spent(1000, chip="m2")), dear(spent(600), spent(600, chip="m2")), None),
    (forecast_of(spent(1000), spent(1000, chip="m2")), dear(spent(600), spent(990, chip="m2")),
     "; a lower latency does not outweigh it: on m2 measurements account for 1.0%, less than 5%"),
    (forecast_of(spent(1000), on_ane=10), dear(spent(600), on_ane=9),
     "; a lower latency does not outweigh it, because fewer ops run on the ANE or transitions are added"),
    (forecast_of(spent(1000)), dear(spent(600), transitions=1),
     "; a lower latency does not outweigh it, because fewer ops run on the ANE or transitions are added"),
    (forecast_of(spent(1000), on_ane=None), dear(spent(600)),
     "; a lower latency does not outweigh it, because fewer ops run on the ANE or transitions are added"),
])
def test_a_firm_gain_of_run_time_pays_for_the_cost_of_the_segmenter(before, after, words):
    fault = fault_of(before, after)
    assert (fault and fault.words) == (None if words is None else "2.000 ms instead of 1.000 (predicted), +100.0%"
                                       + words)


def test_a_firm_gain_does_not_pay_for_unsupported_ops_or_transitions():
    before = forecast_of(spent(1000))
    assert fault_of(before, forecast_of(spent(500), unsupported=1)).kind == "support"
    assert fault_of(before, forecast_of(spent(500), transitions=1)).kind == "transitions"


def test_a_firm_gain_pays_for_memory_up_to_three_times_what_is_live_at_the_same_time():
    before = replace(forecast_of(spent(1000), padded=100 << 20), peak=50 << 20)
    after = replace(forecast_of(spent(500), padded=500 << 20), peak=150 << 20)
    assert fault_of(before, after) is None
    assert fault_of(before, replace(after, peak=152 << 20)).words == (
        "padded buffers of 159.4 MB live at the same time instead of 52.4 MB (computed)")
    slow = replace(after, latencies=before.latencies)
    assert fault_of(before, slow).words == ("padded buffers of 524.3 MB instead of 104.9 MB (computed), without "
                                            "removing an unsupported op or a transition")


def test_what_brings_no_gain_itself_is_not_paid_by_what_does():
    """relu_twice makes the program faster and pays for itself; tanh_twice only costs more."""
    def foresee_time(prog):
        made, found = foresee(prog), kinds(prog)
        time = spent(1000 if slow & set(found) else 600)
        return Forecast(made.ops, 0, 0, made.cost, 0, on_ane=made.ops, latencies=(time,))

    rules = [rule("relu", "abs", "sqrt"), rule("tanh", "sigmoid", "sigmoid")]
    built, slow = chain("relu", "tanh"), {"relu"}
    traces = {trace.rule: trace for trace in apply_rewrites(rules, built, guard=Guard(foresee_time, 0.01))}
    assert kinds(built) == ["abs", "sqrt", "tanh"] and traces["relu_twice"].fired
    assert traces["tanh_twice"].reverted == "14.000 ms instead of 13.000 (predicted), +7.7%"
    built, slow = chain("tanh"), {"tanh", "relu"}  # what pays only together with another stays
    enabling = [rule("tanh", "relu", "relu"), rule("relu", "abs", "sqrt")]
    assert all(trace.fired and not trace.reverted
               for trace in apply_rewrites(enabling, built, guard=Guard(foresee_time, 0.01)))


@pytest.mark.parametrize("latency", [1000, 500])
def test_thousands_of_ops_and_buffers_of_33_times_the_size_are_reverted_whatever_the_run_time(latency):
    before = replace(forecast_of(spent(1000), padded=10 << 20), ops=3, on_ane=3, peak=8 << 20)
    after = replace(forecast_of(spent(latency), padded=330 << 20), ops=3195, on_ane=3195, cost=0.5, peak=264 << 20)
    assert fault_of(before, after).kind == "memory"


def test_what_takes_longer_is_reverted_and_says_on_which_chip():
    def slow(prog):
        made = foresee(prog)
        return Forecast(made.ops, 0, 0, 1.0, 0, latencies=(spent(1000 + 100 * made.cost),))

    built = chain("relu", "tanh")
    traces = {trace.rule: trace for trace in apply_rewrites(
        [rule("relu", "abs", "sqrt"), rule("tanh", "sigmoid", "erf")], built, guard=Guard(slow, 0.01))}
    assert traces["tanh_twice"].fired and not traces["relu_twice"].fired
    assert traces["relu_twice"].reverted.startswith("latency on m4 of 2.300 ms instead of 2.100")
