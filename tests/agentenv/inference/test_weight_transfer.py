"""Weights on their way: written once, readable until newer ones are read, gone in the end."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentenv.errors import ModelError, UsageError
from agentenv.inference.model_skeleton import ModelSkeleton
from agentenv.inference.weight_transfer import FolderTransfer, NCCLTransfer, open_transfer


class _Receiver:
    name, incarnation = "http://server", 0

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def load_folder(self, folder: Path) -> None:
        self.folders.append(folder)
        await self.go_on.wait()
        assert (folder / "model.safetensors").is_file()


def test_a_folder_is_a_checkpoint_with_each_name_of_a_tied_weight(small: Any, tmp_path: Path) -> None:
    new = small.other_weights(1)
    small.skeleton.save(new, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not loaded.config.tie_word_embeddings
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, new[name]), name


def test_a_mixture_of_experts_is_written_with_the_names_of_checkpoints(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    skeleton = ModelSkeleton(model)
    names = dict(skeleton.checkpoint_tensors(model.state_dict()))
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in names
    skeleton.save(model.state_dict(), tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_a_skeleton_holds_no_weight_and_its_log_probs_are_the_models(small: Any) -> None:
    assert all(parameter.is_meta for parameter in small.skeleton._model.parameters())
    weights, ids = small.other_weights(2), small.prompt(30)
    expected = small.logprobs(weights, ids[:1], ids[1:])
    assert small.skeleton.logprobs(weights, ids) == pytest.approx(expected, abs=1e-5)
    without_head = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    small.skeleton.check(without_head)
    assert small.skeleton.logprobs(without_head, ids) == pytest.approx(expected, abs=1e-5)


def test_what_a_killed_process_left_goes_when_the_next_one_opens_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from agentenv.inference.weight_transfer import FolderTransfer\n"
        "kept = FolderTransfer(pathlib.Path(sys.argv[1]), reap=True)\n"
        "print(kept._root, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        first = FolderTransfer(tmp_path, reap=True)
        assert theirs.is_dir()
        other.kill()
    second = FolderTransfer(tmp_path, reap=True)
    assert not theirs.exists() and first._root.is_dir() and second._root.is_dir()
    for transfer in (first, second):
        asyncio.run(transfer.close())
    assert list(tmp_path.iterdir()) == []


def test_log_probs_in_several_threads_are_those_of_their_weights_and_leave_none_behind(small: Any) -> None:
    ids, weights = small.prompt(30), [small.other_weights(seed) for seed in range(4)]
    expected = [small.skeleton.logprobs(each, ids) for each in weights]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda n: small.skeleton.logprobs(weights[n % 4], ids), range(24)))
    for number, result in enumerate(results):
        assert result == pytest.approx(expected[number % 4], abs=1e-5)
    assert all(parameter.is_meta for parameter in small.skeleton._model.parameters())


def test_a_folder_lasts_while_it_is_read_and_the_newest_until_the_end(small: Any, tmp_path: Path) -> None:
    async def work() -> None:
        transfer, slow, quick = FolderTransfer(tmp_path, durable=True), _Receiver(), _Receiver()
        with pytest.raises(ModelError, match="no weights were published"):
            await transfer.load(quick)
        await transfer.publish(small.skeleton, small.weights)
        slow.go_on.clear()
        reading = asyncio.create_task(transfer.load(slow))
        await asyncio.sleep(0)
        await transfer.publish(small.skeleton, small.other_weights(1))
        await transfer.load(quick)
        await transfer.load(quick)
        old, new = slow.folders[0], quick.folders[0]
        assert old != new and quick.folders == [new, new]
        assert old.is_dir() and new.is_dir()
        slow.go_on.set()
        await reading
        assert not old.exists() and new.is_dir()
        await transfer.publish(small.skeleton, small.weights)
        assert not new.exists()
        await transfer.close()
        await transfer.close()

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_before_it_is_written_to(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    async def work() -> None:
        transfer = FolderTransfer(tmp_path)
        with pytest.raises(ModelError, match=r"weights need 0\.00 GiB in .*, 0\.00 are free"):
            await transfer.publish(small.skeleton, small.weights)
        await transfer.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("carrier pigeon", {}, "must be one of shared-memory, filesystem, nccl"),
        ("filesystem", {}, "needs a folder"),
        ("shared-memory", {"folder": "/tmp"}, "takes no folder"),
        ("filesystem", {"folder": "/nowhere/at/all"}, "can't be written to /nowhere/at/all"),
        ("nccl", {"device": "cpu"}, "the trainer's device is cpu"),
    ],
)
def test_a_transfer_that_cannot_be_used_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_transfer(kind, **options)


class _Client:
    """What TRL's client does, without a group: its calls in order."""

    def __init__(self, url: str, log: list[Any]) -> None:
        self.url, self.log = url, log

    def init_communicator(self, device: str) -> None:
        self.log.append(("join", self.url, device))

    def update_named_params(self, metadata: Any, tensors: Any) -> None:
        received = dict(tensors)
        assert [name for name, _, _ in metadata] == list(received)
        for name, dtype, shape in metadata:
            assert (dtype, shape) == ("float32", list(received[name].shape))
        self.log.append(("send", received["model.norm.weight"].clone()))

    def close_communicator(self) -> None:
        self.log.append(("leave", self.url))


def test_nccl_keeps_its_own_copy_and_joins_a_restarted_server_anew(small: Any) -> None:
    log: list[Any] = []
    weights = {name: tensor.clone() for name, tensor in small.weights.items()}

    async def work() -> None:
        transfer, receiver = NCCLTransfer("cpu", client=lambda url: _Client(url, log)), _Receiver()
        await transfer.publish(small.skeleton, weights)
        published = weights["model.norm.weight"].clone()
        weights["model.norm.weight"].add_(1.0)  # the trainer goes on
        await transfer.load(receiver)
        await transfer.load(receiver)
        receiver.incarnation = 1
        await transfer.load(receiver)
        await transfer.close()
        kinds = [entry[0] for entry in log]
        assert kinds == ["join", "send", "send", "join", "send", "leave"]
        assert all(torch.equal(entry[1], published) for entry in log if entry[0] == "send")

    asyncio.run(work())


def test_a_server_that_does_not_take_weights_over_nccl_is_named(small: Any) -> None:
    class _Broken(_Client):
        def init_communicator(self, device: str) -> None:
            raise RuntimeError("no weight-transfer engine")

    async def work() -> None:
        transfer = NCCLTransfer("cpu", client=lambda url: _Broken(url, []))
        await transfer.publish(small.skeleton, small.weights)
        with pytest.raises(
            ModelError, match="http://server did not take weights over NCCL: no weight-transfer"
        ):
            await transfer.load(_Receiver())

    asyncio.run(work())
