"""`measure kernels`: device time of every kernel an op launches, caches cold and producer-warm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._calibrate.ops.calls import FILE_NAME, avoid_tried, avoided, forget_tried, read_calls
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families

if TYPE_CHECKING:
    from steptime._calibrate.harness.setting import Setting
    from steptime_lab.measure.kernels.cases import Case
    from steptime_lab.measure.kernels.executor import Executor

# A lost CUDA context or a crash ends a process; a new one goes on without the call that did it.
_ATTEMPTS = 8
# An op of which so many calls did that is not tried again.
_HOPELESS = 2
# What is kept for timing the sample with events, of what is left at the start.
_EVENTS_SHARE, _EVENTS_S = 0.1, 20.0
# Convolutions measured with cuDNN's own search, in a process of their own: it remembers what it chose without one.
_SEARCHED, _SEARCHED_BYTES, _SEARCH_NEEDS_S = 60, 200_000_000, 90.0


def run(session: Session, options: Options) -> None:
    """A whole GPU, and parts of it where ranks share one."""
    if (session.folder / FILE_NAME).exists():
        # A damaged one is said here, in one line; every rank reads it again.
        read_calls(session.folder / FILE_NAME)
    whole, parts = parts_of(options)
    if whole:
        attempt(session, "kernels", Layout(1, device=options.device), plan_of(session, options))
        if not options.small and options.device == "cuda" and session.budget.left_s() > _SEARCH_NEEDS_S:
            attempt(session, "kernels", Layout(1, device=options.device), plan_of(session, options, search=True))
    if parts:
        from steptime_lab.measure.parts import run as run_parts

        run_parts(session, options)


def names(_: Options) -> list[str]:
    """What `--only` may name: families of ops, and the workloads' calls that belong to none."""
    return [*families(), "other"]


def parts_of(options: Options) -> tuple[bool, tuple[int, ...]]:
    """Whether the whole GPU is measured, and into how many parts it is divided besides."""
    parts = tuple(count for count in options.ranks if count > 1) if options.share_gpu else ()
    return 1 in options.ranks or not parts, parts


def plan_of(session: Session, options: Options, **more: Any) -> dict[str, Any]:
    """What a worker is told."""
    return session.to_plan(seed=options.seed, small=options.small, only=list(options.only), **more)


def attempt(session: Session, job: str, layout: Layout, plan: Mapping[str, Any]) -> None:
    """Runs a group until it ends well, starting it again without a call that ended it; what was measured is kept."""
    # What an interrupted run was trying did not end it.
    forget_tried(session.folder)
    for _ in range(_ATTEMPTS):
        if session.budget.left_s() <= 0:
            return
        try:
            run_ranks(job, layout, plan, limit_s=session.budget.left_s() + 30)
            return
        except RanksError as error:
            session.warn(str(error))
            if session.budget.left_s() <= 0 or not avoid_tried(session.folder):
                return


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank with a GPU (or the CPU) of its own."""
    import torch

    from steptime._calibrate.harness.setting import Setting
    from steptime._calibrate.ops.arena import Arena
    from steptime_lab.measure.kernels import cases as asked
    from steptime_lab.measure.kernels.events import Sample
    from steptime_lab.measure.kernels.executor import Executor

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
        executor = Executor(group, session, Arena.on(group.device, group.share, seed), progress)
        sample = Sample(enabled=not plan.get("search"))
        reserve_s = min(_EVENTS_S, _EVENTS_SHARE * session.budget.left_s())
        sweep(session, executor, cases, setting, keep=sample.keeps, reserve_s=reserve_s)
        sample.release(executor, session, cuda)
        executor.close()
    progress.close()


def sweep(
    session: Session,
    executor: Executor,
    cases: Sequence[Case],
    setting: Setting,
    *,
    keep: Callable[[Case, dict[str, Any]], bool] = lambda _case, _row: False,
    reserve_s: float = 0.0,
) -> None:
    """Measures cases batch by batch until all are done or time is; rows that `keep` takes are its to store."""
    for batch in executor.batches(cases):
        if not executor.group.decide(int(session.budget.left_s() > reserve_s)):
            return
        for case, row in executor.measure(batch, setting):
            if not keep(case, row):
                session.store.add("kernels", row)
        session.store.flush()


def remaining(session: Session, cases: Sequence[Case], setting: Setting) -> list[Case]:
    """The cases that have no row yet under this setting and did not cost a context before."""
    from steptime_lab.measure.kernels.executor import COLD

    done, avoid = session.store.done("kernels"), avoided(session.folder)
    ended = Counter(Call.from_json(text).op for text in avoid)
    hopeless = {op for op, calls in ended.items() if calls >= _HOPELESS}
    if avoid:
        session.warn(f"{len(avoid)} calls ended their process and are avoided, with all calls of {sorted(hopeless) or 'no op'}")
    return [
        case
        for case in cases
        if case.text not in avoid and case.call.op not in hopeless and not done[case.key(COLD, setting.share, setting.others)]
    ]
