"""Bad input to the SWE recipe: one clear line on stderr, exit code 2, nothing written."""

import gc
import importlib.util
import json

import pytest

from agentenv.errors import UsageError
from agentenv.report import Progress
from agentenv_trainers.recipe import run_recipe

DIFF = "--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-old\n+new\n"
ROW = {
    "instance_id": "flask-1__empty-name",
    "problem_statement": "An empty name is accepted.",
    "package": "flask==2.2.3",
    "install": ["pytest<8"],
    "source_root": "src",
    "patch": DIFF.format(path="src/flask/app.py"),
    "test_patch": DIFF.format(path="tests/test_x.py"),
    "FAIL_TO_PASS": ["tests/test_x.py::test_x"],
    "PASS_TO_PASS": [],
}


@pytest.fixture
def refused(swe_sao, tmp_path, monkeypatch, capsys):
    """Runs the recipe with bad input and returns the one line that it says."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        before = sorted(tmp_path.rglob("*"))
        code = run_recipe(swe_sao.main, [str(item) for item in argv])
        captured = capsys.readouterr()
        assert code == 2, captured.err
        assert captured.out == ""
        lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert captured.err.splitlines() == lines, captured.err
        assert len(lines) == 1
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_an_unknown_environment(refused):
    assert "did you mean 'SWE-v0'" in refused("--env", "SEW-v0")


def test_a_model_that_cannot_be_pushed_is_not_trained(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no-such-file")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "no token; set HF_TOKEN" in refused(
        "--env", "Echo-v0", "--push_to_hub", "--hub_model_id", "me/agent"
    )
    assert "--push_to_hub needs --hub_model_id" in refused("--env", "Echo-v0", "--push_to_hub")
    assert "--hub_model_id is for --push_to_hub" in refused("--env", "Echo-v0", "--hub_model_id", "me/agent")


def test_a_model_path_without_a_model(refused, tmp_path):
    (tmp_path / "model").mkdir()
    assert "--model model: that folder holds no model" in refused("--model", "model", "--env", "Echo-v0")
    assert "--model ./absent: no such folder" in refused("--model", "./absent", "--env", "Echo-v0")


@pytest.mark.parametrize("field", ["problem_statement", "FAIL_TO_PASS", "test_patch"])
def test_a_dataset_row_without_its_fields(refused, tmp_path, field):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({name: value for name, value in ROW.items() if name != field}) + "\n"
    )
    line = refused("--dataset", "rows.jsonl", "--sandbox", "local-unisolated", "--allow_unisolated")
    assert "flask-1__empty-name" in line
    assert field in line


def test_a_dataset_that_is_not_there(refused):
    assert "absent.jsonl" in refused(
        "--dataset", "absent.jsonl", "--sandbox", "local-unisolated", "--allow_unisolated"
    )


def test_a_sandbox_service_without_a_token_or_that_does_not_answer(refused, monkeypatch):
    pytest.importorskip("httpx")
    monkeypatch.delenv("AGENTENV_SANDBOX_TOKEN", raising=False)
    monkeypatch.delenv("AGENTENV_SANDBOX_TOKEN_FILE", raising=False)
    assert "AGENTENV_SANDBOX_TOKEN" in refused("--sandbox_url", "http://127.0.0.1:9")
    monkeypatch.setenv("AGENTENV_SANDBOX_TOKEN", "0123456789abcdef")
    assert "no sandbox service answers" in refused("--sandbox_url", "http://127.0.0.1:9")
    assert "sandbox_url='ftp://x'" in refused("--sandbox_url", "ftp://x")


def test_a_dataset_without_isolation(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    assert "needs Docker" in refused("--dataset", "rows.jsonl", "--sandbox", "local-unisolated")


def test_an_engine_that_is_not_installed(refused):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed")
    assert "pip install 'agentenv-rl[vllm]'" in refused("--engine", "vllm")


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_docker_asked_for_where_no_engine_answers(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert "no Docker engine answers" in refused("--sandbox", "docker")
    # The Docker SDK leaves the socket that it could not connect to the collector: it must not warn in a later test.
    gc.collect()


def test_an_output_directory_in_use(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    assert "out: already in use" in refused("--output_dir", "out")


def test_nothing_to_resume(refused):
    assert "out/run.json: no such file" in refused("--output_dir", "out", "--resume")


def test_a_misspelt_field(refused, tmp_path):
    assert "did you mean --clip_low?" in refused("--cliplow", "0.5")
    (tmp_path / "run.yaml").write_text("clip_hihg: 3\n")
    assert "unknown option 'clip_hihg'; did you mean clip_high?" in refused("--config", "run.yaml")


def test_a_sampling_temperature_that_breaks_the_importance_ratio(refused):
    assert "SAOConfig.temperature is 0.7, must be 1.0" in refused("--temperature", "0.7")


def test_an_argument_that_the_environment_does_not_take(refused):
    line = refused("--sandbox", "local-unisolated", "--env_kwargs", '{"level": [1]}')
    assert "takes no argument 'level'; did you mean 'levels'?" in line


def test_a_context_longer_than_the_model(refused, tiny_policy):
    line = refused("--env", "Echo-v0", "--model", tiny_policy, "--max_tokens_per_episode", "100000")
    assert "--max_tokens_per_episode is 100000, but model" in line
    assert "has 4096 positions" in line


def test_an_image_that_can_not_be_made_is_told_before_anything_is_written(
    refused, swe_sao, tiny_policy, monkeypatch
):
    class Engine:
        kind, client = "docker", object()

        @property
        def backend(self):
            return self

        def close(self):
            pass

    def no_image(client, *, progress):
        progress("building from Debian packages")
        raise UsageError("debootstrap is not there")

    monkeypatch.setattr(swe_sao, "open_backend", lambda name, **_: Engine())
    monkeypatch.setattr(swe_sao, "ensure_base_image", no_image)
    shown = []
    monkeypatch.setattr(Progress, "update", lambda self, done, values: shown.append((done, values)))
    assert refused("--model", tiny_policy) == "error: debootstrap is not there"
    assert shown == [(1, {"now": "building from Debian packages"})]
