"""Mixtures of experts as captured: balanced, or with a fullest expert, whatever way tokens are sent to experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from steptime._capture.capture import capture, captured_step  # noqa: E402
from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._capture.routing import SKEW, balanced, skew  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime.errors import InputError  # noqa: E402

TOKENS, WIDTH, EXPERTS, EACH = 64, 32, 4, 2


def by_where(x: Any, scores: Any, experts: Any) -> Any:
    weights, chosen = torch.topk(scores.softmax(-1), EACH)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, place = torch.where(chosen == number)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def by_one_hot(x: Any, scores: Any, experts: Any) -> Any:
    weights, chosen = torch.topk(scores.softmax(-1), EACH)
    mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, rows = torch.where(mask[number].squeeze(0))
        out.index_add_(0, rows, experts[number](x[None, rows].reshape(-1, WIDTH)) * weights[rows, place, None])
    return out


def by_counts(x: Any, scores: Any, experts: Any) -> Any:
    chosen = torch.topk(scores, EACH).indices.flatten().to(torch.int32)  # copied: what follows is still a balanced choice
    order = chosen.argsort()
    parts = x.repeat_interleave(EACH, 0)[order].split(chosen.bincount(minlength=EXPERTS).tolist())
    made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return torch.zeros_like(x).index_add_(0, order // EACH, made)


def by_mask(x: Any, scores: Any, experts: Any) -> Any:
    chosen, out = scores.argmax(-1), torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = chosen == number
        if mask.any():
            out[mask] = expert(x[mask])
    return out


def rows_of_experts(route: Callable[..., Any]) -> tuple[list[int], tuple[str, ...]]:
    """Tokens of each expert, and what is said."""

    def make() -> Callable[[], None]:
        experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)).to("cuda")
        gate, x = nn.Linear(WIDTH, EXPERTS, bias=False).to("cuda"), torch.randn(TOKENS, WIDTH, device="cuda")
        optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            route(x, gate(x), experts).sum().backward()
            optimizer.step()

        return step

    program, messages = captured_step(make)
    table = op_table(program)
    calls: list[Any] = [table.signatures[row].inputs for row, name in enumerate(table.names) if name == "aten::addmm"]
    return [values[1].shape[0] for values in calls], messages


@pytest.mark.parametrize(("route", "each"), [(by_where, EACH), (by_one_hot, EACH), (by_counts, EACH), (by_mask, 1)])
def test_every_expert_gets_as_many_tokens(route: Callable[..., Any], each: int) -> None:
    found, messages = rows_of_experts(route)
    assert found == [TOKENS * each // EXPERTS] * EXPERTS
    assert any("chooses among 4 by values of the device, taken as balanced: " in message for message in messages)


@pytest.mark.parametrize(("route", "each"), [(by_where, EACH), (by_counts, EACH), (by_mask, 1)])
def test_the_fullest_expert_can_be_larger(route: Callable[..., Any], each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKEW, "1.5")
    found, messages = rows_of_experts(route)
    mean = TOKENS * each // EXPERTS
    assert found[0] == mean * 1.5
    assert sum(found) == mean * EXPERTS
    assert max(found[1:]) - min(found[1:]) <= 1
    assert any("the fullest 1.5 times that" in message for message in messages)


@pytest.mark.parametrize(("shape", "along", "count"), [((1000, 2), 1, 8), ((3, 5, 7), 1, 9), ((40,), -1, 3), ((6, 4), 1, 4)])
def test_a_row_chooses_different_ones_and_all_evenly(shape: tuple[int, ...], along: int, count: int) -> None:
    made = balanced(torch.empty(shape, device="meta"), count, along)
    assert made.shape == shape
    found = Counter(made.flatten().tolist())
    assert max(found.values()) - min(found.values()) <= 1
    if along >= 0:
        rows = made.movedim(along, -1).reshape(-1, shape[along]).tolist()
        assert all(len(set(row)) == len(row) for row in rows)


@pytest.mark.parametrize("text", ["0.5", "much", "nan", "inf"])
def test_a_factor_is_one_or_more(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKEW, text)
    with pytest.raises(InputError, match=f"--expert-skew {text}: expected how many times the mean"):
        skew()


def test_drawing_classes_checks_them_on_the_device_and_waits_for_nothing() -> None:
    """What PyTorch's own profiler shows of `multinomial`, which is the same code on every device."""

    def make() -> Any:
        weights = torch.rand(64, 8, device="cuda")
        return lambda: torch.multinomial(weights, 1)

    table = op_table(capture(make))
    row = table.names.index("aten::multinomial")
    launching = ["aminmax", "ge", "lt", "bitwise_and", "_assert_async", "sum", "eq", "any", "bitwise_not", "_assert_async"]
    expected = [f"aten::{name}" for name in (*launching, "exponential_", "div", "argmax")]
    assert [table.names[each] for each in table.children[row] if table.names[each] in expected] == expected
    assert table.arguments[row].outputs[0].shape == (64, 1)


def test_counts_that_ranks_send_each_other_are_those_of_a_balanced_router() -> None:
    """Dropless experts of two ranks: how many rows come is known from an exchange of counts."""

    def make() -> Any:
        ranks = dist.get_world_size()
        router = torch.nn.Linear(32, 4, device="cuda")
        x = torch.randn(64, 32, device="cuda")

        def step() -> None:
            chosen = router(x).topk(2).indices.flatten()
            counts = torch.bincount(chosen, minlength=4)
            coming = torch.empty_like(counts)
            dist.all_to_all_single(coming, counts)
            splits = counts.view(ranks, -1).sum(1).tolist(), coming.view(ranks, -1).sum(1).tolist()
            out = x.new_empty(sum(splits[1]), 32)
            dist.all_to_all_single(out, x[chosen.argsort() // 2], splits[1], splits[0])
            out.relu()

        return step

    program = capture_ranks(make, ranks=2).programs[0]
    assert [each.bytes_out for each in program.collectives] == [4 * 8, 128 * 32 * 4]
    assert program.collectives[1].in_splits == (64, 64)
