"""`Workers`: processes that predict, the newest question of every page first.

A page that moves a slider asks faster than anybody can answer. Of the questions of one page only the newest counts: an older
one that waits is dropped, and one that is being answered is left to finish if it is soon done, and its process replaced if not.
While nobody waits, one process predicts what a page may ask next: the neighbours of a slider's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from steptime._explore.answer import HELPS, PREDICT
from steptime._explore.subject import Subject
from steptime._explore.worker import FRAME, framed

PROCESSES = 2
"""One answers while the other still has a question that does not count any more."""

_PATIENCE_S = 1.0  # for an answer nobody waits for; starting a process anew takes about as long
_MOST_WAITING = 32
_REMEMBERED = 48
_START = "from steptime._explore.worker import main; main()"


class SupersededError(Exception):
    """The page has asked something newer."""


class BusyError(Exception):
    """More questions wait than anybody would wait for."""


class EndedError(Exception):
    """The process that answered has ended."""


@dataclass(eq=False)
class _Question:
    page: str
    form: str
    values: dict[str, Any]
    answer: asyncio.Future[bytes]
    begun: float | None = None
    ahead: bool = False  # nobody has asked it yet
    again: bool = False  # its process ended, perhaps before it read the question

    @property
    def kind(self) -> tuple[str, bool]:
        """Questions of which the newest counts; files that are asked for are made beside."""
        return self.page, self.form in (PREDICT, HELPS) and not self.ahead

    @property
    def key(self) -> str:
        """The same for the same question, whoever asks it."""
        return _key(self.form, self.values)


@dataclass(eq=False)
class _Process:
    """One process, and what it is busy with."""

    started: asyncio.subprocess.Process
    question: _Question | None = None

    async def ask(self, question: _Question) -> bytes:
        assert self.started.stdin is not None and self.started.stdout is not None
        try:
            self.started.stdin.write(framed(pickle.dumps((question.form, question.values))))
            await self.started.stdin.drain()
            (length,) = FRAME.unpack(await self.started.stdout.readexactly(FRAME.size))
            return await self.started.stdout.readexactly(length)
        except (OSError, EOFError) as error:
            raise EndedError from error

    def kill(self) -> None:
        """With all that it started: a training script runs in a process of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.started.pid, signal.SIGKILL)

    async def end(self) -> None:
        self.kill()
        await self.started.wait()


@dataclass
class Workers:
    """Questions in, answers out; to be started and ended. `first` is the answer about the variant to begin with."""

    subject: Subject
    first: bytes | None = None
    _processes: list[_Process] = field(default_factory=list)
    _waiting: list[_Question] = field(default_factory=list)
    _near: OrderedDict[str, list[dict[str, Any]]] = field(default_factory=OrderedDict)  # page -> what it may ask next
    _known: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: bool = False

    async def start(self) -> None:
        """Starts the processes; each gets ready by predicting the variant to begin with."""
        if self.first is not None:
            self._known[_key(PREDICT, {})] = self.first
        for _ in range(PROCESSES):
            self._processes.append(await self._started())

    async def end(self) -> None:
        """Ends all of them; questions without an answer are told so."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        for question in self._waiting:
            _settle(question, EndedError())
        for process in self._processes:
            if process.question is not None:
                _settle(process.question, EndedError())
            await process.end()

    async def ask(self, page: str, form: str, values: dict[str, Any]) -> bytes:
        """The answer; `SupersededError` where the page asks something newer meanwhile."""
        key = _key(form, values)
        if form == PREDICT:
            self._supersede(page)
            self._near.pop(page, None)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        ahead = next((each.question for each in self._processes if each.question and each.question.key == key), None)
        if ahead is not None and ahead.ahead and not ahead.answer.done():
            ahead.page, ahead.ahead = page, False  # from here on it is this page's question
            return await ahead.answer
        if len(self._waiting) >= _MOST_WAITING:
            raise BusyError
        question = _Question(page, form, values, asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        self._assign()
        return await question.answer

    def expect(self, page: str, variants: list[dict[str, Any]]) -> None:
        """What a page may ask next, the likeliest first; predicted while nobody asks."""
        self._near[page] = variants
        self._near.move_to_end(page)
        while len(self._near) > _MOST_WAITING:
            self._near.popitem(last=False)
        self._assign()

    def _supersede(self, page: str) -> None:
        """Drops what the page asked before."""
        old = (page, True)
        for question in [each for each in self._waiting if each.kind == old]:
            self._waiting.remove(question)
            _settle(question, SupersededError())
        for process in self._processes:
            running = process.question
            if running is None or running.kind != old:
                continue
            _settle(running, SupersededError())
            if running.begun is not None and time.monotonic() - running.begun > _PATIENCE_S:
                process.kill()

    def _assign(self) -> None:
        for process in self._processes:
            if process.question is not None:
                continue
            question = self._waiting.pop(0) if self._waiting else self._ahead()
            if question is None:
                return
            process.question = question
            task = asyncio.create_task(self._serve(process, question))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ahead(self) -> _Question | None:
        """What to predict while nobody asks: only if another process stays free for whoever does."""
        if sum(each.question is None for each in self._processes) < 2:
            return None
        for page, variants in self._near.items():
            while variants:
                values = variants.pop(0)
                if _key(PREDICT, values) not in self._known:
                    return _Question(page, PREDICT, values, asyncio.get_running_loop().create_future(), ahead=True)
        return None

    async def _serve(self, process: _Process, question: _Question) -> None:
        question.begun = time.monotonic()
        late = asyncio.get_running_loop().call_later(_PATIENCE_S, _abandon, process, question)
        try:
            answer = await process.ask(question)
            self._known[question.key] = answer
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            if not question.answer.done():
                question.answer.set_result(answer)
        except EndedError as error:
            if question.again or question.ahead or question.answer.done() or self._ended:
                _settle(question, error)
            else:
                question.again = True
                self._waiting.insert(0, question)
            await process.end()
            if not self._ended:
                process.started = (await self._started()).started
        finally:
            late.cancel()
        process.question = None
        self._assign()

    async def _started(self) -> _Process:
        # Its own session: an interrupt at the terminal is for the server, which ends its processes.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _START, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, env=environment,
        )  # fmt: skip
        assert started.stdin is not None
        started.stdin.write(framed(pickle.dumps(self.subject)))
        return _Process(started)


def _key(form: str, values: dict[str, Any]) -> str:
    return json.dumps([form, values], sort_keys=True)


def _abandon(process: _Process, question: _Question) -> None:
    """Ends a process whose answer has taken long and nobody waits for."""
    if process.question is question and question.answer.done():
        process.kill()


def _settle(question: _Question, error: Exception) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
        question.answer.exception()  # whoever asked may have gone
