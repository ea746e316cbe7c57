"""`measure lookups`: embedding lookups forward and backward with update, per table and table-batched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session, Setting
from steptime_lab.measure.lookups.cases import LookupCase, cases_of, shuffled, small_cases
from steptime_lab.measure.lookups.groups import GROUPS, group_cases, small_group_cases
from steptime_lab.measurements.sets import LOOKUPS

if TYPE_CHECKING:
    from steptime_lab.measure.lookups.bench import LookupBench
    from steptime_lab.measure.lookups.prepared import Memory

IMPLEMENTATIONS = ("embedding_bag", "table_batched")

# Cases of each implementation on a whole GPU; each gives two rows, and two more where it is measured warm too.
_FULL = 2400
# On parts of a GPU, of both implementations; and of those again with the other parts idle, and streaming.
_PART, _SAMPLE = 620, 70
_SMALL_SAMPLE = 2
# A lost CUDA context ends a process; a new one goes on in another order.
_ATTEMPTS = 3


def run(session: Session, options: Options) -> None:
    """A whole GPU, and parts of it where ranks share one; the time left is divided evenly among groups to come."""
    parts = tuple(count for count in options.ranks if count > 1) if options.share_gpu else ()
    sizes = ((1,) if 1 in options.ranks or not parts else ()) + parts
    for index, count in enumerate(sizes):
        # A whole GPU has most to do.
        within = replace(session, budget=session.budget.part(0.6 if count == 1 and parts else 1 / (len(sizes) - index)))
        layout = Layout(count, share_gpu=count > 1, device=options.device)
        for number in range(_ATTEMPTS):
            if within.budget.left_s() <= 0:
                break
            plan = within.to_plan(seed=options.seed, small=options.small, only=list(options.only), attempt=number)
            try:
                run_ranks(__name__, layout, plan, limit_s=within.budget.left_s() + 60)
                break
            except RanksError as error:
                session.warn(str(error))


def names(_: Options) -> tuple[str, ...]:
    """What `--only` may name: an implementation of the broad sweep, or a group of lookups that answers one question."""
    return (*IMPLEMENTATIONS, *GROUPS)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank: a GPU (or the CPU) of its own, or a part of one beside others that do the same."""
    import torch

    from steptime_lab.measure.lookups.bench import LookupBench
    from steptime_lab.measure.lookups.prepared import Memory

    seed, small = int(plan["seed"]), bool(plan["small"])
    torch.manual_seed(seed)
    memory = Memory(group.device, group.share)
    cases = (_small_cases if small else _cases)(group, seed, tuple(plan["only"]))
    setting = Setting(share=group.share, others="none" if group.share == 1 else "same", seed=seed)
    sample = cases[: _SMALL_SAMPLE if small else _SAMPLE]
    passes = [(setting, cases)]
    if group.share > 1:
        passes += [(replace(setting, others=what), sample) for what in ("idle", "streaming")]
    asked = [(item, _remaining(session, entry, item, int(plan.get("attempt", 0)))) for item, entry in passes]
    # What is done is read before anybody adds to it: the ranks have to ask the same.
    group.barrier()
    if not any(entry for _, entry in asked):
        return
    progress = session.progress(f"lookups on 1/{group.share}", sum(len(entry) for _, entry in asked))
    bench = LookupBench(group, session, memory, progress)
    if not group.all_agree(_proven(session, memory, seed)):
        asked = [(item, [case for case in entry if case.implementation != "table_batched"]) for item, entry in asked]
    bench.try_out(_small_cases(group, seed, tuple(plan["only"])))
    for index, (item, entry) in enumerate(asked):
        due = sum(len(later) for _, later in asked[index:])
        within = replace(session, budget=session.budget.part(len(entry) / due if due else 0.0))
        _measure(within, group, bench, entry, item)
    progress.close()


def _proven(session: Session, memory: Memory, seed: int) -> bool:
    """Whether the table-batched kernels run here; whether they are right is said, too."""
    from steptime_lab.measure.lookups.prepared import NoKernelsError, disagreement

    try:
        wrong = disagreement(small_cases(seed), memory)
    except NoKernelsError as error:
        session.warn(f"the table-batched kernels do not run here and are not measured: {error}")
        return False
    if wrong:
        session.warn(f"the table-batched kernels compute something else than plain PyTorch: {wrong}; do not use their times")
    return True


def _small_cases(group: Group, seed: int, only: Sequence[str]) -> list[LookupCase]:
    """A few lookups of every implementation and group asked for."""
    broad = [case for case in small_cases(seed) if not only or case.implementation in only]
    return [*broad, *(case for name in _groups(group, only) for case in small_group_cases(name, seed))]


def _groups(group: Group, only: Sequence[str]) -> list[str]:
    """Those named; without a name all of them on a whole device, and none on a part of one."""
    return [name for name in GROUPS if name in only or (not only and group.share == 1)]


def _cases(group: Group, seed: int, only: Sequence[str]) -> list[LookupCase]:
    """The lookups of a whole GPU, the broad sweep before the groups; or those that fit a part of one (of groups: if named)."""
    import torch

    from steptime_lab.measure.lookups.prepared import limits_of

    memory_bytes = torch.cuda.mem_get_info(group.device)[1] if group.device.type == "cuda" else 0
    whole, part = limits_of(memory_bytes, 1), limits_of(memory_bytes, group.share)
    chosen = [name for name in IMPLEMENTATIONS if not only or name in only]
    every = shuffled((case for name in chosen for case in cases_of(name, _FULL, seed, whole)), seed)
    asked = shuffled((case for name in _groups(group, only) for case in group_cases(name, seed, whole)), seed)
    if group.share == 1:
        return every + asked
    # A group that is named has its own reasons; its tables still have to fit beside those of the other parts.
    roomy = replace(whole, elements=part.elements, lookups=whole.lookups // 2, outputs=part.outputs)
    return [*(case for case in every if case.fits(part)), *(case for case in asked if case.fits(roomy))][:_PART]


def _remaining(session: Session, cases: Sequence[LookupCase], setting: Setting, attempt: int) -> list[LookupCase]:
    """The cases that have no row yet under this setting; in another order at every further attempt."""
    done = session.store.done(LOOKUPS)
    left = [case for case in cases if not done or not done[case.key(setting.share, setting.others)]]
    return left if attempt == 0 else shuffled(left, attempt)


def _measure(session: Session, group: Group, bench: LookupBench, cases: Sequence[LookupCase], setting: Setting) -> None:
    """One pass: by all ranks at once, or by the first one while the others do what the setting says."""
    if setting.others in ("none", "same"):
        _sweep(session, bench, cases, setting)
        return
    from steptime_lab.measure.shares import others

    with others(group, session, setting.others) as mine:
        if mine:
            _sweep(session, bench.alone(), cases, setting)


def _sweep(session: Session, bench: LookupBench, cases: Sequence[LookupCase], setting: Setting) -> None:
    """Batch by batch until all are done or time is; only the first rank's rows are kept."""
    for batch in bench.batches(cases):
        if not bench.group.decide(int(session.budget.left_s() > 0)):
            return
        rows = bench.measure(batch, setting)
        if session.rank == 0:
            for row in rows:
                session.store.add(LOOKUPS, row)
            session.store.flush()
