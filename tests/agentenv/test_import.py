"""Importing the core is cheap, loads no torch, and is not disturbed by a user's own folders."""

import pkgutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import agentenv

# What lies in `agentenv.inference` besides these belongs to an engine and may need its libraries.
_INFERENCE_WITHOUT_TORCH = {
    "agentenv.inference",
    "agentenv.inference.chat_engine",
    "agentenv.inference.chat_server",
    "agentenv.inference.protocol",
    "agentenv.inference.proxy",
    "agentenv.inference.text_turns",
}

# What defines classes over those of another library.
_NEED_OTHERS = {
    "agentenv.cluster.shard_host",
    "agentenv.cluster.shards",  # they send prompts to engines
    "agentenv.interop.openenv.messages",
    "agentenv.interop.openenv.server",
    "agentenv.interop.verifiers.episode",
}


def _run(script: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_importing_the_package_loads_no_torch() -> None:
    loaded = _run("import agentenv, sys; print(*sys.modules)").split()
    heavy = {"torch", "transformers", "trl", "datasets", "docker", "agentenv_envs", "agentenv_trainers"}
    assert heavy.isdisjoint(loaded)


def test_every_module_of_the_core_but_the_engines_imports_without_torch() -> None:
    modules = [
        module.name
        for module in pkgutil.walk_packages(agentenv.__path__, "agentenv.")
        if not module.name.endswith(".__main__")
        and (not module.name.startswith("agentenv.inference.") or module.name in _INFERENCE_WITHOUT_TORCH)
        and module.name not in _NEED_OTHERS
    ]
    assert "agentenv.testing.scripted_model" in modules
    _run(
        f"""
        import importlib, sys
        for name in ("torch", "transformers", "trl"):
            sys.modules[name] = None  # importing it raises ModuleNotFoundError
        for name in {modules!r}:
            importlib.import_module(name)
        """
    )


def test_importing_the_package_costs_less_than_a_fifth_of_a_second_over_gymnasium() -> None:
    script = """
        import time
        import gymnasium
        start = time.process_time()
        import agentenv
        print(time.process_time() - start)
        """
    _run(script)  # writes the byte code, which is not what is measured
    # Processor time and the median: a busy machine must not fail this.
    costs = [float(_run(script)) for _ in range(5)]
    assert statistics.median(costs) < 0.2, costs


def test_a_users_own_folders_envs_and_trainers_break_nothing(tmp_path: Path) -> None:
    for folder in ("envs", "trainers", "recipes", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("OWNER = 'user'\n")
        (tmp_path / folder / "mine.py").write_text("VALUE = 1\n")
    out = _run(
        """
        import agentenv, agentenv_envs, agentenv_trainers
        import envs, envs.mine, trainers, trainers.mine, recipes, tests
        print(envs.OWNER, trainers.OWNER, recipes.OWNER, tests.OWNER)
        env = agentenv.make("Echo-v0")
        print(env.reset(seed=0)[0])
        """,
        cwd=tmp_path,
    )
    assert out.splitlines()[0] == "user user user user"
    assert out.splitlines()[1].startswith("Say the word")
