"""`measure kernels`: device time of every kernel an op launches, caches cold and producer-warm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout
from steptime._calibrate.harness.session import Session, Setting
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import swept_families
from steptime_lab.measure.kernels.cases import (
    FILE_NAME,
    KernelCase,
    benchmark_cases,
    draw_of,
    part_cases,
    read_calls,
    whole_gpu_cases,
)
from steptime_lab.measure.kernels.sections import SECTIONS
from steptime_lab.measure.restarts import AvoidList, run_avoiding
from steptime_lab.measure.shares import others
from steptime_lab.measurements.sets import KERNELS

if TYPE_CHECKING:
    from steptime_lab.measure.kernels.bench import KernelBench

# A lost CUDA context or a crash ends a process; a new one goes on without the call that did it.
ATTEMPTS = 8
JOB = "kernels"
# An op of which so many calls did that is not tried again.
_HOPELESS = 2
# What is kept for timing the sample with events, of what is left at the start.
_EVENTS_SHARE, _EVENTS_S = 0.1, 20.0
# Convolutions measured with cuDNN's own search, in a process of their own: it remembers what it chose without one.
_SEARCHED, _SEARCHED_BYTES, _SEARCH_NEEDS_S = 60, 200_000_000, 90.0

# On parts of a GPU: calls that are measured again with the other parts idle, and again with them streaming.
_SAMPLE, _SMALL_SAMPLE = 150, 4
# Ranks disturb each other: one repeat is 7 % off the others, on a whole GPU 1 %.
_REPEATS_ON_PARTS = 7
# Of the last rank's rows, for showing that the parts are even.
_EVEN_SHARE = 0.1
# Of a part's arena: the largest call that is asked there.
_LARGEST = 0.2
# Of its share of the memory, what a rank may allocate; the rest is contexts and NCCL's buffers.
_OF_SHARE = 0.9


def run(session: Session, options: Options) -> None:
    """A whole GPU, and shares of it where ranks share one."""
    if (session.folder / FILE_NAME).exists():
        # A damaged one is said here, in one line; every rank reads it again.
        read_calls(session.folder / FILE_NAME)
    whole, shares = shares_of(options)
    layout, avoid = Layout(1, device=options.device), AvoidList(session.folder, JOB)
    if whole:
        run_avoiding(session, __name__, layout, plan_of(session, options), avoid, attempts=ATTEMPTS)
        if not options.small and options.device == "cuda" and session.budget.left_s() > _SEARCH_NEEDS_S:
            run_avoiding(session, __name__, layout, plan_of(session, options, search=True), avoid, attempts=ATTEMPTS)
    # One group of ranks for every size of part; the time left is divided evenly among those to come.
    for index, count in enumerate(shares):
        within = replace(session, budget=session.budget.part(1 / (len(shares) - index)))
        layout = Layout(count, share_gpu=True, device=options.device)
        run_avoiding(within, __name__, layout, plan_of(within, options), avoid, attempts=ATTEMPTS)


def names(_: Options) -> list[str]:
    """What `--only` may name: families of ops, the workloads' calls that belong to none, sections of calls of their own."""
    return [*swept_families(), "other", *SECTIONS]


def shares_of(options: Options) -> tuple[bool, tuple[int, ...]]:
    """Whether the whole GPU is measured, and into how many shares it is divided besides."""
    shares = tuple(count for count in options.ranks if count > 1) if options.share_gpu else ()
    return 1 in options.ranks or not shares, shares


def plan_of(session: Session, options: Options, **more: Any) -> dict[str, Any]:
    """What a worker is told."""
    return session.to_plan(seed=options.seed, small=options.small, only=list(options.only), **more)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank with a GPU (or the CPU) of its own, or on a part of one.

    There every rank runs the same calls in the same order; then the first one alone, then beside streams of copies.
    """
    import torch

    from steptime_lab.measure.kernels.bench import KernelBench, Sample
    from steptime_lab.measure.op_calls import Arena

    seed, whole = int(plan["seed"]), group.share == 1
    if not whole and group.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(_OF_SHARE / group.share)
    arena = Arena.on(group.device, group.share, seed)
    passes = [(setting, remaining(session, cases, setting)) for setting, cases in _passes(group, session, plan, arena.nbytes)]
    # What is done is read before anybody adds to it: the ranks have to ask the same.
    group.barrier()
    name = "kernels" if whole else f"kernels on 1/{group.share}"
    progress = session.progress(name, sum(len(cases) for _, cases in passes))
    torch.manual_seed(seed)
    with torch.inference_mode():
        bench, sample = KernelBench(group, session, arena, progress), Sample(enabled=not plan.get("search"))
        (setting, cases), *further = passes
        if whole:
            reserve_s = min(_EVENTS_S, _EVENTS_SHARE * session.budget.left_s())
            sweep(session, bench, cases, setting, keep=sample.keeps, reserve_s=reserve_s)
            sample.release(bench, session)
        else:
            sweep(session, bench, cases, setting, keep=_dropped(group))
        alone = bench.alone()
        for setting, cases in further:
            with others(group, session, setting.others) as mine:
                if mine:
                    sweep(session, alone, cases, setting)
        bench.close()
    progress.close()


def _passes(
    group: Group, session: Session, plan: Mapping[str, Any], arena_bytes: int
) -> list[tuple[Setting, list[KernelCase]]]:
    """Under which settings a rank measures which cases."""
    seed, small, only = int(plan["seed"]), bool(plan["small"]), tuple(plan["only"])
    file = session.folder / FILE_NAME
    if group.share == 1:
        setting = Setting(repeats=2 if small else 3, seed=seed)
        if plan.get("search"):
            return [(setting, benchmark_cases(only, seed, _SEARCHED, _SEARCHED_BYTES))]
        return [(setting, whole_gpu_cases(file, only, seed, small=small, smallest=group.device.type != "cuda"))]
    cases = part_cases(file, only, seed, largest_bytes=int(_LARGEST * arena_bytes), small=small)
    setting = Setting(share=group.share, others="same", repeats=2 if small else _REPEATS_ON_PARTS, seed=seed)
    sample = cases[: _SMALL_SAMPLE if small else _SAMPLE]
    return [(setting, cases), *((replace(setting, others=what), sample) for what in ("idle", "streaming"))]


def _dropped(group: Group) -> Callable[[KernelCase, dict[str, Any]], bool]:
    """Whose rows are not stored: all but the first rank's, and a tenth of the last one's."""
    last = group.rank == group.ranks - 1
    return lambda case, _row: group.rank != 0 and not (last and draw_of(case.text, "even") < _EVEN_SHARE)


def sweep(
    session: Session,
    bench: KernelBench,
    cases: Sequence[KernelCase],
    setting: Setting,
    *,
    keep: Callable[[KernelCase, dict[str, Any]], bool] = lambda _case, _row: False,
    reserve_s: float = 0.0,
) -> None:
    """Measures cases batch by batch until all are done or time is; rows that `keep` takes are its to store."""
    for batch in bench.batches(cases):
        if not bench.group.decide(int(session.budget.left_s() > reserve_s)):
            return
        for case, row in bench.measure(batch, setting):
            if not keep(case, row):
                session.store.add(KERNELS, row)
        session.store.flush()


def remaining(session: Session, cases: Sequence[KernelCase], setting: Setting) -> list[KernelCase]:
    """The cases that have no row yet under this setting and did not cost a context before."""
    from steptime_lab.measure.device_profile import COLD

    done, avoid = session.store.done(KERNELS), AvoidList(session.folder, JOB).cases()
    ended = Counter(Call.from_json(text).op for text in avoid)
    hopeless = {op for op, calls in ended.items() if calls >= _HOPELESS}
    if avoid:
        session.warn(f"{len(avoid)} calls ended their process and are avoided, with all calls of {sorted(hopeless) or 'no op'}")
    return [
        case
        for case in cases
        if case.text not in avoid and case.call.op not in hopeless and not done[case.key(COLD, setting.share, setting.others)]
    ]
