"""A whole agent program in the standard library: it asks an OpenAI-compatible endpoint, and runs what comes back.

    python recipes/swe_sao.py --agent_command "python $PWD/recipes/bash_agent.py {issue_file} {workdir}"

It knows nothing of training. The endpoint is named by OPENAI_BASE_URL and OPENAI_API_KEY, the sandbox by DOCKER, which
is called as `docker` is. What it says is what `SWE-v0` says, so that the embedded policy understands it.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

INSTRUCTIONS = """\
You repair a bug in the repository in {workdir}. Each turn, answer with one bash block:
```bash
COMMAND
```
Its output comes back. {tests}Edit the files in place. When the bug is gone, answer with the command submit.

Issue: """
BLOCK = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)\n?```", re.DOTALL)


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The policy's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        message: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return message


def run(command: str) -> str:
    """Its output in the sandbox, and the exit code where it is not 0."""
    argv = [os.environ["DOCKER"], "exec", "sandbox", "bash", "-c", command]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True, errors="replace")
    parts = [done.stdout.rstrip("\n")] if done.stdout.strip() else []
    if done.returncode != 0:
        parts.append(f"[exit code {done.returncode}]")
    return "\n".join(parts) or "(no output)"


def main(issue_file: str, workdir: str) -> int:
    """Work until the policy submits, or is refused another turn."""
    with open(issue_file, encoding="utf-8") as file:
        task = (
            INSTRUCTIONS.format(workdir=workdir, tests="Its tests are run by: python test.py. ") + file.read()
        )
    messages = [{"role": "user", "content": task}]
    while True:
        try:
            message = ask(messages)
        except urllib.error.HTTPError:
            return 1  # no turns are left, or the history is too long
        blocks = BLOCK.findall(message["content"])
        if len(blocks) != 1:
            wanted = "write exactly one: ```bash\nCOMMAND\n```"
            output = f"Not understood: {len(blocks)} bash blocks in the answer; {wanted}"
        elif blocks[0].strip() == "submit":
            return 0
        else:
            output = run(blocks[0].strip())
        messages += [message, {"role": "user", "content": output}]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
