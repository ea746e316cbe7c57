"""`measure kernels`: device time of every kernel an op launches, caches cold and producer-warm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout
from steptime._calibrate.harness.session import Session, Setting
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families
from steptime_lab.measure.kernels.cases import FILE_NAME, read_calls
from steptime_lab.measure.restarts import AvoidList, run_avoiding
from steptime_lab.measurements.sets import KERNELS

if TYPE_CHECKING:
    from steptime_lab.measure.kernels.bench import KernelBench
    from steptime_lab.measure.kernels.cases import KernelCase

# A lost CUDA context or a crash ends a process; a new one goes on without the call that did it.
ATTEMPTS = 8
JOB = "kernels"
# An op of which so many calls did that is not tried again.
_HOPELESS = 2
# What is kept for timing the sample with events, of what is left at the start.
_EVENTS_SHARE, _EVENTS_S = 0.1, 20.0
# Convolutions measured with cuDNN's own search, in a process of their own: it remembers what it chose without one.
_SEARCHED, _SEARCHED_BYTES, _SEARCH_NEEDS_S = 60, 200_000_000, 90.0


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
    if shares:
        from steptime_lab.measure.shares import run as run_shares

        run_shares(session, options)


def names(_: Options) -> list[str]:
    """What `--only` may name: families of ops, and the workloads' calls that belong to none."""
    return [*families(), "other"]


def shares_of(options: Options) -> tuple[bool, tuple[int, ...]]:
    """Whether the whole GPU is measured, and into how many shares it is divided besides."""
    shares = tuple(count for count in options.ranks if count > 1) if options.share_gpu else ()
    return 1 in options.ranks or not shares, shares


def plan_of(session: Session, options: Options, **more: Any) -> dict[str, Any]:
    """What a worker is told."""
    return session.to_plan(seed=options.seed, small=options.small, only=list(options.only), **more)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank with a GPU (or the CPU) of its own."""
    import torch

    from steptime_lab.measure.kernels import cases as asked
    from steptime_lab.measure.kernels.bench import KernelBench, Sample
    from steptime_lab.measure.op_calls import Arena

    seed, small, only = int(plan["seed"]), bool(plan["small"]), tuple(plan["only"])
    cuda = group.device.type == "cuda"
    if plan.get("search"):
        cases = asked.benchmark_cases(only, seed, _SEARCHED, _SEARCHED_BYTES)
    else:
        cases = asked.whole_gpu_cases(session.folder / FILE_NAME, only, seed, small=small, smallest=not cuda)
    setting = Setting(share=group.share, repeats=2 if small else 3, seed=seed)
    cases = remaining(session, cases, setting)
    progress = session.progress("kernels", len(cases))
    torch.manual_seed(seed)
    with torch.inference_mode():
        bench = KernelBench(group, session, Arena.on(group.device, group.share, seed), progress)
        sample = Sample(enabled=not plan.get("search"))
        reserve_s = min(_EVENTS_S, _EVENTS_SHARE * session.budget.left_s())
        sweep(session, bench, cases, setting, keep=sample.keeps, reserve_s=reserve_s)
        sample.release(bench, session)
        bench.close()
    progress.close()


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
