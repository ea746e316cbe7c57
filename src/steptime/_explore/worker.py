"""A process that predicts: it is told the subject once, then questions one after the other, and ends with its parent.

Messages are pickles, from the process that started it and nobody else: four bytes of length, then so many. Answers are bytes in
the same frame.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from typing import BinaryIO

from steptime._explore.answer import PREDICT, answered
from steptime._explore.subject import Subject
from steptime._processes import end_with_parent

FRAME = struct.Struct("!I")


def framed(content: bytes) -> bytes:
    """With its length before it."""
    return FRAME.pack(len(content)) + content


def main() -> None:
    """Answers until nobody asks any more."""
    end_with_parent(os.getppid())
    # What a prediction prints must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    questions = sys.stdin.buffer
    given = _read(questions)
    if given is None:
        return
    subject: Subject = pickle.loads(given)  # noqa: S301 (written by the parent, over a pipe that nobody else has)
    answered(subject, PREDICT, {})  # loads what predictions need
    while (question := _read(questions)) is not None:
        form, values = pickle.loads(question)  # noqa: S301 (as above)
        answers.write(framed(answered(subject, form, values)))
        answers.flush()


def _read(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (length,) = FRAME.unpack(head)
    content = pipe.read(length)
    return content if len(content) == length else None
