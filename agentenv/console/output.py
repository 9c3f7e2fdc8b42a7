"""What a process writes to stderr: for a person, or as lines of JSON for a machine; with a progress line, or without.

    {"time": "2026-11-30T22:01:02.345+00:00", "level": "WARNING", "logger": "agentenv.rollout", "message": "..."}

Invariants:
- Results go to stdout; nothing here touches it.
- With JSON every line on stderr is one object, whoever wrote it: logging, warnings, progress, libraries that print.
  What child processes write to their own stderr is theirs.
- In text, control characters of a message are shown as their code points: it may repeat what a model wrote.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, cast

__all__ = [
    "LogFormat",
    "add_options",
    "complain",
    "is_quiet",
    "line_for_signal",
    "report_progress",
    "stderr_as",
    "stderr_options",
]

LogFormat = Literal["text", "json"]
_TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"

_quiet = False
_json: "_JsonLines | None" = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` and `--log-format` to a command's parser."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--quiet",
        action="store_true",
        default=argparse.SUPPRESS,
        help="no progress on stderr; warnings and errors stay",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="of stderr: text, or one JSON object a line",
    )
    # As the recipes spell it.
    group.add_argument("--log_format", dest="log_format", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def stderr_options(arguments: Sequence[str]) -> tuple[bool, LogFormat]:
    """`--quiet` and `--log-format` of a command line, before it is parsed: its errors are to follow them.

    A malformed one counts as not given; the parser refuses it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser)
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except (argparse.ArgumentError, SystemExit):
        return False, "text"
    return getattr(found, "quiet", False), getattr(found, "log_format", "text")


@contextlib.contextmanager
def stderr_as(*, quiet: bool = False, log_format: LogFormat = "text") -> Iterator[None]:
    """A block whose stderr is written in that way; logging is set up for it.

    Args:
        quiet: leave out progress.
        log_format: "text" or "json".
    """
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        with (
            _text_lines()
            if log_format == "text"
            else _json_lines()
            if _json is None
            else contextlib.nullcontext()
        ):
            yield
    finally:
        _quiet = before


def is_quiet() -> bool:
    """Whether progress is not wanted."""
    return _quiet


def report_progress(line: str, fields: dict[str, Any]) -> bool:
    """Write progress as JSON, if that is the format; returns whether it is.

    Args:
        line: for a person.
        fields: for a machine, beside it.
    """
    if _json is None:
        return False
    _json.emit("INFO", "agentenv.progress", line, **fields)
    return True


def line_for_signal(text: str) -> bytes:
    """A line for `os.write` on stderr, where a signal handler must take no lock."""
    if _json is None:
        return f"\n{text}\n".encode()
    return f"{_object('WARNING', 'agentenv', text)}\n".encode()


def complain(message: str, name: str = "", *, kind: str = "error", trace: str | None = None) -> bool:
    """Write why a program ends; white space and line feeds in it become single spaces.

    Args:
        message: why.
        name: of the program; empty: none.
        kind: of message, in text.
        trace: a traceback, which only JSON takes.

    Returns:
        whether it was written: a traceback in text is the interpreter's to write.
    """
    message = " ".join(message.split())
    if _json is not None:
        _json.emit("ERROR", name or "agentenv", message, **({"exception": trace} if trace else {}))
        return True
    if trace is not None:
        return False
    from agentenv.report.transcripts import revealed

    sys.stderr.write(": ".join(part for part in (name, kind, revealed(message)) if part) + "\n")
    return True


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from agentenv.report.transcripts import revealed

        return revealed(super().format(record))


@contextlib.contextmanager
def _text_lines() -> Iterator[None]:
    root = logging.getLogger()
    if not root.handlers:  # a program that has set up logging by itself keeps what it wants
        handler = logging.StreamHandler()
        handler.setFormatter(_TextFormatter(_TEXT_FORMAT))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    yield


@contextlib.contextmanager
def _json_lines() -> Iterator[None]:
    global _json
    raw = sys.stderr
    stream = _JsonLines(raw)
    # One without a stream of its own, such as logging's last resort, looks stderr up each time.
    moved = [handler for handler in _handlers() if vars(handler).get("stream") is raw]
    root = logging.getLogger()
    handler = _JsonHandler(stream)
    handler.setLevel(logging.WARNING)
    own = [one for one in root.handlers if one in moved]
    try:
        _json = stream
        sys.stderr = cast("TextIO", stream)
        for one in moved:
            one.setStream(stream)
        for one in own:
            root.removeHandler(one)
        root.addHandler(handler)
        logging.captureWarnings(True)
        yield
    finally:
        _json, sys.stderr = None, raw
        logging.captureWarnings(False)
        root.removeHandler(handler)
        for one in own:
            root.addHandler(one)
        for one in moved:
            one.setStream(raw)
        stream.end()


def _handlers() -> list["logging.StreamHandler[Any]"]:
    """All that write to a stream, of all loggers."""
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


class _JsonHandler(logging.Handler):
    def __init__(self, stream: "_JsonLines") -> None:
        super().__init__()
        self._lines = stream

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
        self._lines.emit(
            record.levelname, record.name, record.getMessage(), **({"exception": trace} if trace else {})
        )


def _object(level: str, logger: str, message: str, **fields: Any) -> str:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps(
        {"time": time, "level": level, "logger": logger, "message": message, **fields}, default=str
    )


class _JsonLines(io.TextIOBase):
    """In the place of stderr: each line that is written becomes an object."""

    encoding = "utf-8"

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            # A carriage return, too, ends what can be read as a line: bars are redrawn by it.
            *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self.emit("INFO", "stderr", line)
        return len(text)

    def emit(self, level: str, logger: str, message: str, **fields: Any) -> None:
        """Write an object."""
        line = _object(level, logger, message, **fields)
        with self._lock:
            self._raw.write(f"{line}\n")
            self._raw.flush()

    def end(self) -> None:
        """Write what has no line feed behind it."""
        if self._rest.strip():
            self.write("\n")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._raw.fileno()

    def flush(self) -> None:
        self._raw.flush()
