"""Streams, events and synchronisations of a script: who waits for what, in the captured step and in its prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from steptime import Workload, capture, predict, read  # noqa: E402
from steptime._program.program import CallKind, StreamOrder  # noqa: E402

LAUNCH, WAIT, EVENT, DEVICE = (
    int(kind) for kind in (CallKind.LAUNCH, CallKind.STREAM_WAIT, CallKind.EVENT_SYNC, CallKind.DEVICE_SYNC)
)
Said = Callable[[Any, Any], None]


def captured(before: Said | None = None, after: Said | None = None, width: int = 2048) -> Workload:
    """A perceptron's step; `before` and `after` it, what is said with a stream of its own and a large matrix."""

    def make() -> Callable[[], None]:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to("cuda")
        x = torch.randn(width, width, device="cuda")
        side, large = torch.cuda.Stream(), torch.randn(width, width, device="cuda")

        def step() -> None:
            model.zero_grad()
            if before is not None:
                before(side, large)
            model(x).sum().backward()
            if after is not None:
                after(side, large)

        return step

    return capture(make)


def time_ms(workload: Workload) -> float:
    return float(predict(workload, platform="1xh200").step_time_ms)


def orders(workload: Workload) -> list[tuple[int, ...]]:
    """Without where they stand."""
    return [(order.kind, order.stream, order.of) for order in workload.programs[0].orders]


def last(workload: Workload) -> StreamOrder:
    return workload.programs[0].orders[-1]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (lambda *_: torch.cuda.synchronize(), DEVICE),
        (lambda *_: torch.cuda.current_stream().synchronize(), EVENT),
        (lambda *_: torch.cuda.current_stream().record_event().synchronize(), EVENT),
    ],
)
def test_a_host_that_waits_for_the_device_does_not_run_ahead(said: Said, kind: int) -> None:
    plain, waiting = captured(), captured(after=said)
    assert plain.programs[0].orders == ()
    assert last(waiting).kind == kind
    assert last(waiting).op == len(waiting.programs[0].ops)
    assert time_ms(waiting) > time_ms(plain)


def test_to_wait_where_a_step_begins_is_to_wait_where_it_ends() -> None:
    begun, ended = (captured(**{place: lambda *_: torch.cuda.synchronize()}) for place in ("before", "after"))  # type: ignore[arg-type]
    assert time_ms(begun) == pytest.approx(time_ms(ended), rel=1e-3)


def beside(side: Any, large: Any) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        large @ large


def test_kernels_of_two_streams_take_turns() -> None:
    in_order = captured(before=lambda _, large: large @ large)
    both = captured(before=beside, after=lambda side, _: torch.cuda.current_stream().wait_stream(side))
    assert orders(both) == [(WAIT, 1, 0), (LAUNCH, 1, -1), (LAUNCH, 0, -1), (WAIT, 0, 1)]
    assert time_ms(both) == pytest.approx(time_ms(in_order), rel=0.02)
    assert time_ms(both) > 1.05 * time_ms(captured())


def test_a_copy_on_another_stream_runs_beside_kernels() -> None:
    host = torch.zeros(2048, 2048)

    def copied(side: Any, _: Any) -> None:
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.stream(side):
            host.to("cuda", non_blocking=True)

    plain, in_order, ahead = captured(), captured(before=lambda *_: host.to("cuda", non_blocking=True)), captured(before=copied)
    assert time_ms(in_order) - time_ms(plain) > 3 * (time_ms(ahead) - time_ms(plain))


def test_an_event_is_waited_for_where_it_was_recorded() -> None:
    def recorded(side: Any, large: Any) -> None:
        event = torch.cuda.Event()
        with torch.cuda.stream(side):
            large @ large
            event.record()
            large @ large
        torch.cuda.current_stream().wait_event(event)

    workload = captured(before=recorded)
    program = workload.programs[0]
    wait = last(workload)
    assert (wait.kind, wait.stream, wait.of) == (WAIT, 0, 1)
    products = [row for row, name in enumerate(program.ops.name.tolist()) if program.names[name] == "aten::mm"]
    assert products[0] < wait.before <= products[1] < wait.op


def test_an_event_of_the_step_before_holds_the_next() -> None:
    events: list[Any] = []

    def awaited(*_: Any) -> None:
        if not events:
            events.append(torch.cuda.Event())
            events[0].record()
        events[0].synchronize()

    workload = captured(before=awaited, after=lambda *_: events[0].record())
    order = last(workload)
    assert order.kind == EVENT
    assert order.before > order.op
    assert time_ms(workload) == pytest.approx(time_ms(captured(after=lambda *_: torch.cuda.synchronize())), rel=1e-3)


def test_orders_are_saved_and_read_again(tmp_path: Path) -> None:
    workload = captured(before=beside)
    workload.save(tmp_path / "step.json")
    again = read(tmp_path / "step.json")
    assert again.programs[0].orders == workload.programs[0].orders
    assert time_ms(again) == time_ms(workload)


def test_what_is_given_to_another_stream_is_said_to_be_used_there() -> None:
    assert orders(captured(before=lambda side, large: large.record_stream(side))) == []


def copying(host: Any, **options: Any) -> Workload:
    def make() -> Callable[[], None]:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).to("cuda")
        source = host()
        return lambda: model(source.to("cuda", **options)).sum().backward()

    return capture(make)


def test_the_host_waits_for_copies_but_those_from_pinned_memory_that_are_not_to_block() -> None:
    def flags(workload: Workload) -> set[Any]:
        program = workload.programs[0]
        rows = zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)
        return {program.signatures[row].inputs[2] for at, row in rows if program.names[at] == "aten::copy_"}

    def pageable() -> Any:
        return torch.zeros(4096, 1024)

    def pinned() -> Any:
        return torch.zeros(4096, 1024).pin_memory()

    free = copying(lambda: torch.zeros(4096, 1024, pin_memory=True), non_blocking=True)
    assert flags(free) == {True}
    assert free.programs[0].orders == ()
    assert time_ms(copying(pinned, non_blocking=True)) == time_ms(free)
    waiting = copying(pinned)
    assert orders(waiting) == [(EVENT, -1, 0)]
    assert time_ms(waiting) > time_ms(free)
    slow = copying(pageable)
    assert flags(slow) == flags(copying(pageable, non_blocking=True)) == {False}
    assert time_ms(copying(pageable, non_blocking=True)) == time_ms(slow) > time_ms(waiting)
