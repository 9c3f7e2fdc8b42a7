"""Splits of GPUs: what fits, what is fastest, and how near whole GPUs come to the optimum over shares."""

from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv.planning import MODELS, StepTimes, Workload, best_split, splits
from agentenv.planning.split import GIB, USABLE
from agentenv.simulation.theory import best_share


def _work(size: str, **options: Any) -> Workload:
    return Workload(MODELS[size], **options)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", MODELS)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_no_gpu_is_given_more_than_it_has_and_no_gpu_twice(gpus: int, size: str, precision: Any) -> None:
    work = _work(size, precision=precision)
    for split in splits(work, gpus, 80.0):
        assert max(split.trainer_bytes, split.engine_bytes) <= 80.0 * GIB * USABLE
        assert split.shared == (gpus == 1)
        assert split.shared or split.trainer_gpus + split.engine_gpus <= gpus
        assert work.context <= split.kv_tokens <= work.context * work.num_envs


def test_without_times_the_fewest_gpus_train() -> None:
    split = best_split(_work("7B"), 8, 80.0)
    # 218 GiB of policy and critic over 4 GPUs and 6 GiB of activations fit 72 GiB; over 3 they do not.
    assert (split.trainer_gpus, split.engines, split.tensor_parallel) == (4, 4, 1)
    assert {found.trainer_gpus for found in splits(_work("7B"), 8, 80.0)} == {4, 5, 6, 7}


def test_an_engine_that_fits_no_gpu_is_spread_over_several() -> None:
    split = best_split(_work("32B", lora=True), 8, 80.0)
    assert split.tensor_parallel == 2 and split.engine_gpus <= 8 - split.trainer_gpus


def test_the_fastest_split_is_that_of_the_proposition_in_whole_gpus() -> None:
    times = StepTimes(rollout_s=60.0, train_s=20.0, batch=32, longest_s=100.0, asynchrony=1.0)
    split = best_split(_work("0.5B"), 8, 80.0, times)
    share, seconds = best_share(32 * 60 / 8, 32 * 20 / 8, 100.0)
    assert (share * 8, seconds) == pytest.approx((1.6, 400.0))
    # 2 of 8 train: max(32 * 60 / 6 + 100, 32 * 20 / 2) = 420 s; 1 of 8: max(374, 640).
    assert split.trainer_gpus == 2 and split.step_s == pytest.approx(420.0)

    assert split.step_s == min(found.step_s for found in splits(_work("0.5B"), 8, 80.0, times))


def test_what_does_not_fit_says_how_much_it_is() -> None:
    with pytest.raises(UsageError, match=r"does not fit 8 x 80 GiB: .* hold 1,087 GiB"):
        best_split(_work("32B"), 8, 80.0)
    with pytest.raises(UsageError, match="does not fit 1 x 24 GiB"):
        best_split(_work("7B"), 1, 24.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollout_s": 0.0}, "--rollout-s is 0.0"),
        ({"train_s": float("nan")}, "--train-s is nan"),
        ({"batch": 0}, "--batch is 0"),
        ({"longest_s": -1.0}, "--longest-s is -1.0"),
        ({"asynchrony": -1.0}, "--asynchrony is -1.0"),
    ],
)
def test_times_out_of_range_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        StepTimes(**{"rollout_s": 1.0, "train_s": 1.0, **options})


def test_a_machine_that_is_none_is_named() -> None:
    for gpus, gib in ((0, 80.0), (1, 0.0), (1, float("inf"))):
        with pytest.raises(UsageError, match="--gpu"):
            splits(_work("0.5B"), gpus, gib)


def test_with_an_asynchrony_of_0_rollout_and_training_take_turns() -> None:
    times = StepTimes(rollout_s=90.0, train_s=30.0, batch=32, longest_s=200.0, asynchrony=0.0)
    assert times.step_s(engine_gpus=6, trainer_gpus=2) == 32 * 90 / 6 + 200 + 32 * 30 / 2


@pytest.mark.parametrize("size", MODELS)
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_each_of_several_machines_trains_or_samples_and_no_engine_lies_on_two(gpus: int, size: str) -> None:
    for split in splits(_work(size), gpus, 80.0, machines=4):
        assert not split.shared and split.trainer_gpus % gpus == 0
        assert split.tensor_parallel <= gpus
        assert split.engines % (4 - split.trainer_gpus // gpus) == 0
        assert split.trainer_gpus + split.engine_gpus <= 4 * gpus


def test_what_one_machine_has_no_room_for_fits_several() -> None:
    with pytest.raises(UsageError, match=r"does not fit 16 x 80 GiB"):
        best_split(_work("32B"), 8, 80.0, machines=2)
    split = best_split(_work("32B"), 8, 80.0, machines=4)
    # 965 GiB of policy and critic over 16 GPUs and 15 GiB of activations are 75 GiB, over the 72 that are planned with.
    assert (split.trainer_gpus, split.engines, split.tensor_parallel) == (24, 4, 2)
    with pytest.raises(UsageError, match="--machines is 0, must be at least 1"):
        splits(_work("7B"), 8, 80.0, machines=0)
