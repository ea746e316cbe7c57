"""Which iteration of a loop repeats, told from what lies between the steps of its optimisers."""

from __future__ import annotations

import random

import pytest

from steptime._capture.steady import LoopPart, SteadyLoop


def found(parts: str, *, waiting: int = 0, most: int = 60) -> tuple[int, int]:
    """How long the iteration of a loop is, and after how many parts it is known. A letter is what a part calls; upper-case
    letters are parts that end with the step of a second optimiser. `waiting`: parts in which an optimiser is yet to step."""
    loop, length, begun = SteadyLoop(), 0, 0
    for at, letter in enumerate((parts * most)[:most]):
        loop.parts.append(LoopPart(ord(letter.lower()), ord(letter.lower()), -ord(letter), int(letter.isupper())))
        if length and at - begun + 1 == length:
            if loop.settled(length):
                return length, at + 1
            length = 0
        if not length:
            length, begun = loop.length(waiting=at < waiting), at + 1
    return 0, most


@pytest.mark.parametrize(
    ("parts", "length", "after"),
    [
        ("a", 1, 2),  # the first that can be compared
        ("aA", 2, 6),  # a generator and a discriminator
        ("aaaaaA", 6, 18),  # a critic of five steps
        ("baaaaaaaaa", 1, 3),  # logging every ten steps, the first included
        ("ab", 1, 4),  # logging every other step
        ("abcdefghijklmnopqrstuvwxyz", 1, 10),  # it never repeats: taken without comparison at last
    ],
)
def test_an_iteration_is_what_repeats(parts: str, length: int, after: int) -> None:
    got = found(parts, waiting=5 if parts == "aaaaaA" else 0)
    assert got[0] == length
    assert got[1] <= after + length


def test_an_optimiser_that_never_steps_is_not_waited_for_for_ever() -> None:
    assert found("a", waiting=10**9)[0] == 1


def test_shapes_may_differ_and_it_is_said() -> None:
    loop = SteadyLoop()
    for number in range(6):
        loop.parts.append(LoopPart(number, 7, 9, 0))
    assert loop.settled(1)
    assert loop.difference(1) == "shapes"


@pytest.mark.parametrize("seed", range(200))
def test_every_loop_comes_to_an_end(seed: int) -> None:
    """Whatever a loop calls, and in whatever order optimisers step: an iteration holds each of them, and one is found."""
    draw = random.Random(seed)
    letters = "".join(draw.choice("abcABC") for _ in range(draw.randint(1, 9)))
    last_to_step = max(letters.index(next(filter(kind, letters), letters[0])) for kind in (str.isupper, str.islower))
    length, _ = found(letters, most=400, waiting=last_to_step)
    assert length >= len({each.isupper() for each in letters})
