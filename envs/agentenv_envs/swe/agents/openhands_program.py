"""OpenHands, its agent and loop as they are released, with a terminal and a file editor that act in a task's sandbox.

    VENV/bin/python openhands_program.py ISSUE_FILE WORKDIR MODEL [--condense_after EVENTS]

VENV has `openhands-sdk` and `openhands-tools`; of the rest only the standard library is needed. OPENAI_BASE_URL and
OPENAI_API_KEY name the endpoint, and DOCKER what is called as `docker` is (`container_cli`).

OpenHands runs its tools where it runs, which is beside the sandbox and as the user who trains. So the registry's tools
`terminal` and `file_editor` are exchanged for the same ones over another executor. What the model sees of them, the
system prompt, the other tools (task_tracker, think, finish), the condenser and the loop are those of OpenHands' preset.

Invariants: those of `sandbox_shell`. Input to a running process is answered with an error, as it is where none runs.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Conversation
from openhands.sdk.llm import TextContent
from openhands.sdk.tool import ToolExecutor, register_tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation
from openhands.tools.file_editor.impl import FileEditorExecutor
from openhands.tools.preset.default import get_default_agent
from openhands.tools.terminal import TerminalTool
from openhands.tools.terminal.definition import TerminalAction, TerminalObservation
from openhands.tools.terminal.metadata import CmdOutputMetadata

sys.path.append(str(Path(__file__).parent))  # this package is not installed here

from sandbox_shell import Copies, Sandbox, Shell  # type: ignore[import-not-found]


class SandboxTerminal(ToolExecutor[TerminalAction, TerminalObservation]):
    """The terminal's commands, in the sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._shell = Shell(sandbox)

    def __call__(self, action: TerminalAction, conversation: Any = None) -> TerminalObservation:
        """Run one."""
        if action.reset:
            self._shell.reset()
        if action.command.strip() and not action.is_input:
            done = self._shell.run(action.command)
            text, code, python = done.output, done.exit_code, done.python
        elif action.reset:
            text, code, python = "Terminal session has been reset.", 0, None
        else:
            text, code, python = "ERROR: No previous running command to interact with.", -1, None
        metadata = CmdOutputMetadata(exit_code=code, working_dir=self._shell.cwd, py_interpreter_path=python)
        return TerminalObservation.from_text(
            text=text, command=action.command, exit_code=code, metadata=metadata, is_error=code == -1
        )


class SandboxEditor(ToolExecutor[FileEditorAction, FileEditorObservation]):
    """OpenHands' editor on a copy of the file or folder, which is written back. OpenHands runs one call at a time."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._copies = Copies(sandbox, folder)
        self._editor = FileEditorExecutor(workspace_root=str(folder))

    def __call__(self, action: FileEditorAction, conversation: Any = None) -> FileEditorObservation:
        """View or edit."""
        try:
            copy = self._copies.fetch(action.path)
            before = copy.read_bytes() if copy.is_file() else None
            observation = self._editor(action.model_copy(update={"path": str(copy)}))
            after = copy.read_bytes() if copy.is_file() else None
            if after is not None and after != before:
                self._copies.store(action.path, after)
        except (OSError, ValueError) as error:
            observation = FileEditorObservation.from_text(
                text=str(error), command=action.command, is_error=True
            )
        content = [
            part.model_copy(update={"text": part.text.replace(str(self._copies.folder), "")})
            if isinstance(part, TextContent)
            else part
            for part in observation.content
        ]
        return observation.model_copy(update={"path": action.path, "content": content})


def register_sandbox_tools(sandbox: Sandbox, folder: Path) -> None:
    """Exchange the tools that act on files and processes, for sub-agents as well."""

    class SandboxTerminalTool(TerminalTool):
        name = TerminalTool.name

        @classmethod
        def create(cls, conv_state: Any, **_: Any) -> Any:
            return super().create(conv_state, executor=SandboxTerminal(sandbox))

    class SandboxFileEditorTool(FileEditorTool):
        name = FileEditorTool.name

        @classmethod
        def create(cls, conv_state: Any) -> Any:
            here = conv_state.workspace.working_dir
            return [
                tool.model_copy(
                    update={
                        "description": tool.description.replace(here, sandbox.workdir),
                        "executor": SandboxEditor(sandbox, Path(tempfile.mkdtemp(dir=folder))),
                    }
                )
                for tool in super().create(conv_state)
            ]

    register_tool(TerminalTool.name, SandboxTerminalTool)
    register_tool(FileEditorTool.name, SandboxFileEditorTool)


def main(argv: list[str]) -> int:
    """Work on the issue until the agent finishes, or is refused another turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("issue_file", type=Path)
    parser.add_argument("workdir", help="of the repository in the sandbox")
    parser.add_argument("model", help="that the endpoint has")
    parser.add_argument("--condense_after", type=int, help="events, 8 at least; unset: OpenHands' preset")
    options = parser.parse_args(argv)
    llm = LLM(
        model=f"openai/{options.model}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        usage_id="agent",
        disable_vision=True,
        num_retries=2,
        retry_min_wait=1,
        retry_max_wait=5,
        timeout=3600,
    )
    agent = get_default_agent(llm, cli_mode=True)
    if options.condense_after is not None:
        sizes = {"max_size": options.condense_after, "keep_first": 2}  # the system prompt and the issue
        condenser = agent.condenser.model_copy(update=sizes)
        agent = agent.model_copy(update={"condenser": condenser})
    task = options.issue_file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="agentenv-openhands-") as folder:
        workspace, copies = Path(folder) / "workspace", Path(folder) / "copies"
        workspace.mkdir()
        copies.mkdir(mode=0o700)
        register_sandbox_tools(Sandbox(options.workdir), copies)
        conversation = Conversation(agent=agent, workspace=str(workspace), visualizer=None)
        try:
            conversation.send_message(f"Mend this in the repository in {options.workdir}.\n\n{task}")
            conversation.run()
        finally:
            conversation.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
