"""Who may ask: the person who started the server, through the address that it printed, and nobody else on or off the machine.

A page of another site can make a browser send requests to 127.0.0.1, also under a name of its own that resolves to it. So the
Host and the Origin have to be this server's, and every question carries the token in a header: a cookie would go to every port
of the machine. The files of the page are the same for everybody and need none. Only JSON that was posted asks for anything,
bodies are short, and headers forbid pages to load what is not from here.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_AT_MOST = 1 << 16
"""Bytes of a question; all controls together take a few thousand."""

TOKEN_HEADER = "x-steptime-token"  # noqa: S105 (the name of a header)
TOKEN_PATH = "/api/token"  # noqa: S105 (the path at which a page gets the token for what its address had)
_METHODS = ("GET", "HEAD", "POST")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
_WHERE_TO = "open the address that `steptime explore` printed; it has the token in it"

_Call = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Guard:
    """Lets through what may be asked, and says in one line why not.

    `tickets` stand for the token once each: a browser that is started gets one, because all users of a machine see with which
    arguments programs were started.
    """

    app: ASGIApp
    token: str
    port: int
    tickets: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        answer = self._refused(scope, headers) or self._token_for(scope, headers)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        body = b"" if scope["method"] != "POST" else await _read(headers, receive)
        if body is None:
            text = {"error": f"the question is longer than {BODY_AT_MOST:,} bytes"}
            await JSONResponse(text, 413)(scope, receive, _with_headers(send))
            return
        await self.app(scope, _given(body), _with_headers(send))

    def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        """Why a request is not answered; None where it is."""
        here = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        if scope["method"] not in _METHODS:
            return JSONResponse({"error": "expected GET or POST"}, 405)
        if headers.getlist("host") != [headers.get("host")] or headers["host"] not in here:
            return PlainTextResponse(f"this server answers as 127.0.0.1:{self.port} alone\n", 403)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin not in {f"http://{each}" for each in here}:
            return PlainTextResponse("questions of other sites are not answered\n", 403)
        if site is not None and site not in ("same-origin", "none") and scope["method"] == "POST":
            return PlainTextResponse("questions of other sites are not answered\n", 403)
        if scope["path"].startswith("/api/") and scope["path"] != TOKEN_PATH and not self._knows(headers):
            return PlainTextResponse(f"{_WHERE_TO}\n", 401)
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "expected JSON (content-type: application/json)"}, 415)
        return None

    def _token_for(self, scope: Scope, headers: Headers) -> Response | None:
        """Give the token for itself or, once, for a ticket; None where a request is for something else."""
        if scope["path"] != TOKEN_PATH:
            return None
        shown = headers.get(TOKEN_HEADER, "")
        if not self._knows(headers) and shown not in self.tickets:
            return PlainTextResponse(f"{_WHERE_TO}\n", 401)
        self.tickets.discard(shown)
        return JSONResponse({"token": self.token})

    def _knows(self, headers: Headers) -> bool:
        """Whether a request has the token; comparing takes the same time whatever is wrong."""
        return secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self.token.encode())


async def _read(headers: Headers, receive: Receive) -> bytes | None:
    """A body; None where it is too long, whatever its header says."""
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 9 or int(length) > BODY_AT_MOST):
        return None
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return body
        part: bytes = message.get("body", b"")
        body += part
        if len(body) > BODY_AT_MOST:
            return None
        if not message.get("more_body"):
            return body


def _given(body: bytes) -> Receive:
    """A body that was read already."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", ())}
            more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *(pair for pair in more if pair[0] not in own)]
        await send(message)

    return sent
