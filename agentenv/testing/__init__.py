"""For tests of environments, rollouts and recipes: a checker and public fakes, all without torch.

- `check_env`: does an environment keep the contract of `agentenv.BaseEnv`?
- `EchoEnv`: the smallest environment that has tasks, a reward and both kinds of end.
- `FaultyEnv`: any environment, with hangs, deaths, errors and malformed returns in some of its episodes.
- `ScriptedModel`: an inference engine whose replies are written down beforehand.
- `ByteTokenizer`: a tokenizer with a chat template that needs no file.
"""

from agentenv.testing.byte_tokenizer import ByteTokenizer
from agentenv.testing.check_env import check_env
from agentenv.testing.echo_env import EchoEnv
from agentenv.testing.faulty_env import Fault, FaultyEnv
from agentenv.testing.scripted_model import ScriptedModel

__all__ = ["ByteTokenizer", "EchoEnv", "Fault", "FaultyEnv", "ScriptedModel", "check_env"]
