"""`serve`: the server on a port of this machine, until it is interrupted."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import webbrowser
from collections.abc import Callable
from dataclasses import replace

import uvicorn

from steptime._explore.answer import PREDICT, answered
from steptime._explore.server import application
from steptime._explore.subject import Subject
from steptime.errors import InputError

ADDRESS = "127.0.0.1"
PORT = 8321
"""Where it looks for a free port first; no service is registered for it."""

_TRIED = 64
_TOKEN = "STEPTIME_EXPLORE_TOKEN"  # noqa: S105 (the name of a variable)
_LEAST_TOKEN = 16


def serve(subject: Subject, *, port: int = PORT, browser: bool = True, say: Callable[[str], None] = print) -> None:
    """Serves until interrupted; `say` is told the address."""
    subject.predicted({}, helps=False)  # what cannot be predicted at all is said here, not in a page
    first = answered(subject, PREDICT, {})
    listening = listen(port)
    taken: int = listening.getsockname()[1]
    token, ticket = token_of(), secrets.token_urlsafe(24)
    tickets = [ticket] if browser else []
    config = uvicorn.Config(
        application(sendable(subject), token, taken, first, tickets), log_level="critical", access_log=False, lifespan="on",
        ws="none", server_header=False, date_header=False, proxy_headers=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    address = f"http://{ADDRESS}:{taken}/?token={token}"
    say(f"{address}\nCtrl-C ends it")
    if browser:
        webbrowser.open(f"http://{ADDRESS}:{taken}/?token={ticket}")
    uvicorn.Server(config).run(sockets=[listening])


def listen(port: int) -> socket.socket:
    """A socket on this port or on the next one that is free."""
    for candidate in range(port, min(port + _TRIED, 65536)):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, candidate))
            listening.listen(128)
        except OSError:
            listening.close()
            continue
        return listening
    raise InputError(f"--port {port}: no port from {port} to {min(port + _TRIED, 65536) - 1} is free; give another")


def token_of() -> str:
    """A new token; or the user's own, with which pages that are open find the server again after it was restarted."""
    own = os.environ.get(_TOKEN, "")
    if not own:
        return secrets.token_urlsafe(24)
    if len(own) < _LEAST_TOKEN or not own.isascii() or not all(c.isalnum() or c in "-_" for c in own):
        raise InputError(f"{_TOKEN}: expected at least {_LEAST_TOKEN} letters, digits, '-' or '_'")
    return own


def sendable(subject: Subject) -> Subject:
    """The subject as other processes can have it: a function made on the spot cannot be captured again there."""
    try:
        pickle.dumps(subject)
    except (pickle.PicklingError, AttributeError, TypeError):
        return replace(subject, workload=replace(subject.workload, rebuild=None))
    return subject
