"""Models of runs on the Hugging Face hub, by `huggingface_hub`: `agentenv push RUN NAME`.

Invariants:
- Nothing is sent but the run's folder model/, with its model card.
- A name, a token or a right that is missing is a `UsageError`; a hub that fails is an `InfrastructureError` which says
  how to try again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agentenv.errors import InfrastructureError, MissingExtraError, UsageError
from agentenv.report.model_card import write_model_card

__all__ = ["add_parser", "open_repository", "push_run", "run"]


def open_repository(name: str, *, private: bool | None = None, token: str | None = None) -> Any:
    """The hub's client, with the repository made where there was none.

    Args:
        name: of the repository, "user/model".
        private: of a new one; None: what the hub does by default.
        token: None: that of HF_TOKEN or of `hf auth login`.

    Raises:
        UsageError: the name is malformed, there is no token, or it may not write there.
        InfrastructureError: the hub can't be reached.
        MissingExtraError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "train") from error
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"can't push to {name}: HF_HUB_OFFLINE is set")
    if not (token or get_token()):
        raise UsageError(f"can't push to {name}: no token; set HF_TOKEN, or log in with: hf auth login")
    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
    except HFValidationError as error:
        raise UsageError(f"can't push to {name!r}: {error}") from None
    except HfHubHTTPError as error:
        if error.response.status_code in (400, 401, 403, 404):
            raise UsageError(f"can't push to {name}: {_reason(error)}") from error
        raise InfrastructureError(f"the hub failed for {name}: {_reason(error)}") from error
    except OSError as error:
        raise InfrastructureError(f"the hub can't be reached for {name}: {error}") from error
    except Exception as error:  # httpx's, of which huggingface_hub makes no secret
        raise InfrastructureError(f"the hub can't be reached for {name}: {error!r}") from error
    return api


def push_run(run: str | Path, name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Push a run's model with its card.

    Returns:
        The address of the model.

    Raises:
        UsageError: there is no model, or see :func:`open_repository`.
        InfrastructureError: the hub did not take it.
    """
    folder = write_model_card(run, name=name)
    api = open_repository(name, private=private, token=token)
    try:
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model of an agentenv run")
    except Exception as error:
        raise InfrastructureError(
            f"{folder} was not pushed: {_reason(error)}; to try again: agentenv push {run} {name}"
        ) from error
    return f"{api.endpoint}/{name}"


def add_parser(subparsers: Any) -> None:
    """Add `push`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser("push")
    parser.add_argument("directory", metavar="RUN", help="output directory of a run")
    parser.add_argument("name", metavar="NAME", help="of the repository, such as me/my-agent")
    parser.add_argument("--private", action="store_true", default=None, help="where it is made anew")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Push; the address goes to stdout."""
    sys.stdout.write(f"{push_run(args.directory, args.name, private=args.private)}\n")
    return 0


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
