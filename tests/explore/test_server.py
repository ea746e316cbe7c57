"""The server of `steptime explore`: who may ask, what is answered, and that nothing sent to it breaks it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.explore.asked import HERE, TOKEN, asked, request, running, subject_of

from steptime._explore.server import application
from steptime._explore.workers import Workers

SMALL, PLATFORM = "dlrm_small.toml", "2xh200-half-loopback"
# Not started: nothing here predicts.
APP = application(subject_of(SMALL), TOKEN, 8321)


def status(*arguments: Any, **more: Any) -> int:
    return asyncio.run(request(APP, *arguments, **more)).status


def test_only_who_knows_the_token_is_answered() -> None:
    assert status("GET", "/api/controls") == 200
    for wrong in ({"x-steptime-token": ""}, {"x-steptime-token": TOKEN[:-1]}, {"x-steptime-token": TOKEN + "x"}):
        assert status("GET", "/api/controls", headers=wrong) == 401
        assert status("POST", "/api/ask", headers=wrong, body=b"{}") == 401
        assert status("GET", "/api/alive", headers=wrong) == 401
        assert status("GET", "/api/token", headers=wrong) == 401


def test_the_token_goes_in_a_header_alone() -> None:
    bare = {"x-steptime-token": ""}
    page = asyncio.run(request(APP, "GET", "/", headers=bare, query=f"token={TOKEN}".encode()))
    assert page.status == 200 and TOKEN.encode() not in page.body
    assert "set-cookie" not in page.headers  # it would go to every port of this machine
    assert status("GET", "/api/controls", headers=bare, query=f"token={TOKEN}".encode()) == 401
    assert status("GET", "/api/controls", headers={**bare, "cookie": f"steptime-8321={TOKEN}"}) == 401


def test_a_ticket_gives_the_token_once() -> None:
    app, ticket = application(subject_of(SMALL), TOKEN, 8321, tickets=["a-ticket"]), {"x-steptime-token": "a-ticket"}
    assert asyncio.run(request(app, "GET", "/api/controls", headers=ticket)).status == 401
    given = asyncio.run(request(app, "GET", "/api/token", headers=ticket))
    assert json.loads(given.body) == {"token": TOKEN}
    assert asyncio.run(request(app, "GET", "/api/token", headers=ticket)).status == 401


def test_other_hosts_and_origins_are_refused() -> None:
    for host in ("", "evil.example", "127.0.0.1", "127.0.0.1:80", "[::1]:8321", "127.0.0.1.evil.example:8321"):
        assert status("GET", "/api/controls", headers={"host": host}) == 403
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:8321"):
        assert status("POST", "/api/ask", headers={"origin": origin}, body=b"{}") == 403
    assert status("POST", "/api/ask", headers={"sec-fetch-site": "cross-site"}, body=b"{}") == 403
    assert status("GET", "/api/controls", headers={"origin": f"http://{HERE}"}) == 200


def test_pages_load_nothing_from_outside() -> None:
    for path in ("/", "/page/explore.js", "/api/controls", "/nowhere"):
        headers = asyncio.run(request(APP, "GET", path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


def test_no_request_names_a_file_of_the_machine() -> None:
    for path in (
        "/page/../subject.py",
        "/page/%2e%2e/subject.py",
        "/page//etc/passwd",
        "/page/subject.py",
        "/etc/passwd",
        "//",
    ):
        assert status("GET", path) == 404
    for name in ("plan", "calibration", "arguments", "workload", "__class__", "set.plan", "set.tables", "set.name"):
        answer = json.dumps({"page": "p", "values": {name: "/etc/passwd"}}).encode()
        assert status("POST", "/api/ask", body=answer[:0]) == 400
    with pytest.raises(Exception, match="no control"):
        subject_of(SMALL).checked({"set.plan": "/etc/passwd"})
    with pytest.raises(Exception, match="expected"):
        subject_of(SMALL).checked({"platform": "/etc/passwd.toml"})
    with pytest.raises(Exception, match="expected"):
        subject_of(SMALL).checked({"fabric": "/etc/passwd.toml"})


def test_a_long_body_is_refused_whatever_its_header_says() -> None:
    assert status("POST", "/api/ask", headers={"content-length": "99999999"}, body=b"{}") == 413
    assert status("POST", "/api/ask", body=b" " * (1 << 17)) == 413
    assert status("POST", "/api/ask", headers={"content-type": "text/plain"}, body=b"{}") == 415


async def _answers(folder: Path) -> None:
    async with running(application(subject_of(SMALL, PLATFORM), TOKEN, 8321)) as app:
        first = await asked(app, {})
        assert first.status == 200
        document = first.json
        assert document["answer"]["step_time_ms"] > 0 and document["timeline"]["ranks"] and document["sections"]["summary"]
        assert document["command"].startswith("steptime predict ") and "--platform" in document["command"]
        # Wrong values are answered with the control's name, and the next question is answered as before.
        for values, control in (
            ({"batch": 0}, "batch"), ({"batch": 1.5}, "batch"), ({"platform": "9xnothing"}, "platform"),
            ({"what_if": "x"}, "what_if"),
            ({"set.precision": "fp7"}, "set.precision"), ({"nothing": 1}, "nothing"), ({"set.fused": 1}, "set.fused"),
        ):  # fmt: skip
            wrong = await asked(app, values)
            assert wrong.status == 422 and wrong.json["control"] == control and "\n" not in wrong.json["error"], values
        unknown = await asked(app, {"what_if": ["nothing at all * 2"]})
        assert unknown.status == 422 and "nothing at all" in unknown.json["error"]
        assert (await asked(app, {})).body == first.body
        # Side by side: what `steptime compare` says, as a part of the page and as one of its own.
        several = {"page": "test", "values": {}, "variants": [{}, {"host_factor": 2}], "form": "compare"}
        side = await request(app, "POST", "/api/ask", body=json.dumps(several).encode())
        assert side.status == 200 and "against the first" in side.json["sections"] and len(side.json["names"]) == 2
        whole = await request(app, "POST", "/api/ask", body=json.dumps({**several, "form": "comparison"}).encode())
        assert whole.headers["content-type"].startswith("text/html") and b"<!doctype html>" in whole.body
        few: list[list[dict[str, int]]] = [[], [{}], [{}] * 13, [{}, {"nothing": 1}]]
        for variants in few:
            wrong = await request(app, "POST", "/api/ask", body=json.dumps({**several, "variants": variants}).encode())
            assert wrong.status == 422 and wrong.json["error"]
        # Changes that would help are changes that the control takes.
        helps = (await asked(app, {"host_factor": 2}, form="suggest")).json["changes"]
        assert helps and all(each["speedup"] > 1 for each in helps)
        assert (await asked(app, {"what_if": [helps[0]["change"]]})).status == 200
        # Files: the same answer as JSON, and a page.
        answer = await asked(app, {}, form="json")
        assert answer.json == document["answer"]
        page = await asked(app, {}, form="html")
        assert page.headers["content-type"].startswith("text/html") and b"<!doctype html>" in page.body
        toml = await asked(app, {"batch": 2 * document["answer"]["batch"]}, form="toml")
        file = folder / "variant.toml"
        file.write_bytes(toml.body)
        moved = await asked(app, {"batch": 2 * document["answer"]["batch"]})
        from steptime import predict

        again = predict(str(file), document["answer"]["platform"])
        assert again.step_time_ms == pytest.approx(moved.json["answer"]["step_time_ms"], rel=1e-9)


def test_a_variant_is_answered_and_exported_and_a_wrong_one_named(tmp_path: Path) -> None:
    asyncio.run(_answers(tmp_path))


async def _newest() -> list[str]:
    workers = Workers(subject_of("gpt2.toml", "1xh200"))
    await workers.start()
    try:
        questions = [asyncio.create_task(workers.ask("tab", "predict", {"batch": 8 * n})) for n in range(1, 7)]
        other = asyncio.create_task(workers.ask("another tab", "predict", {"batch": 16}))
        results = await asyncio.gather(*questions, other, return_exceptions=True)
    finally:
        await workers.end()
    assert all(process.started.returncode is not None for process in workers._processes)
    return [type(result).__name__ for result in results]


def test_of_the_questions_of_one_page_the_newest_counts_and_tabs_do_not_disturb_each_other() -> None:
    *older, newest, other = asyncio.run(_newest())
    assert set(older) == {"SupersededError"} and (newest, other) == ("bytes", "bytes")


PATHS = (
    "/",
    "/api/ask",
    "/api/controls",
    "/api/alive",
    "/page/x",
    "/page/../x",
    "/api/ask/",
    "/\x00",
    "/é",
    "/a" * 900,
    "//",
    "/api",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get", "X" * 40)


def _body(draw: random.Random) -> bytes:
    values: Any = draw.choice(
        [{}, [], None, {"batch": draw.choice([0, -1, 1e308, 10**30, "8", None, [], {}, True])}, {"x": [[[]]]}, {"\ud800": 1}]
    )
    question = {
        "page": draw.choice(["p", "", 3, "p" * 99]),
        "values": values,
        "form": draw.choice(["predict", "exe", "html", 1]),
    }
    text = json.dumps({key: value for key, value in question.items() if draw.random() < 0.8}).encode()
    damaged = bytearray(text)
    for _ in range(draw.randrange(1, 4)):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    extremes = (b"", b"[" * 60_000, b'{"page":' * 3000, b"\xff" * 50, b"NaN", b"1" * 50_000, b"x" * 70_000)
    return draw.choice((bytes(damaged), bytes(damaged), draw.choice(extremes)))


def _headers(draw: random.Random) -> dict[str, str]:
    odd = {
        "host": ["", "evil", HERE + "0", "127.0.0.1:8321, evil"],
        "origin": ["null", "http://evil", "file://"],
        "x-steptime-token": ["", "x", TOKEN * 2, "\xe9"],
        "cookie": ["steptime-8321=x", "=;=;", "a" * 5000, 'steptime-8321="\\'],
        "content-type": ["", "text/html", "application/x-www-form-urlencoded"],
        "content-length": ["-1", "9" * 30, "x", "\xb2"],
        "transfer-encoding": ["chunked", "gzip"],
    }
    return {name: draw.choice(values) for name, values in odd.items() if draw.random() < 0.25}


async def _fuzzed(count: int) -> None:
    draw = random.Random(21)
    for number in range(count):
        method = draw.choice(METHODS if number % 2 else ("POST",))
        path = draw.choice(PATHS if number % 2 else ("/api/ask",))
        query = draw.choice((b"", b"token=", b"token=%ff", b"\xff", b"&" * 500, b"a=" * 200))
        headers, body = _headers(draw), _body(draw)
        answer = await request(APP, method, path, headers=headers, body=body, query=query)
        fine = answer.status == 200 and method in ("GET", "HEAD")
        assert fine or 400 <= answer.status < 500, (method, path, headers, body, query, answer)
        assert b"Traceback" not in answer.body and b'File "' not in answer.body
    assert (await request(APP, "GET", "/api/alive")).status == 200


@pytest.mark.slow
def test_a_question_is_answered_though_its_idle_process_has_died() -> None:
    async def answer() -> bytes:
        workers = Workers(subject_of(SMALL))
        await workers.start()
        try:
            for process in workers._processes:
                process.kill()
            return await workers.ask("a page", "predict", {})
        finally:
            await workers.end()

    assert b"step_time_ms" in asyncio.run(answer())


def test_whatever_is_sent_is_refused_in_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any) -> bytes:
        return b'{"error": "not predicted here"}'

    monkeypatch.setattr(Workers, "ask", nobody)
    asyncio.run(_fuzzed(600))
