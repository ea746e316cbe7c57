"""What `steptime shard` says to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steptime._build.dlrm.plan import DATA_PARALLEL, KINDS, Plan
from steptime._report.answers import Sharding
from steptime._report.layout import print_heading, print_line, print_notices, print_numbers, print_section, print_title
from steptime._report.shard.document import evaluated_notices
from steptime._report.text import print_verdict, print_verdict_lines
from steptime._report.verdict import verdict_of
from steptime._report.words import interval_words, percent, power_words, rate, time_ms
from steptime._shard.days import ROBUST, Days
from steptime._shard.explain import Explained, PlanReasons, RankLoad, Reason
from steptime._shard.given_plans import GivenPlan
from steptime._shard.search import Option, Searched
from steptime._shard.task import Task
from steptime._units import ms, size_words

_HEADS = (
    "rank",
    "\nshards",
    "\ncolumns",
    "lookups\nforward",
    "lookups\nbackward",
    "\nexchange",
    "waiting\nfor peers",
    "memory",
    "of its\nlimit",
)
_WHY_HEADS = ("table", "kind", "ranks", "lookups\nms", "best other\nrank", "step would\nbe longer by")
# More ranks than this are shown by their extremes.
RANKS_SHOWN = 16
# Tables of a plan that are listed one by one.
_TABLES_SHOWN = 60
# Given plans whose ranks and reasons are shown.
_PLANS_SHOWN = 3


def print_shard(console: Console, sharding: Sharding) -> None:
    """The best plan and why it is."""
    found, why, days = sharding.searched, sharding.explained, sharding.days
    _header(console, found.task, sharding.platform.name)
    print_verdict(console, "Best plan", sharding.step_time_ms, sharding.verdict, interval_words(*sharding.interval_ms))
    for title, words in speed_lines(sharding):
        print_line(console, title, words, spaced=False)
    _gain(console, why)
    by = f"found by {found.best.by} among {found.searched_plans:,} plans in {found.seconds:.1f} s{kinds_words(found.task)}"
    print_line(console, "Search", by, spaced=False)
    if days is not None:
        _days(console, days)
    print_section(console, "Plan", "table: ranks of its shards")
    print_plan_tables(console, found.best.plan)
    _ranks_and_reasons(console, why.best)
    print_section(console, "Runners-up", "ms per step, and what that is above the best")
    print_numbers(console, ("plan", "step", "more", "found by"), _others(found))
    print_section(console, "Usual rules", "ms per step, and what that is above the best")
    print_numbers(console, ("rule", "step", "more"), _rules(found))
    print_notices(console, sharding.notices)
    if why.every_rank_tables_ns:
        text = f"{time_ms(ms(why.every_rank_tables_ns))} ms of the step, of tables that every rank has a share or a copy of"
        print_line(console, "Every rank", text)


def kinds_words(task: Task) -> str:
    """How tables could be divided."""
    left = f", not {', '.join(out)}" if (out := [kind for kind in KINDS if kind not in task.kinds]) else ""
    return f"; tried: {', '.join(task.kinds)}{left}"


def speed_lines(sharding: Sharding) -> Iterator[tuple[str, str]]:
    """What people compare, a title and words each."""
    mfu, power, cost = sharding.explained.best.predicted.mfu, sharding.explained.best.predicted.power, sharding.cost
    yield "Speed", f"{rate(sharding.samples_per_s)} samples/s" + ("" if mfu is None else f", MFU {100 * mfu:.1f} %")
    if power is not None:
        yield "Power", power_words(power)
    if cost is not None:
        yield "Cost", cost.text


def print_files(console: Console, page: Path | None, torchrec: Path | None) -> None:
    """What was written beside."""
    for title, file in (("Page", page), ("TorchRec", torchrec)):
        if file is not None:
            print_line(console, title, f"{file}{'  (open it in a browser)' * (title == 'Page')}", spaced=False)


def day_cells(days: Days) -> list[tuple[str, ...]]:
    """A row for every plan: its step on every day, with what that is above the day's best, and by the objective."""
    return [
        (
            plan.name if plan.name == ROBUST else f"best of {plan.name}",
            *(
                f"{time_ms(ms(step))} ({100 * loss:+.1f} %)"
                for step, loss in zip(plan.steps_ns, days.losses(plan), strict=True)
            ),
            time_ms(ms(plan.objective_ns)),
        )
        for plan in days.plans
    ]


def _days(console: Console, days: Days) -> None:
    print_section(
        console, "Days", "ms per step, and what that is above the best plan of the day; what follows is the robust plan"
    )
    print_numbers(console, ("plan", *days.names, days.objective), day_cells(days))


def _ranks_and_reasons(console: Console, why: PlanReasons) -> None:
    print_section(console, "Ranks", "ms per step; memory with state, activations and buffers")
    print_numbers(console, _HEADS, _ranks(why.ranks))
    print_section(console, "Why", "the largest tables, and what moving them would cost")
    print_numbers(console, _WHY_HEADS, [_why(reason) for reason in why.reasons])


def print_evaluated(console: Console, task: Task, platform: str, plans: Sequence[GivenPlan]) -> None:
    """Given plans, those that fit first, then the fastest."""
    _header(console, task, platform)
    print_section(console, "Plans", "ms per step")
    best = plans[0].step_ns
    rows = [
        (
            plan.name,
            time_ms(ms(plan.step_ns)),
            _more(plan.step_ns, best),
            size_words(plan.fit.needed_bytes),
            Text(plan.fit.words, style="" if plan.fit.fits else "bold red"),
        )
        for plan in plans
    ]
    print_numbers(console, ("plan", "step", "more", "fullest\nrank", "memory"), rows)
    for plan in plans[:_PLANS_SHOWN]:
        if plan.why is not None:
            low, high = (factor * ms(plan.step_ns) for factor in plan.why.interval)
            headline = verdict_of(plan.why.predicted).headline
            print_title(console, Text().append(f"{plan.name}  ", style="bold").append(headline))
            print_verdict_lines(console, verdict_of(plan.why.predicted), interval_words(low, high))
            _ranks_and_reasons(console, plan.why)
    if len(plans) > _PLANS_SHOWN:
        print_line(console, "More", f"ranks and reasons of the other {len(plans) - _PLANS_SHOWN} plans: --json", spaced=False)
    print_notices(console, evaluated_notices(task, plans))


def gain_words(why: Explained) -> str:
    """What the search gained, and whether that can be told from errors of the models."""
    if why.gain is None:
        return "no usual rule finds a plan that fits"
    gain = why.gain
    if gain.share <= 1e-6:
        return f"none: the rule {gain.rule} gives an equally fast plan"
    low, high = gain.interval
    # 2.6 of 4.0 % on average (docs/sharding.md): the best of many plans is also the one that errors flatter most.
    sure = "larger than its uncertainty (of the gains predicted for 80 measured tasks, two thirds came true)"
    sure = sure if gain.sure else "within its uncertainty: either plan may be the faster one"
    interval = f"90 % interval {100 * low:.1f} to {100 * high:.1f} %"
    return f"{100 * gain.share:.1f} % over the best usual rule ({gain.rule}); {interval}: {sure}"


def _header(console: Console, task: Task, platform: str) -> None:
    parts = (f"{len(task.tables)} tables", f"{task.ranks} ranks", f"batch {task.model.batch:,}", platform)
    print_heading(console, "shard", task.model.name, *parts)


def _gain(console: Console, why: Explained) -> None:
    print_line(console, "Gain", gain_words(why), spaced=False)


def print_plan_tables(console: Console, plan: Plan) -> None:
    """Which rank has what."""
    copied = [name for name, placed in plan.placements.items() if placed.kind == DATA_PARALLEL]
    divided = {name: placed for name, placed in plan.placements.items() if name not in copied}
    if len(plan.placements) > _TABLES_SHOWN:
        shared = {name: placed for name, placed in divided.items() if len(placed.ranks) > 1}
        text = ", ".join(f"{name} {_ranks_words(placed.ranks)}" for name, placed in list(shared.items())[:_TABLES_SHOWN])
        copies = f"copied to every rank: {len(copied)} table{'s' * (len(copied) > 1)}; " if copied else ""
        words = f"{len(plan.placements)}, in --json or --html; {copies}divided: {text or 'none'}"
        print_line(console, "Tables", words, spaced=False)
        return
    if copied:
        print_line(console, "  every rank", f"{', '.join(copied)} (copied)", spaced=False)
    for rank in range(plan.ranks):
        held = [
            name if len(placed.ranks) == 1 else f"{name} ({placed.kind}, 1 of {len(placed.ranks)})"
            for name, placed in divided.items()
            if rank in placed.ranks
        ]
        print_line(console, f"  rank {rank}", ", ".join(held) or "nothing", spaced=False)


def _ranks(ranks: Sequence[RankLoad]) -> list[list[str]]:
    if len(ranks) <= RANKS_SHOWN:
        return [[str(one.rank), *_cells(one)] for one in ranks]
    ordered = sorted(ranks, key=lambda one: one.forward_ns + one.backward_ns)
    middle = ordered[len(ordered) // 2]
    return [[name, *_cells(one)] for name, one in (("least", ordered[0]), ("median", middle), ("most", ordered[-1]))]


def _cells(one: RankLoad) -> list[str]:
    times = (one.forward_ns, one.backward_ns, one.exchange_ns, one.waiting_ns)
    memory = (size_words(one.used_bytes), percent(one.used_bytes / one.limit_bytes))
    return [str(one.shards), str(one.columns), *(time_ms(ms(value)) for value in times), *memory]


def _why(reason: Reason) -> tuple[str, ...]:
    begin = (reason.table, reason.kind, _ranks_words(reason.ranks), time_ms(ms(reason.load_ns)))
    if reason.elsewhere is None or reason.moved_ns is None:
        return (*begin, "none", reason.said)
    return (*begin, str(reason.elsewhere), f"{ms(reason.moved_ns):.3f} ms")


def _ranks_words(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"


def _others(found: Searched) -> list[tuple[str, ...]]:
    best = found.best.step_ns
    return [
        (str(index), _step(option), _more(option.step_ns, best), option.by) for index, option in enumerate(found.options[1:], 2)
    ]


def _rules(found: Searched) -> list[tuple[str, ...]]:
    best = found.best.step_ns
    there = sorted(found.rules.items(), key=lambda item: item[1].step_ns if item[1] is not None else float("inf"))
    return [
        (name, "no room", "") if entry is None else (name, _step(entry), _more(entry.step_ns, best)) for name, entry in there
    ]


def _step(option: Option) -> str:
    return f"{'' if option.played else 'about '}{time_ms(ms(option.step_ns))}"


def _more(step: float, best: float) -> str:
    return f"{100 * (step / best - 1):+.1f} %"
