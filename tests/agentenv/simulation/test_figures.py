"""Each simulated figure at a small size: its numbers, and bars that a worse system misses."""

import math
import random

import pytest

from agentenv.errors import UsageError
from agentenv.simulation import async_training, fig7, fig8, fig9, fig10, figures, theory
from agentenv.simulation.experiment import Run, rollout_config, simulate
from agentenv.simulation.figure import Estimate, Table, ratio, t_quantile
from agentenv.simulation.workload import Constant, Workload


def bars(summary):
    return {bar.name: bar for bar in summary.bars}


def test_every_name_loads_a_figure_of_that_name():
    for name in figures.NAMES:
        figure = figures.load(name)
        assert figure.name == name
        assert figure.cases and figure.seeds >= 1 and figure.assumed


def test_an_unknown_name_is_refused_with_a_hint():
    with pytest.raises(UsageError, match="unknown simulation 'fig99'; did you mean 'fig9'"):
        figures.load("fig99")
    with pytest.raises(UsageError, match="there are fig7, fig8"):
        figures.load("zzz")


def test_an_interval_is_students():
    # 1, 2, 3: standard error 0.5774, times 4.303.
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.seeds) == (2.0, 3)
    assert estimate.high - estimate.mean == pytest.approx(2.484, abs=0.001)
    assert estimate.mean - estimate.low == pytest.approx(2.484, abs=0.001)


def test_one_seed_has_no_interval():
    assert Estimate.of([2.0]).as_dict() == {"mean": 2.0, "low": None, "high": None, "seeds": 1}
    assert str(Estimate.of([2.5])) == "2.50"


def test_t_quantiles_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 9, 29, 49, 999):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.003)


def test_a_table_lines_its_columns_up_and_goes_to_json_by_column():
    table = Table(("what", "s"), [("a", 1.0), ("longer", None), ("b", Estimate.of([1.0, 1.0]))])
    assert str(table).splitlines() == [
        "what        s",
        "------  -----",
        "a           1",
        "longer",
        "b       1 ± 0",
    ]
    assert table.as_dicts()[1] == {"what": "longer", "s": None}
    assert table.as_dicts()[2]["s"]["mean"] == 1.0


# Figure 9


def test_asynchronous_environments_take_the_ideal_time_and_barriers_each_turns_slowest():
    found = fig9.measure("N(10, 10)", 0, batch_size=32, turns=5)
    assert found["async_s"] == pytest.approx(found["ideal_s"])
    assert found["batch_s"] > 1.3 * found["ideal_s"]


def test_the_bars_of_figure_9_fail_for_a_scheduler_3_percent_off_the_ideal():
    measured = {"batch_s": 242.0, "async_s": 100.0, "ideal_s": 100.0}
    good = fig9.summarise({"N(10, 10)": [measured, measured]})
    assert all(bar.holds for bar in good.bars)
    slow = fig9.summarise({"N(10, 10)": [measured, {**measured, "async_s": 103.0}]})
    assert not bars(slow)["N(10, 10): asynchronous over ideal time, worst seed"].holds
    off = fig9.summarise({"N(10, 10)": [{**measured, "batch_s": 260.0}]})
    assert not bars(off)["N(10, 10): speed-up's distance from 2.42"].holds


# Figure 10


def test_redundancy_hides_episodes_that_fail_slow():
    plain = fig10.measure("32x8, correlation 0", 0, batch_size=128)
    spare = fig10.measure("36x12, correlation 0", 0, batch_size=128)
    assert plain["any_s"] == plain["whole_s"] > 180.0
    assert spare["any_s"] < 60.0
    assert spare["whole_s"] >= spare["any_s"]


def test_whole_groups_want_larger_groups_for_independent_failures_and_more_groups_for_shared_ones():
    def whole_s(layout, correlation):
        case = fig10.case_name(layout, correlation)
        return sum(fig10.measure(case, seed)["whole_s"] for seed in range(2)) / 2

    assert whole_s("36x12", 0.0) < 0.5 * whole_s("54x8", 0.0)
    assert whole_s("54x8", 1.0) < 0.5 * whole_s("36x12", 1.0)


def test_the_bar_of_figure_10_fails_without_redundancy():
    slow = [{"any_s": 240.0, "whole_s": 240.0}]
    quick = [{"any_s": 45.0, "whole_s": 54.0}]
    names = [fig10.case_name(layout, 0.0) for layout in ("32x8", "36x12")]
    assert all(bar.holds for bar in fig10.summarise(dict(zip(names, (slow, quick), strict=True))).bars)
    assert not any(bar.holds for bar in fig10.summarise(dict(zip(names, (slow, slow), strict=True))).bars)


# Figure 7


def test_queue_scheduling_is_faster_than_batch_rollout_and_prefers_short_responses():
    found = fig7.measure("", 0, steps=3)
    assert found["queue_s"] < 0.5 * found["batch_s"]
    assert found["queue_alone_s"] < found["batch_s"]
    assert found["queue_tokens"] < found["batch_tokens"]


def test_the_bar_of_figure_7_fails_where_the_queue_is_no_faster():
    found = {f"{arm}_s": 100.0 for arm in fig7.ARMS} | {f"{arm}_tokens": 1000.0 for arm in fig7.ARMS}
    assert not any(bar.holds for bar in fig7.summarise({"": [found]}).bars)
    assert all(bar.holds for bar in fig7.summarise({"": [{**found, "queue_s": 30.0}]}).bars)


# Figure 8


def test_replicated_prompts_spread_over_engines_that_would_idle():
    found = fig8.measure("16x32", 0)
    assert found["together_s"] > 1.4 * found["replicated_s"]
    alone = fig8.measure("16x32", 0, engines=1)
    assert alone["together_s"] == pytest.approx(alone["replicated_s"])


def test_the_bar_of_figure_8_fails_without_a_gain():
    found = {case: [{"together_s": 100.0, "replicated_s": 90.0}] for case in fig8.PAPER}
    assert not any(bar.holds for bar in fig8.summarise(found).bars)


# Asynchronous training


def test_asynchronous_training_is_faster_than_synchronous():
    found = async_training.measure("RLVR, 4 of 8 train", 0, steps=4)
    assert found["alpha_2_s"] < 0.6 * found["sync_s"]
    assert found["alpha_2_s"] <= found["alpha_1_s"]


def test_the_bars_of_asynchronous_training_fail_where_alpha_2_falls_behind():
    found = {"sync_s": 240.0, "episode_s": 50.0, "longest_s": 200.0}
    found |= {"alpha_1_s": 150.0, "alpha_2_s": 104.0, "alpha_4_s": 100.0, "alpha_8_s": 100.0}
    case = "RLVR, 4 of 8 train"
    assert all(bar.holds for bar in async_training.summarise({case: [found]}).bars)
    behind = bars(async_training.summarise({case: [{**found, "alpha_2_s": 120.0}]}))
    assert not behind[f"{case}: alpha = 2 over the best"].holds
    slow = bars(async_training.summarise({case: [{**found, "sync_s": 200.0}]}))
    assert not slow[f"{case}: best alpha over synchronous"].holds


# Theory


def test_no_bound_is_violated_in_a_few_random_cases_and_some_come_near():
    measurements = [theory.measure("random cases", seed) for seed in range(12)]
    summary = theory.summarise({"random cases": measurements})
    assert all(bar.holds for bar in summary.bars), [str(bar) for bar in summary.bars]
    for name in theory.CHECKED:
        assert max(found[name] for found in measurements) > 0.85


def test_a_violated_bound_is_counted():
    good = dict.fromkeys([*theory.CHECKED, *theory.UNPROVED], 0.9) | {
        "share_distance": 0.0,
        "seconds_distance": 0.0,
    }
    assert all(bar.holds for bar in theory.summarise({"": [good]}).bars)
    for name in theory.CHECKED:
        held = [bar.holds for bar in theory.summarise({"": [good, {**good, name: 1.01}]}).bars]
        assert held.count(False) == 1
    for name in ("share_distance", "seconds_distance"):
        held = [bar.holds for bar in theory.summarise({"": [{**good, name: 1e-3}]}).bars]
        assert held.count(False) == 1


def test_the_papers_bound_needs_samples_that_start_as_soon_as_a_batch_is_taken():
    # 6 workers, batches of 14 samples of 10 s, training 28.4 s, alpha 1. The paper's bound is
    # max(14 * 10 / 6 + 10 / 2, 28.4) = 28.4 s a step. 14 samples that may start only with the next version take 30 s.
    steps = 40
    config = rollout_config(batch_size=14, num_envs=6, asynchrony=1.0, num_steps=steps)
    late, early = (
        simulate(
            Run(
                config,
                Workload(step_s=Constant(10.0)),
                steps=steps,
                train_s=28.4,
                counts_at_consumption=at_once,
            ),
            keep_batches=True,
        )
        for at_once in (False, True)
    )
    assert late.step_s[10:20] == pytest.approx([30.0, 28.4] * 5)
    assert early.step_s[10:20] == pytest.approx([28.4] * 10)
    assert late.total_s <= theory.async_bound(late, 6, 28.4, 1)
    assert early.total_s <= theory.async_bound(early, 6, 28.4, 2)


def test_the_best_share_is_where_rollout_and_training_take_equally_long():
    # c = 0: the share of the work, T = a + b.
    assert theory.best_share(30.0, 10.0, 0.0) == pytest.approx((0.25, 40.0))
    # a = b = 1, c = 2: s = 4, root sqrt(16 - 8): beta = (4 - 2.828) / 4, T = (4 + 2.828) / 2.
    assert theory.best_share(1.0, 1.0, 2.0) == pytest.approx(((4 - math.sqrt(8)) / 4, (4 + math.sqrt(8)) / 2))


def test_no_share_is_better_than_the_best_share():
    rng = random.Random(0)
    for _ in range(200):
        a, b, c = (10 ** rng.uniform(-2, 2) for _ in range(3))
        share, seconds = theory.best_share(a, b, c)
        assert 0.0 < share < 1.0
        assert seconds == pytest.approx(max(a / (1 - share) + c, b / share))
        for other in (share * 0.99, share + 0.01 * (1 - share), rng.random()):
            assert max(a / (1 - other) + c, b / other) >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("values", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0)])
def test_a_share_of_nothing_is_refused(values):
    with pytest.raises(ValueError, match="best_share got a ="):
        theory.best_share(*values)


def test_ratios_are_means_of_ratios():
    assert ratio([{"a": 2.0, "b": 1.0}, {"a": 12.0, "b": 3.0}], "a", "b").mean == 3.0
