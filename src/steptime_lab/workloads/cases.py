"""Which training steps are measured on so many ranks, in the order of their worth: a run that is cut short has the first ones.

The `b` of a name is the batch of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from steptime._build.dlrm.model import Dlrm
from steptime._shard.rules import Machine, place
from steptime.errors import InputError
from steptime_lab.workloads.case import Case, workloads
from steptime_lab.workloads.divided_cases import DIVIDED, divided_cases
from steptime_lab.workloads.drawn_tasks import step_batches, step_tasks
from steptime_lab.workloads.large_cases import AGAIN, LARGE, large_cases, shrunk_large
from steptime_lab.workloads.networks import bert, gpt2, inception_v3, resnet50, xlnet
from steptime_lab.workloads.published import published_models, with_bags
from steptime_lab.workloads.recommender_cases import RECOMMENDERS, recommender_cases

RANKS = (1, 2, 4, 8)

RULE = "size_lookup_greedy"
"""Places the tables of every task, as in the published end-to-end study."""

PUBLISHED_BATCHES = (2048, 4096)

FEW_TASKS = 4
"""Tasks measured on 8 ranks, which have two cores each."""

_SHRUNK_SAMPLES, _SHRUNK_ROWS, _SHRUNK_LOOKUPS = 8, 64, 2.0

# Samples per rank, as published (larger ones do not fit four times on one GPU).
TRANSFORMERS = (("bert", bert.BASE, (8, 16, 32)), ("gpt2", gpt2.BASE, (8, 16, 32)), ("xlnet", xlnet.BASE, (4, 8, 16)))
CONVNETS = (("resnet50", resnet50.FULL, (16, 32, 64)), ("inception_v3", inception_v3.FULL, (16, 32, 64)))


def step_cases(ranks: int) -> tuple[Case, ...]:
    """The cases of that many ranks."""
    if ranks not in RANKS:
        raise InputError(f"no training steps are listed for {ranks} ranks; there are some for {', '.join(map(str, RANKS))}")
    groups: dict[int, tuple[Iterator[Case], ...]] = {
        1: (_dense(TRANSFORMERS, 1), _dense(CONVNETS, 1), _published(("default", "ddp", "test"), 1)),
        2: (_tasks(2), _dense(TRANSFORMERS, 2)),
        4: (
            _tasks(4),
            _dense(TRANSFORMERS, 4),
            _published(("default", "ddp", "mlperf", "open_source"), 4),
        ),
        8: (_few_tasks(8),),
    }
    return tuple(case for group in groups[ranks] for case in group)


def held_out_cases(ranks: int) -> dict[str, tuple[Case, ...]]:
    """Cases of that many ranks that have no part in any model, by what `--only` calls them together."""
    decoders = {group: large_cases(ranks, group) for group in (LARGE, AGAIN)}
    return {DIVIDED: divided_cases(ranks), RECOMMENDERS: recommender_cases(ranks), **decoders}


def shrunk(case: Case) -> Case:
    """A DLRM on few samples and short tables, or a narrow decoder, to try it out on a CPU."""
    if case.workload == LARGE:
        return shrunk_large(case)
    model = Dlrm.from_dict(case.config)
    tables = [
        replace(
            table,
            generator=replace(
                table.generator, rows=min(table.rows, _SHRUNK_ROWS), pooling=min(table.pooling_factor, _SHRUNK_LOOKUPS)
            ),
        )
        for table in model.tables
    ]
    small = replace(model, batch=_SHRUNK_SAMPLES * case.ranks, tables=tuple(tables))
    return replace(case, config=small.to_dict(), batch=small.batch)


def small_cases(ranks: int) -> tuple[Case, ...]:
    """A tiny one of every workload."""
    return tuple(case for workload in workloads().values() for case in workload.small(ranks))


def dlrm_case(model: Dlrm, ranks: int, name: str, task: str = "", rule: str = RULE) -> Case:
    """A DLRM on its own batch, its tables placed by a rule."""
    plan = place(rule, model.tables, Machine(ranks)).owners()
    return Case("dlrm", name, model.to_dict(), "fp32", model.batch, ranks, plan=plan, task=task, rule=rule)


def _tasks(ranks: int) -> Iterator[Case]:
    models = step_tasks(ranks)
    for batch in _task_batches(ranks):
        for number, model in enumerate(models):
            yield _task_case(number, model.with_batch(batch), ranks)


def _few_tasks(ranks: int) -> Iterator[Case]:
    for number, model in enumerate(step_tasks(ranks)[:FEW_TASKS]):
        for batch in _task_batches(ranks)[:2]:
            yield _task_case(number, model.with_batch(batch), ranks)


def _task_batches(ranks: int) -> tuple[int, ...]:
    """Every task is measured at the first before any at the next: one in the middle, then the ends."""
    smallest, small, large, largest = step_batches(ranks)
    return small, largest, large, smallest


def _task_case(number: int, model: Dlrm, ranks: int) -> Case:
    return dlrm_case(model, ranks, f"dlrm-t{number:02}-b{model.batch}-r{ranks}", f"{model.name}-r{ranks}")


def _published(names: tuple[str, ...], ranks: int) -> Iterator[Case]:
    """Each at every batch, and once more with a lookup per table."""
    for name in names:
        model, text = published_models()[name], name.replace("_", "-")
        for batch in PUBLISHED_BATCHES:
            yield dlrm_case(model.with_batch(batch), ranks, f"dlrm-{text}-b{batch}-r{ranks}", name)
        batch = PUBLISHED_BATCHES[0]
        yield dlrm_case(with_bags(model).with_batch(batch), ranks, f"dlrm-{text}-bags-b{batch}-r{ranks}", name)


def _dense(models: tuple[tuple[str, dict[str, int], tuple[int, int, int]], ...], ranks: int) -> Iterator[Case]:
    """fp32 at three batches, bf16 at the middle one."""
    for workload, config, batches in models:
        for local, precision in (*((local, "fp32") for local in batches), (batches[1], "bf16")):
            batch, end = local * ranks, "-bf16" if precision == "bf16" else ""
            name = f"{workload.replace('_', '-')}-b{batch}-r{ranks}{end}"
            yield Case(workload, name, dict(config), precision, batch, ranks)
