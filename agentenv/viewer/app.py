"""The viewer over HTTP: a page, and what it shows as JSON.

    GET /                    the page; /FILE its scripts and styles
    GET /api/run             state of the run, counts, what can be filtered by
    GET /api/episodes        one page of the list; parameters in `ListQuery`
    GET /api/episode         one episode (phase, step, episode_id)
    GET /api/tokens          its tokens (phase, step, episode_id)
    GET /api/chart/N.svg     a curve of the run

Invariants:
- Nothing is written, and of files only those that `RunFiles`, `EpisodeIndex` and `read_tokens` name are read: no part
  of a request is ever part of a path.
- A request whose Host is not this machine is refused: a foreign name that was pointed at 127.0.0.1 reads nothing.
- The content security policy lets the page load its own files alone and make HTML of no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, FiniteFloat
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from agentenv.report.charts import PALETTE
from agentenv.report.transcripts import revealed
from agentenv.viewer.episode_index import MAX_NAME_CHARS, EpisodeIndex, EpisodeRow
from agentenv.viewer.episode_page import episode_to_json, tokens_to_json
from agentenv.viewer.episode_query import RANGES, SORTABLE, EpisodeQuery, page_of, row_to_json
from agentenv.viewer.run_files import RunFiles

__all__ = ["create_app"]

INDEX_BUDGET_S: Final = 0.5
"""Longest that a request waits for the index; what is not read by then comes with a later request."""
MAX_FACETS: Final = 50
MAX_OTHERS: Final = 200
"""More episodes of a task that the page of one names."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

Text = Annotated[str, Query(max_length=MAX_NAME_CHARS)]


class ListQuery(BaseModel):
    """What a list may be asked for; bounds take part in the range."""

    page: int = Field(1, ge=1, le=10**9)
    size: int = Field(100, ge=1, le=500)
    phase: str = ""
    outcome: str = ""
    end_reason: str | None = None
    task: str = ""
    reward_min: FiniteFloat | None = None
    reward_max: FiniteFloat | None = None
    start_version_min: FiniteFloat | None = None
    start_version_max: FiniteFloat | None = None
    staleness_min: FiniteFloat | None = None
    staleness_max: FiniteFloat | None = None
    step_min: FiniteFloat | None = None
    step_max: FiniteFloat | None = None
    sort: str = Field("", pattern=f"^({'|'.join(SORTABLE)})?$")
    order: Literal["ascending", "descending"] = "descending"

    def query(self) -> EpisodeQuery:
        """The filters and the order."""
        ranges = [(name, getattr(self, f"{name}_min"), getattr(self, f"{name}_max")) for name in RANGES]
        return EpisodeQuery(
            phase=self.phase,
            outcome=self.outcome,
            end_reason=self.end_reason,
            task=self.task,
            ranges=tuple(ranges),
            sort=self.sort,
            descending=self.order == "descending",
        )


def create_app(run: Path) -> FastAPI:
    """The application over a run directory.

    Args:
        run: the directory; it is read with each request.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    routes = _Routes(run)
    for path, handler in (
        ("/api/run", routes.run_state),
        ("/api/episodes", routes.episodes),
        ("/api/episode", routes.episode),
        ("/api/tokens", routes.tokens),
        ("/api/chart/{name}", routes.chart),
        ("/{name}", routes.file),
        ("/", routes.file),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False)
    app.middleware("http")(_with_headers)  # the outermost: what the other refuses has the headers too
    return app


class _Routes:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._files = RunFiles(run)
        self._index = EpisodeIndex(run / "trajectories.jsonl")
        self._static = _static_files()

    def file(self, name: str = "index.html") -> Response:
        """A file of the page."""
        if name not in self._static:
            raise HTTPException(404, "there is no such file")
        return Response(self._static[name], media_type=_TYPES[Path(name).suffix])

    def run_state(self) -> Response:
        """The run as a whole; `mark` changes when the list does."""
        index = self._index
        index.refresh(budget_s=INDEX_BUDGET_S)
        facets = {
            "phase": dict(index.phases),
            "outcome": dict(index.outcomes),
            "end_reason": {
                revealed(name): count for name, count in index.end_reasons.most_common(MAX_FACETS)
            },
        }
        return _json(
            {
                **self._files.state(),
                "episodes": len(index.rows),
                "unreadable": index.unreadable,
                "read_share": index.read_share,
                "mark": f"{index.generation}/{len(index.rows)}",
                "facets": facets,
            }
        )

    def episodes(self, asked: Annotated[ListQuery, Query()]) -> Response:
        """A page of the list."""
        self._index.refresh(budget_s=INDEX_BUDGET_S)
        chosen = asked.query().select(self._index.rows)
        rows, page, pages = page_of(chosen, asked.page, asked.size)
        solved = sum(row.outcome == "solved" for row in chosen)
        shown = [row_to_json(row) for row in rows]
        return _json({"rows": shown, "page": page, "pages": pages, "matching": len(chosen), "solved": solved})

    def episode(self, phase: Text, step: int, episode_id: Text) -> Response:
        """One episode."""
        for _ in range(2):  # a second time where the file was replaced after the row was found
            row = self._found(phase, step, episode_id)
            line = self._index.read(row)
            if line is not None:
                others = EpisodeQuery(task_id=row.task_id).select(self._index.rows)
                others = [other for other in others if other.key != row.key][:MAX_OTHERS]
                return _json(episode_to_json(row, line, others))
        raise HTTPException(404, "the episode can't be read")

    def tokens(self, phase: Text, step: int, episode_id: Text) -> Response:
        """The tokens of an episode."""
        return _json(tokens_to_json(self._run, self._found(phase, step, episode_id)))

    def chart(self, name: str) -> Response:
        """A curve."""
        number = re.fullmatch(r"(\d{1,3})\.svg", name)
        svg = self._files.chart(int(number[1])) if number else None
        if svg is None:
            raise HTTPException(404, "there is no such chart")
        return Response(svg, media_type=_TYPES[".svg"])

    def _found(self, phase: str, step: int, episode_id: str) -> EpisodeRow:
        self._index.refresh(budget_s=INDEX_BUDGET_S)
        row = self._index.find(phase, step, episode_id)
        while row is None and self._index.read_share < 1:
            self._index.refresh(budget_s=INDEX_BUDGET_S)
            row = self._index.find(phase, step, episode_id)
        if row is None:
            raise HTTPException(404, "there is no such episode in trajectories.jsonl")
        return row


def _static_files() -> dict[str, str]:
    folder = resources.files("agentenv.viewer").joinpath("static")
    files = {
        item.name: item.read_text("utf-8") for item in folder.iterdir() if Path(item.name).suffix in _TYPES
    }
    shared = resources.files("agentenv.report").joinpath("style.css").read_text("utf-8")
    return {**files, "style.css": PALETTE + shared}


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json({"error": str(error.detail)}, error.status_code)
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    return _json({"error": revealed(f"{'.'.join(map(str, found['loc']))}: {found['msg']}")}, 422)


async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers.update(_HEADERS)
    return response
