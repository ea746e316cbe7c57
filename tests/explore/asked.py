"""An ASGI application asked without a network: requests as a server would hand them on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from steptime._api.read import read
from steptime._explore.subject import Subject

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
TOKEN, PORT = "a-token-of-this-test", 8321
HERE = f"127.0.0.1:{PORT}"


def subject_of(name: str, platform: str | None = None) -> Subject:
    """A config that ships, to explore."""
    file = str(CONFIGS / name)
    return Subject(read([file]), (file,), platform)


@dataclass(frozen=True)
class Response:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """As JSON."""
        return json.loads(self.body)


async def request(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    query: bytes = b"",
) -> Response:
    """One request with the token and from here, unless the headers say otherwise; a header that is empty is left out."""
    sent = {"host": HERE, "x-steptime-token": TOKEN, "content-type": "application/json", **(headers or {})}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": query, "headers": raw, "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", PORT),
    }  # fmt: skip
    parts, found = [body[:100], body[100:]], list[Message]()

    async def receive() -> Message:
        return (
            {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)} if parts else {"type": "http.disconnect"}
        )

    async def send(message: Message) -> None:
        found.append(message)

    await app(scope, receive, send)
    fields = {name.decode(): value.decode("latin-1") for name, value in found[0]["headers"]}
    return Response(found[0]["status"], fields, b"".join(message.get("body", b"") for message in found[1:]))


async def asked(app: ASGIApp, values: Mapping[str, Any], **more: str) -> Response:
    """A question of a page."""
    question = {"page": "test", "values": values, **more}
    return await request(app, "POST", "/api/ask", body=json.dumps(question).encode())


@asynccontextmanager
async def running(app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """An application between its start and its end."""
    inbox, outbox = asyncio.Queue[Message](), asyncio.Queue[Message]()

    async def live() -> None:
        await app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put)

    life = asyncio.create_task(live())
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        await outbox.get()
        await life
