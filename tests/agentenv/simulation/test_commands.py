"""``agentenv simulate``: results, files, exit codes and bad input."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentenv import cli
from agentenv.report.bars import Bar
from agentenv.simulation import figures, measuring
from agentenv.simulation.experiment import Run, rollout_config
from agentenv.simulation.figure import Figure, Summary, Table
from agentenv.simulation.workload import Constant, Workload
from agentenv.timeline import read_trace, window_of


def measure(case, seed):
    return {"value": float(seed + len(case))}


def summarise(results):
    rows = [(case, *[float(item["value"]) for item in found]) for case, found in results.items()]
    columns = ("case", *[f"seed {seed}" for seed in range(len(rows[0]) - 1)])
    bars = [Bar("first value", rows[0][1], "<=", 1.0)]
    return Summary(Table(columns, rows), bars, ["a finding"], {"a": [1.0, 2.0]})


def draw(summary, canvas):
    canvas.subplots().plot(summary.curves["a"])


TOY = Figure("toy", "a toy", ("a", "bb"), 2, {"size": "small"}, measure, summarise, draw)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(figures, "load", lambda name: TOY)


def simulate(*arguments):
    return cli.main(["simulate", "toy", "--jobs", "1", *map(str, arguments)])


@pytest.mark.usefixtures("toy")
def test_the_result_its_assumptions_and_its_bars_go_to_stdout_and_progress_does_not(capsys):
    assert simulate() == 0
    out, err = capsys.readouterr()
    assert "a toy" in out and "a finding" in out and "size  small" in out
    assert "ok      first value: 1 (bar: <= 1)" in out
    assert "simulating" not in out
    assert "simulating toy  run 4/4" in err


@pytest.mark.usefixtures("toy")
def test_the_json_holds_rows_assumptions_and_bars(tmp_path, capsys):
    path = tmp_path / "toy.json"
    assert simulate("--json", path, "--seeds", 3) == 0
    found = json.loads(path.read_text())
    assert found["rows"][1] == {"case": "bb", "seed 0": 2.0, "seed 1": 3.0, "seed 2": 4.0}
    assert found["assumed"] == {"size": "small"}
    assert (found["name"], found["seeds"], found["all_bars_hold"]) == ("toy", 3, True)
    assert found["bars"][0]["holds"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.json"]


def test_check_exits_1_where_a_bar_is_missed_and_only_then(monkeypatch, capsys):
    def missed(results):
        return dataclasses.replace(summarise(results), bars=[Bar("speed-up", 1.0, ">=", 2.0)])

    monkeypatch.setattr(figures, "load", lambda name: dataclasses.replace(TOY, summarise=missed))
    assert simulate() == 0
    assert simulate("--check") == 1
    assert "MISSED  speed-up: 1 (bar: >= 2)" in capsys.readouterr().out
    monkeypatch.setattr(figures, "load", lambda name: TOY)
    assert simulate("--check") == 0


@pytest.mark.usefixtures("toy")
def test_a_plot_is_written_whole(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "toy.png"
    assert simulate("--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.png"]


def test_every_figure_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure as Canvas

    from agentenv.simulation import async_training, fig7, fig8, fig9, fig10, scale, theory

    found = {
        fig9: {case: [{"batch_s": 2.0, "async_s": 1.0, "ideal_s": 1.0}] for case in fig9.CELLS},
        fig10: {case: [{"any_s": 2.0, "whole_s": 3.0}] for case in fig10.CASES},
        fig8: {case: [{"together_s": 2.0, "replicated_s": 1.0}] for case in fig8.PAPER},
        fig7: {"": [{f"{arm}_{unit}": 2.0 for arm in fig7.ARMS for unit in ("s", "tokens")}]},
        async_training: {
            case: [
                {"sync_s": 2.0, "episode_s": 1.0, "longest_s": 2.0}
                | {f"alpha_{a}_s": 1.0 for a in (1, 2, 4, 8)}
            ]
            for case in async_training.CASES
        },
        theory: {
            "": [
                dict.fromkeys([*theory.CHECKED, *theory.UNPROVED, "share_distance", "seconds_distance"], 0.5)
            ]
        },
    }
    run = (
        "turn_us",
        "cpu_s",
        "wall_s",
        "turn_s",
        "grown_mb",
        "turns",
        "resets",
        "episodes",
        "consumed",
        "missing",
    )
    run += ("crashed", "hung", "moved_turns", "engine_crashes", "look_us")
    run += ("collecting_s", "longest_collection_s", "began_s", "ended_s")
    found[scale] = {case: [dict.fromkeys(run, 2.0)] for case in scale.cases(1000)}
    for module, results in found.items():
        canvas = Canvas()
        summary = module.FIGURE.summarise(results)
        module.FIGURE.draw(summary, canvas)
        canvas.savefig(tmp_path / f"{module.FIGURE.name}.png")
        json.dumps([*summary.table.as_dicts(), summary.curves], allow_nan=False)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_run(tmp_path, monkeypatch, capsys):
    def never(case, seed):
        raise AssertionError("simulated")

    monkeypatch.setattr(figures, "load", lambda name: dataclasses.replace(TOY, measure=never))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert simulate("--plot", tmp_path / "toy.png") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "agentenv: error: matplotlib is not installed; pip install 'agentenv-rl[plot]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds is 0, must be at least 1"),
        (["--jobs", "-1"], "--jobs is -1, must be at least 1"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json: no such directory: no/such"),
        (["--json", "."], "--json .: is a directory"),
        (["--plot", "toy.txt"], "--plot toy.txt: must end in one of .png, .svg, .pdf"),
        (["--json", "/proc/toy.json"], "--json /proc/toy.json: can't be written: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_is_run(
    arguments, message, tmp_path, monkeypatch, capsys
):
    def never(case, seed):
        raise AssertionError("simulated")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "load", lambda name: dataclasses.replace(TOY, measure=never))
    assert cli.main(["simulate", "toy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"agentenv: error: {message}")
    assert err.count("\n") == 1


def test_an_unknown_figure_is_refused(capsys):
    assert cli.main(["simulate", "fig11"]) == 2
    assert capsys.readouterr().err.startswith(
        "agentenv: error: unknown simulation 'fig11'; did you mean 'fig1"
    )


def test_a_failed_measurement_leaves_no_file(tmp_path, monkeypatch):
    def broken(case, seed):
        raise ZeroDivisionError

    monkeypatch.setattr(figures, "load", lambda name: dataclasses.replace(TOY, measure=broken))
    with pytest.raises(ZeroDivisionError):
        simulate("--json", tmp_path / "toy.json")
    assert list(tmp_path.iterdir()) == []


def test_worker_processes_measure_what_one_process_measures():
    figure = dataclasses.replace(figures.load("theory"), cases=("random cases",))
    done = []
    alone = measuring.measure_all(figure, seeds=3, jobs=1)
    together = measuring.measure_all(figure, seeds=3, jobs=2, on_done=done.append)
    assert together == alone
    assert done == [1, 2, 3]


def _lives(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found by /proc")
def test_an_interrupt_ends_the_worker_processes_at_once(tmp_path):
    command = [sys.executable, "-m", "agentenv.cli", "simulate", "theory", "--jobs", "2"]
    running = subprocess.Popen(
        [*command, "--json", str(tmp_path / "never.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert "run 1/1000" in running.stderr.readline()
    (children,) = [
        children.read_text().split()
        for children in Path("/proc", str(running.pid), "task").glob(f"{running.pid}/children")
    ]
    assert len(children) >= 2
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.endswith("agentenv: interrupted\n")
    assert "Traceback" not in err
    deadline = time.monotonic() + 60.0
    while left := [child for child in children if _lives(child)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_simulates_and_the_module_is_not_imported_for_other_commands(tmp_path):
    path = tmp_path / "fig8.json"
    script = "import sys; from agentenv import cli; code = cli.main(sys.argv[1:]);"
    script += "print('simulation' if 'agentenv.simulation' in sys.modules else 'none', file=sys.stderr); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", script, "simulate", "fig8", "--seeds", "1", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "prompts x responses" in done.stdout
    assert {row["prompts x responses"] for row in json.loads(path.read_text())["rows"]} == {
        "32x16",
        "64x16",
        "16x32",
    }
    listed = subprocess.run(
        [sys.executable, "-c", script, "list"], capture_output=True, text=True, timeout=300, check=True
    )
    assert listed.stderr.splitlines()[-1] == "none"


def test_trace_writes_a_trace_of_each_exemplary_run_and_measures_nothing(monkeypatch, tmp_path, capsys):
    def fail(case, seed):
        raise AssertionError("nothing is to be measured")

    def run(mode):
        config = rollout_config(batch_size=2, num_envs=2, mode=mode, num_steps=2)
        return Run(config, Workload(step_s=Constant(5.0)), steps=2, train_s=3.0)

    traced = dataclasses.replace(TOY, measure=fail, runs={"sync": run("sync"), "ahead": run("async")})
    monkeypatch.setattr(figures, "load", lambda name: traced)
    assert simulate("--trace", tmp_path / "traces") == 0
    printed = [Path(line) for line in capsys.readouterr().out.split()]
    assert printed == [tmp_path / "traces" / name / "trace.json" for name in ("sync", "ahead")]
    trace = read_trace(printed[0])
    # Twice 5 s of episodes and 3 s of training.
    assert window_of(trace).seconds == pytest.approx(16.0)
    assert simulate("--trace", tmp_path / "traces") == 2
    assert "must be a new or empty folder" in capsys.readouterr().err


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("more", "said"), [((), "toy has no runs to be traced"), (("--check",), "goes without")]
)
def test_a_trace_that_makes_no_sense_is_refused(tmp_path, capsys, more, said):
    assert simulate("--trace", tmp_path / "traces", *more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "traces").exists()
