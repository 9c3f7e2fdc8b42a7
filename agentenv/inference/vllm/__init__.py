"""vLLM as an engine: a server, started by the user or by us, or in this process."""

from agentenv.inference.vllm.backend import Backend, Completion
from agentenv.inference.vllm.connect import connect
from agentenv.inference.vllm.engine import VLLMEngine
from agentenv.inference.vllm.server import ServerBackend
from agentenv.inference.vllm.server_process import ServerProcess

__all__ = ["Backend", "Completion", "ServerBackend", "ServerProcess", "VLLMEngine", "connect"]
