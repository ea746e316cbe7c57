from __future__ import annotations

import pytest
import torch

from steptime_lab.measure.check import check_indices, check_lookup, disagreements


def test_the_checks_of_the_device_hold_where_the_device_is_the_cpu() -> None:
    check_indices(torch.device("cpu"))
    check_lookup(torch.device("cpu"), "rowwise_adagrad", weighted=True)


def test_a_lookup_that_computes_something_else_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from steptime_lab.workloads.table_batched import plain as table_batched_plain

    honest = table_batched_plain.forward
    calls = []

    def every_other_time_wrong(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return honest(*arguments) + len(calls) % 2  # type: ignore[arg-type]

    monkeypatch.setattr(table_batched_plain, "forward", every_other_time_wrong)
    with pytest.raises(AssertionError, match="not close"):
        check_lookup(torch.device("cpu"), "sgd", weighted=False)


def a_call(event_ns: float | None, time_ns: float) -> dict[str, object]:
    return {"event_ns": event_ns, "time_ns": time_ns, "op": "aten::mm.default"}


def test_events_and_records_may_disagree_in_exceptions_and_for_short_calls_only() -> None:
    good, bad, short = a_call(100_000.0, 101_000.0), a_call(200_000.0, 100_000.0), a_call(20_000.0, 10_000.0)
    assert disagreements([good] * 3 + [bad]) == []
    assert disagreements([short, a_call(None, 1e6)]) == []
    assert "2 of 3 calls, e.g. aten::mm.default by 2.00x" in disagreements([good, bad, bad])[0]
