"""The server on a port, as `steptime explore` runs it: what is no HTTP, too much of it, and a port that is taken."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from tests.explore.asked import TOKEN, subject_of

from steptime._explore.serve import ADDRESS, listen, token_of
from steptime._explore.server import application
from steptime.errors import InputError

SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listening = listen(8900)
    number = int(listening.getsockname()[1])
    app = application(subject_of("dlrm_small.toml", "2xh200-nvlink"), TOKEN, number)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield number
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()


def answered(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=60)
    try:
        connection.request(method, path, body, {"x-steptime-token": TOKEN, "content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_what_is_no_http_ends_in_a_refusal_and_nothing_else(port: int) -> None:
    draw = random.Random(21)
    heads = (b"GET / HTTP/1.1\r\n", b"POST /api/ask HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n", b"\x16\x03\x01\x02", b"")
    for _ in range(120):
        sent = draw.choice(heads) + draw.randbytes(draw.randrange(1, 400)) + draw.choice((b"\r\n\r\n", b"", b"\n\n"))
        with socket.create_connection((ADDRESS, port), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            try:
                came = connection.recv(65536)
            except ConnectionResetError:
                came = b""
        assert not came or came.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (sent, came)
        assert b"Traceback" not in came
    assert answered(port, "GET", "/api/alive")[0] == 200


def test_many_connections_that_say_nothing_do_not_keep_others_from_being_answered(port: int) -> None:
    silent = [socket.create_connection((ADDRESS, port), timeout=10) for _ in range(100)]
    try:
        began = time.monotonic()
        assert answered(port, "GET", "/api/alive")[0] == 200
        assert time.monotonic() - began < 10
    finally:
        for each in silent:
            each.close()


def test_a_question_over_the_wire_is_answered(port: int) -> None:
    status, body = answered(port, "POST", "/api/ask", json.dumps({"page": "p", "values": {}}).encode())
    assert status == 200 and json.loads(body)["answer"]["step_time_ms"] > 0
    assert answered(port, "POST", "/api/ask", b" " * 100_000)[0] == 413
    near = {"page": "p", "values": {}, "about": "batch", "near": [1024, 0, None, "x"]}
    assert answered(port, "POST", "/api/near", json.dumps(near).encode())[0] == 202
    assert answered(port, "POST", "/api/near", json.dumps({**near, "near": [{}]}).encode())[0] == 400


def test_a_taken_port_gives_the_next_one() -> None:
    first = listen(9100)
    second = listen(first.getsockname()[1])
    try:
        assert second.getsockname() == (ADDRESS, first.getsockname()[1] + 1)
    finally:
        first.close()
        second.close()
    with pytest.raises(InputError, match="65535"):
        listen(65536)


def test_no_other_command_loads_the_server() -> None:
    code = "import sys, steptime, steptime._cli.app; print(sorted({'starlette', 'uvicorn', 'anyio'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": SRC}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == "[]"


def test_a_token_is_random_or_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPTIME_EXPLORE_TOKEN", raising=False)
    assert token_of() != token_of() and len(token_of()) >= 32
    monkeypatch.setenv("STEPTIME_EXPLORE_TOKEN", "short")
    with pytest.raises(InputError, match="16"):
        token_of()
    monkeypatch.setenv("STEPTIME_EXPLORE_TOKEN", "long-enough-for-anybody")
    assert token_of() == "long-enough-for-anybody"
