"""The benchmark of the advantages at a small size: what it measures, what it writes, and when it fails."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

SMALL = ["--rows", "3", "--tokens", "900", "--repeats", "2", "--loop_rows", "2"]


@pytest.fixture(scope="module")
def gae(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/gae.py")


def test_each_way_computes_the_same(gae: ModuleType) -> None:
    batch = gae.make_batch(3, 900, observations=True)
    expected = gae.by_scipy(batch.double())
    assert expected[0].abs().max() > 0.1
    for way in (gae.ours, gae.by_tensor_loop, gae.by_float_loop):
        for found, wanted in zip(way(batch.double()), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-11)
    assert gae.greatest_difference(batch) < 1e-11


def test_a_wrong_result_shows_as_a_difference(gae: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gae.ours
    monkeypatch.setattr(gae, "ours", lambda batch: (right(batch)[0], right(batch)[1] + 0.25))
    assert gae.greatest_difference(gae.make_batch(2, 300, observations=True)) == pytest.approx(0.25)


def test_episodes_are_several_turns_with_the_reward_on_the_last_action_token(gae: ModuleType) -> None:
    batch = gae.make_batch(8, 8000, observations=True)
    turns = (batch.mask[:, 1:] & ~batch.mask[:, :-1]).sum(dim=1) + 1
    # A turn takes 210 + 300 tokens in the mean, at most 1,000.
    assert turns.min() >= 8
    assert 10 < turns.double().mean() < 22
    for row in range(8):
        last = int(batch.mask[row].nonzero()[-1])
        rewards = batch.rewards[row].tolist()
        assert set(rewards[:last] + rewards[last + 1 :]) == {0.0}
    assert batch.rewards.sum() > 0
    assert gae.make_batch(2, 50, observations=False).mask.all()


def test_the_file_holds_what_is_printed_and_what_is_assumed(
    gae: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "new" / "gae.json"
    assert gae.main([*SMALL, "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["assumed"]["threads"] == 2
    for name in written["assumed"]:
        assert name in printed
    for name, figures in written["figures"].items():
        assert f"{name}, {100 * figures['action_share']:.1f} % of the tokens are actions" in printed
        assert figures["ours_least_ms"] <= figures["ours_ms"] <= figures["ours_greatest_ms"]
        assert figures["float_loop_over_ours"] == pytest.approx(figures["float_loop_ms"] / figures["ours_ms"])
    assert "on 2 rows, and scaled up" in printed
    assert [bar["name"] for bar in written["bars"]] == [
        f"{figure}, {name}"
        for name in ("with observations", "without observations")
        for figure in (
            "skip_observation_gae",
            "over scipy's lfilter row by row",
            "float loop over it",
            "tensor loop over it",
            "greatest difference in float64",
        )
    ]
    for bar in written["bars"]:
        assert bar["name"] in printed


def test_check_fails_exactly_where_a_bar_is_missed(gae: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (
        ("LIMIT_MS", 1e9),
        ("SCIPY_LIMIT", 1e9),
        ("FLOAT_LOOP_LIMIT", 0.0),
        ("TENSOR_LOOP_LIMIT", 0.0),
    ):
        monkeypatch.setattr(gae, name, limit)
    assert gae.main([*SMALL, "--check"]) == 0
    for name, limit in (
        ("LIMIT_MS", 0.0),
        ("SCIPY_LIMIT", 0.0),
        ("TOLERANCE", -1.0),
        ("FLOAT_LOOP_LIMIT", 1e9),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(gae, name, limit)
            assert gae.main([*SMALL, "--check"]) == 1, name
            assert gae.main(SMALL) == 0


@pytest.mark.parametrize("option", ["--repeats", "--rows", "--tokens", "--loop_rows"])
def test_sizes_below_one_are_refused(
    gae: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        gae.main([option, "0"])
    assert f"{option}: is 0, must be at least 1" in capsys.readouterr().err
