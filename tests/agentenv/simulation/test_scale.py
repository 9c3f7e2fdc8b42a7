"""`agentenv simulate scale` at small sizes: accounts, failures, costs and the loads that they make."""

import dataclasses
import json

import pytest

from agentenv import cli
from agentenv.errors import UsageError
from agentenv.simulation import commands, measuring, scale, scale_cases, scale_runs, server_cost
from agentenv.simulation.scale_load import Costs, cost_at, load_table, most_environments, saturation_table
from agentenv.simulation.shard_slots import EpisodeSlots, TurnSlots

COSTS = Costs(
    one={100: 100.0, 10_000: 200.0},
    turns={100: 50.0},
    episodes={100: 10.0},
    client_us=1000.0,
    look_us=100.0,
    models_us=40.0,
)


def test_every_episode_ends_exactly_once_whatever_fails(monkeypatch):
    failing = dataclasses.replace(
        scale_runs.WORKLOAD, turns=5, bad_reset_share=0.1, crash_share=0.1, hang_share=0.05
    )
    monkeypatch.setattr(scale_runs, "WORKLOAD", failing)
    monkeypatch.setattr(scale_runs, "ENGINE_MTBF_S", 300.0)
    cost = scale_runs.play(300)
    counts, discarded = cost.counts, cost.counts["discarded"]
    assert (counts["consumed"], counts["buffered"], counts["running"]) == (300, 0, 0)
    assert counts["produced"] == 300 + sum(discarded.values())
    assert set(discarded) == {"step_CrashError", "step_timeout"}  # engines that crash cost no episode
    assert cost.engine_crashes > 0 and cost.moved_turns > 0
    # Of about 450 resets; the standard errors of the shares are 0.014, 0.014 and 0.010.
    assert (cost.resets - counts["produced"]) / cost.resets == pytest.approx(0.1, abs=0.06)
    assert discarded["step_CrashError"] / cost.resets == pytest.approx(0.1, abs=0.06)
    assert discarded["step_timeout"] / cost.resets == pytest.approx(0.05, abs=0.04)


def test_the_controller_pays_less_for_a_turn_that_a_shard_asks_for_and_next_to_nothing_for_its_episodes():
    one, turns, episodes = (
        scale_runs.play(200, slots=slots).cpu_s for slots in (None, TurnSlots, EpisodeSlots)
    )
    assert episodes < 0.5 * turns < 0.5 * one


def test_slots_of_shards_take_the_time_and_give_the_ids_of_their_episodes():
    plain, turns, episodes = (
        scale_runs.play(20, slots=slots, tokens_per_id=1) for slots in (None, TurnSlots, EpisodeSlots)
    )
    for shards in (turns, episodes):
        assert shards.turns == 400
        assert shards.turn_s == pytest.approx(plain.turn_s, rel=0.1)
        assert shards.counts == {
            "produced": 20,
            "consumed": 20,
            "buffered": 0,
            "running": 0,
            "discarded": {},
        }


def test_the_load_grows_with_environments_and_falls_with_the_turns_latency():
    # 1,000 environments, a turn every 10 s: 100 turns a second of 150 µs.
    assert COSTS.load("one", 1000, 10.0) == pytest.approx(0.015)
    assert COSTS.load("one", 2000, 10.0) > 2 * COSTS.load("one", 1000, 10.0)
    assert COSTS.load("one", 1000, 20.0) == pytest.approx(0.0075)
    # With 1,000 µs for the client, and 10 engines that are looked at every second.
    assert COSTS.load("one_http", 1000, 10.0) == pytest.approx(0.115 + 0.001)
    # Shards take the client and the slots; the controller still looks at engines, unless they deliver episodes.
    assert COSTS.load("turns", 1000, 10.0) == pytest.approx(0.005 + 0.001)
    assert COSTS.load("episodes", 1000, 10.0) == pytest.approx(0.001)
    assert COSTS.shard_load(10, 1000, 10.0) == pytest.approx(0.011)


def test_a_cost_between_two_sizes_is_linear_in_the_logarithm_and_beyond_them_the_nearest():
    assert [cost_at(COSTS.one, n) for n in (1, 100, 1000, 10_000, 1e6)] == pytest.approx(
        [100, 100, 150, 200, 200]
    )


def test_the_loop_is_80_percent_busy_at_the_number_found():
    # 0.8 x 30 s / 200 µs
    assert most_environments(lambda n: COSTS.load("one", n, 30.0)) == pytest.approx(120_000, rel=0.001)
    rows = {row["busiest loop"]: row["30 s a turn"] for row in saturation_table(COSTS).as_dicts()}
    assert rows["one loop, engines in the process"] == 120_000
    # A turn of 1,200 µs every 30 s, and a hundredth of a look of 100 µs a second: 19,512.
    assert rows["one loop, servers"] == 20_000
    loads = {row["busiest loop"]: row["10,000 environments"] for row in load_table(COSTS, 30.0).as_dicts()}
    assert loads["one loop, engines in the process"] == "6.7%"
    # The shards are the busiest until the controller is.
    assert rows["4 shards that ask for turns"] == pytest.approx(4 * rows["one loop, servers"], rel=0.1)
    assert rows["64 shards that ask for turns"] == rows["controller of shards that ask for turns"]


def test_a_server_client_costs_more_for_a_turn_than_for_a_look():
    pytest.importorskip("aiohttp")
    found = server_cost.measure(episodes=4, turns=3)
    assert found.turn_s > found.look_s > 0.0


def small_results():
    """Of measurements as a run of 100,000 environments might give them."""
    run = {"turn_us": 100.0, "cpu_s": 200.0, "turn_s": 30.0, "grown_mb": 2000.0}
    run |= {"collecting_s": 1.0, "longest_collection_s": 0.1}
    run |= {"turns": 2e6, "engine_crashes": 3.0, "resets": 102_538.0, "episodes": 101_513.0}
    run |= {"consumed": 100_000.0, "missing": 0.0, "crashed": 1025.0, "hung": 513.0, "moved_turns": 0.0}
    times = {"wall_s": 1.0, "began_s": 50.0, "ended_s": 649.0}
    return {
        case: [{**times, **({"turn_us": 1000.0, "look_us": 100.0} if scale_cases.SERVER in case else run)}]
        for case in scale_cases.cases(100_000)
    }


@pytest.mark.parametrize(
    ("name", "value", "missed"),
    [
        ("ended_s", 700.0, "wall time"),
        ("grown_mb", 5000.0, "memory"),
        ("missing", 1.0, "exactly once"),
        ("consumed", 99_999.0, "samples taken"),
        ("crashed", 1300.0, "crashes: standard errors"),
        ("hung", 300.0, "hangs: standard errors"),
        ("episodes", 102_538.0, "bad resets: standard errors"),
    ],
)
def test_each_bar_fails_for_a_run_that_is_worse(name, value, missed):
    results = small_results()
    assert all(bar.holds for bar in scale.summarise(results).bars)
    for (found,) in results.values():
        if name in found:
            found[name] = value
    assert [bar.name for bar in scale.summarise(results).bars if not bar.holds and missed in bar.name]


def test_a_cost_is_measured_in_a_process_of_its_own():
    def never(case, seed):
        raise AssertionError("measured here")

    case = scale_cases.case_name(scale_cases.MODELS, 10)
    figure = dataclasses.replace(scale.sized(1000), cases=(case,), measure=never)
    ((found,),) = measuring.measure_all(figure, seeds=1, jobs=1).values()
    assert found["turns"] == 200.0


def measure_here(figure, *, seeds, jobs, on_done):
    assert (seeds, jobs) == (1, 1)
    return {case: [figure.measure(case, 0)] for case in figure.cases}


def test_the_command_prints_costs_loads_and_its_bars(monkeypatch, tmp_path, capsys):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(commands, "measure_all", measure_here)
    path = tmp_path / "scale.json"
    assert cli.main(["simulate", "scale", "--num_envs", "500", "--check", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Load of the busiest loop, 30 s a turn:" in out
    assert "one loop, 500 environments: busy for " in out
    assert "Environments at which the busiest loop is 80 % busy:" in out
    assert "ok      samples taken in the largest run: 500 (bar: == 500)" in out
    assert "wall time" not in out  # a bar of the full size
    found = json.loads(path.read_text())
    assert {row["environments"] for row in found["rows"]} == {5.0, 25.0, 500.0, None}
    loads = found["curves"]["loads"]["30"]["one loop, servers"]
    assert [load for _, load in loads] == sorted(load for _, load in loads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale", "--num_envs", "1200"], "--num_envs is 1200, must be a multiple of 500, at least 500"),
        (["scale", "--num_envs", "0"], "--num_envs is 0, must be a multiple of 500"),
        (["fig9", "--num_envs", "1000"], "--num_envs: fig9 has sizes of its own; it goes with scale"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(commands, "measure_all", None)
    assert cli.main(["simulate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"agentenv: error: {message}")


def test_a_size_that_is_no_multiple_is_refused():
    with pytest.raises(UsageError, match="must be a multiple of 500"):
        scale.sized(999)
