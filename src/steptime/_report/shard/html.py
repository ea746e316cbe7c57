"""A sharding as one page: a single file without a script and without a network, with a bar of every rank's load."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._report.answers import Sharding
from steptime._report.html.markup import Markup, bar, swatch, table, tag
from steptime._report.html.static import section, static_page
from steptime._report.html.summary import verdict_summary
from steptime._report.shard.text import day_cells, gain_words, kinds_words, speed_lines
from steptime._report.words import percent, time_ms
from steptime._shard.days import Days
from steptime._shard.explain import Explained, RankLoad
from steptime._shard.search import Option, Searched
from steptime._units import ms, size_words

_LINKS = ("Ranks", "Why", "Other plans", "The plan")
# Class of the style sheet and words: what a rank's bar is made of.
_PARTS = (
    ("embedding", "lookups forward"),
    ("optimizer", "lookups backward"),
    ("communication", "exchange"),
    ("idle", "waiting for peers"),
)


def shard_page(sharding: Sharding) -> str:
    """The page as text, the same for the same answer but for the seconds it took."""
    return static_page("shard", sharding.searched.task.model.name, "sharding", _sections(sharding), _LINKS)


def _sections(sharding: Sharding) -> list[Markup]:
    found, why, days = sharding.searched, sharding.explained, sharding.days
    return [
        tag("section", _summary(sharding), id="summary", aria_label="Summary"),
        *([] if days is None else [section("Days", "ms per step, and what that is above the day's best plan", _days(days))]),
        section("Ranks", "ms per step; memory with state, activations and buffers", _legend(), _ranks(why.ranks)),
        section("Why", "the large tables are where they are, and what moving them would cost", _reasons(why)),
        section("Other plans", "predicted steps", _others(found, why)),
        section("The plan", "table by table", _plan(found.best, found)),
    ]


def _summary(sharding: Sharding) -> Markup:
    found, why = sharding.searched, sharding.explained
    inputs = {
        "Task": found.task.model.name,
        "Platform": sharding.platform.name,
        "Ranks": str(found.task.ranks),
        "Tables": str(len(found.task.tables)),
        "Batch": f"{found.task.model.batch:,}",
    }
    verdict = sharding.verdict
    room = {} if verdict.fit is None else {"Memory": verdict.fit.room}
    searched = f"{found.searched_plans:,} plans{kinds_words(found.task)}"
    result = {**dict(speed_lines(sharding)), **room, "Searched": searched, "Gain": gain_words(why)}
    return verdict_summary(
        verdict,
        sharding.step_time_ms,
        sharding.interval_ms,
        inputs=inputs,
        result=result,
        notices=sharding.notices,
    )


def _days(days: Days) -> Markup:
    heads = ("Plan", *days.names, days.objective)
    return table("What every plan takes on every day", heads, day_cells(days), words=(0,))


def _legend() -> Markup:
    return tag("p", *(tag("span", swatch(f"family {style}"), name) for style, name in _PARTS), class_="legend")


def _times(one: RankLoad) -> tuple[float, ...]:
    return tuple(map(ms, (one.forward_ns, one.backward_ns, one.exchange_ns, one.waiting_ns)))


def _ranks(ranks: Sequence[RankLoad]) -> Markup:
    longest = max((sum(_times(rank)) for rank in ranks), default=1.0) or 1.0
    rows = []
    for rank in ranks:
        times = _times(rank)
        label = f"rank {rank.rank}: " + ", ".join(
            f"{name} {time_ms(value)} ms" for (_, name), value in zip(_PARTS, times, strict=True)
        )
        picture = bar([(value / longest, f"family {style}") for (style, _), value in zip(_PARTS, times, strict=True)], label)
        memory = f"{size_words(rank.used_bytes)} ({percent(rank.used_bytes / rank.limit_bytes)})"
        rows.append((str(rank.rank), picture, str(rank.shards), str(rank.columns), *map(time_ms, times), memory))
    heads = ("Rank", "", "shards", "columns", *(name for _, name in _PARTS), "memory")
    return table("What every rank does, milliseconds per step", heads, rows, words=(0, 1))


def _reasons(why: Explained) -> Markup:
    rows = [
        (reason.table, reason.kind, ", ".join(map(str, reason.ranks[:8])), time_ms(ms(reason.load_ns)), reason.said)
        for reason in why.best.reasons
    ]
    return table("The largest tables", ("Table", "kind", "ranks", "lookups, ms", "why"), rows, words=(0, 1, 2, 4))


def _others(found: Searched, why: Explained) -> Markup:
    best = found.best.step_ns
    runners = [(f"runner-up {index}", option) for index, option in enumerate(found.options[1:], 1)]
    ruled = [(f"rule {name}", option) for name, option in found.rules.items() if option is not None]
    longest = max((option.step_ns for _, option in (*runners, *ruled)), default=best)
    rows = [
        (
            name,
            time_ms(ms(option.step_ns)),
            f"{100 * (option.step_ns / best - 1):+.1f} %",
            " to ".join(time_ms(factor * ms(option.step_ns)) for factor in why.interval),
            bar([(option.step_ns / longest, "family matmul")], f"{name}: {time_ms(ms(option.step_ns))} ms"),
        )
        for name, option in sorted((("best", found.best), *runners, *ruled), key=lambda item: item[1].step_ns)
    ]
    return table("Plans by predicted step", ("Plan", "step, ms", "above the best", "interval, ms", ""), rows, words=(0, 4))


def _plan(option: Option, found: Searched) -> Markup:
    tables = {item.name: item for item in found.task.tables}
    rows = [
        (
            name,
            f"{tables[name].rows:,}",
            str(tables[name].dim),
            f"{tables[name].pooling_factor:g}",
            placed.kind,
            ", ".join(map(str, placed.ranks)),
        )
        for name, placed in option.plan.placements.items()
    ]
    return table("The plan", ("Table", "rows", "dim", "pooling factor", "kind", "ranks"), rows, words=(0, 4, 5))
