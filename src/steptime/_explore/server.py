"""The server: the page, the controls, and answers about variants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from steptime import __version__
from steptime._explore.answer import COMPARE, COMPARISON, EXPORTS, HELPS, PREDICT, SUGGEST
from steptime._explore.files import without_config
from steptime._explore.guard import Guard
from steptime._explore.subject import Subject
from steptime._explore.workers import BusyError, EndedError, SupersededError, Workers
from steptime._report.html.markup import page_part

# The page's own timeline: reading, drawing and pointing at it; only what surrounds it is another one.
_TIMELINE = ("data.js", "view.js", "colours.js", "draw.js", "search.js", "details.js")
_LONGEST_PAGE, _MOST_NEAR = 64, 4
_FORMS = (PREDICT, COMPARE, SUGGEST, HELPS, *EXPORTS)
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


class _Ask(msgspec.Struct, forbid_unknown_fields=True):
    """What a page asks: who it is, the values of its controls and, of a file, which."""

    page: str
    values: dict[str, bool | int | float | str | list[str] | None]
    form: str = PREDICT
    variants: list[dict[str, bool | int | float | str | list[str] | None]] = []


class _Near(msgspec.Struct, forbid_unknown_fields=True):
    """What a page may ask next: its values, with other ones of one control."""

    page: str
    values: dict[str, bool | int | float | str | list[str] | None]
    about: str
    near: list[bool | int | float | str | None]


def application(subject: Subject, token: str, port: int, first: bytes | None = None, tickets: Collection[str] = ()) -> ASGIApp:
    """The server of a subject, which answers who knows the token, or once a ticket.

    `first` is its answer about the variant to begin with.
    """
    workers, files = Workers(subject, first), _files()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await workers.start()
        try:
            yield
        finally:
            await workers.end()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    async def controls(_: Request) -> Response:
        found = [control.to_dict() for control in subject.controls.values()]
        name = subject.workload.name or "workload"
        why = without_config(subject)
        return JSONResponse({"name": name, "version": __version__, "controls": found, "without_config": why})

    async def alive(_: Request) -> Response:
        return JSONResponse({"alive": True})

    async def ask(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Ask)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return JSONResponse({"error": f"no question: {error}", "control": None}, 400)
        if len(asked.page) > _LONGEST_PAGE or asked.form not in _FORMS:
            return JSONResponse({"error": f"form is one of {', '.join(_FORMS)}", "control": None}, 400)
        return await _answer(workers, asked)

    async def near(request: Request) -> Response:
        try:
            told = msgspec.json.decode(await request.body(), type=_Near)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return JSONResponse({"error": f"no values: {error}", "control": None}, 400)
        costly = subject.config is None and told.about in ("batch", "ranks")  # a script or function would run again
        if len(told.page) <= _LONGEST_PAGE and len(told.near) <= _MOST_NEAR and not costly:
            workers.expect(told.page, [{**told.values, told.about: value} for value in told.near])
        return JSONResponse({}, 202)

    routes = [
        Route("/", file, methods=["GET"]),
        Route("/page/{name}", file, methods=["GET"]),
        Route("/api/controls", controls, methods=["GET"]),
        Route("/api/alive", alive, methods=["GET"]),
        Route("/api/ask", ask, methods=["POST"]),
        Route("/api/near", near, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port, set(tickets))


async def _answer(workers: Workers, asked: _Ask) -> Response:
    try:
        several = asked.form in (COMPARE, COMPARISON)
        answer = await workers.ask(asked.page, asked.form, {"variants": asked.variants} if several else asked.values)
    except SupersededError:
        return JSONResponse({"superseded": True}, 409)
    except BusyError:
        return JSONResponse({"error": "too many questions wait for an answer; try again", "control": None}, 429)
    except EndedError:
        return JSONResponse(
            {"error": "the process that predicts has ended; change something to ask again", "control": None}, 422
        )
    wrong = answer.startswith(b'{"error":')
    kind = "application/json" if wrong else EXPORTS.get(asked.form, "application/json")
    return Response(answer, 422 if wrong else 200, media_type=kind)


def _files() -> dict[str, str]:
    """What the page consists of, by name."""
    folder = resources.files("steptime._explore").joinpath("page")
    own = {each.name: each.read_text(encoding="utf-8") for each in folder.iterdir() if each.name.endswith(tuple(_TYPES))}
    timeline = "\n".join([page_part(name) for name in _TIMELINE] + [own.pop("stage.js"), page_part("pointer.js")])
    return {**own, "style.css": page_part("style.css"), "timeline.js": timeline}
