"""What the CPU spends per op, per launch and between ops, without a profiler and with each kind of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import QUIET, Layout
from steptime._calibrate.harness.session import Session
from steptime._measurements.sets import HOST
from steptime.errors import InputError
from steptime_lab.measure.restarts import AvoidList, run_avoiding

if TYPE_CHECKING:
    from steptime_lab.measure.host.bench import Probe
    from steptime_lab.measure.host.issued import Issued

JOB = "host"

# What each kind of row is a time of. A row's own file says more: measure/host/*.py.
KINDS: Mapping[str, str] = {
    "op": "an op through the dispatcher",
    "op_python": "the same op through the function that people call",
    "op_autograd": "a functional form that records a graph",
    "op_no_grad": "the same without recording",
    "backward_node": "one more of a form in a backward pass",
    "backward_call": "a backward pass apart from its nodes",
    "between_forward": "from one op to the next, each a module in a sequence",
    "between_backward": "the autograd engine per node",
    "accumulate_grad": "a leaf's gradient taken over or added",
    "module_call": "one more module around a module",
    "module_call_fixed": "calling the innermost module",
    "autocast": "entering autocast, and what it adds to a linear layer",
    "optimizer_step": "an optimiser's step per parameter",
    "optimizer_step_fixed": "an optimiser's step apart from its parameters",
    "zero_grad": "clearing gradients per parameter",
    "zero_grad_fixed": "clearing gradients apart from parameters",
    "clip_grad": "clipping the gradients' norm per parameter",
    "clip_grad_fixed": "clipping apart from parameters",
    "ddp_forward": "what DDP adds to forward per parameter",
    "ddp_forward_fixed": "what DDP adds to forward once",
    "ddp_backward": "what DDP adds to backward per parameter",
    "ddp_backward_fixed": "what DDP adds to backward once",
    "ddp_bucket": "one more bucket in DDP's backward",
    "collective_call": "calling a small collective without waiting for it",
    "table_batched": "a table-batched lookup, forward or backward with update",
    "empty_call": "a Python call that does nothing",
    "alloc": "a tensor from the caching allocator and back",
    "launch": "what launching adds to an op",
    "op_without_launch": "an op on no elements",
    "launch_to_return": "from an op on an idle device to the return of a synchronisation",
    "kernel_gap": "between kernels in a full stream",
    "kernel_period": "from one smallest kernel to the next in a full stream",
    "event_record": "recording an event",
    "event_query": "asking whether an event has come",
    "stream_wait": "one stream waiting for another",
    "stream_switch": "entering and leaving a stream's context",
    "synchronize": "waiting for an idle device",
    "item": "fetching one number",
    "copy": "a copy between host and device that does not wait",
}
# Of kernels and calls as only a profiler on a GPU sees them.
SEEN_BY_PROFILER = ("launch_call", "launch_latency", "kernel_duration", "sync_return")

# Groups of processes, in the order they run: profiler modes one after another in one process, and the seconds each needs.
# A mode that leaves nothing behind has a process of its own; `after` is what a profiler leaves behind.
GROUPS: tuple[tuple[tuple[str, float], ...], ...] = (
    (("off", 28.0),),
    (("cpu_cuda", 9.0), ("after", 4.0)),
    (("cuda", 9.0),),
    (("execution_trace", 4.0),),
)
# To try it out: fewer processes to start.
SMALL_GROUPS = ((("off", 20.0),), (("cpu_cuda", 10.0), ("cuda", 10.0), ("execution_trace", 10.0), ("after", 10.0)))
SHARED_S = 8.0
# What starting a group of processes takes, and the least that is worth a start.
STARTING_S, LEAST_S = 12.0, 2.0
# What starting may take before something is wrong, and what recording the workloads' ops may.
PATIENCE_S, RECORDING_S = 60.0, 120.0
# How often a mode goes through its list, one burst of every probe each time, and calls per burst: fewer where each is recorded.
PASSES = {"off": (5, 100), "after": (3, 100), "cuda": (2, 30), "cpu_cuda": (2, 30), "execution_trace": (2, 20)}
SMALL_PASSES = (2, 4)
# Joining a group of processes takes seconds, so that what they do together is asked only under these.
TOGETHER_UNDER = ("off", "cpu_cuda")


def run(session: Session, options: Options) -> None:
    """Unprofiled first, with all it needs; then each profiler in processes of its own; then several ranks, a shorter list."""
    _record(session, options)
    plans = [(Layout(1, device=options.device), group, False) for group in (SMALL_GROUPS if options.small else GROUPS)]
    # Sharded training on four ranks is measured first, so its host is as well.
    for ranks in sorted({count for count in options.ranks if count > 1}, key=lambda count: (abs(count - 4), count)):
        plans.append((Layout(ranks, options.share_gpu, options.device), (("off", SHARED_S),), True))
    for layout, modes, short in plans:
        left_s, asked_s = session.budget.left_s() - STARTING_S, sum(seconds for _, seconds in modes)
        if left_s < min(LEAST_S, asked_s):
            text = " and ".join(name for name, _ in modes)
            session.warn(f"no time left for host costs of {layout.ranks} rank(s), profiler {text}; give more --minutes")
            continue
        given = [[name, seconds * min(1.0, left_s / asked_s)] for name, seconds in modes]
        plan = session.to_plan(modes=given, short=short, small=options.small, only=list(options.only))
        _run_group(session, layout, plan, 2 * asked_s + PATIENCE_S)


def names(_: Options) -> list[str]:
    """What `--only` may name: kinds of costs."""
    return list(KINDS)


def _record(session: Session, options: Options) -> None:
    """Views are the same on a CPU; the ops that launch are recorded on the device unless full steps were before."""
    if options.only or (session.folder / "host_calls.json").exists():
        return
    device = "cpu" if (session.folder / "workload_calls.json").exists() else options.device
    _run_group(session, Layout(1, device=device), session.to_plan(record=True), RECORDING_S)


def _run_group(session: Session, layout: Layout, plan: dict[str, Any], limit_s: float) -> None:
    """A group that ends badly is started once more: what it had measured is kept, what ended it is left out."""
    avoid = AvoidList(session.folder, JOB)
    run_avoiding(session, __name__, layout, plan, avoid, attempts=2, limit_s=limit_s, environment=QUIET)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank under each mode of its group in turn."""
    if plan.get("record"):
        _record_small(group, session)
        return
    from steptime_lab.measure.host.probes import handful, probes

    issued = issued_by(session, group)
    for mode, seconds in plan["modes"]:
        short = bool(plan["short"]) or mode in ("after", "execution_trace")
        chosen = probes(issued, short=short, python=mode == "off" and not short)
        if mode not in TOGETHER_UNDER:
            chosen = [probe for probe in chosen if not probe.together]
        if plan["only"]:
            chosen = [probe for probe in chosen if set(probe.kinds) & set(plan["only"])]
        if plan["small"]:
            chosen = handful(chosen)
        _measure(group, session, mode, chosen, float(seconds), small=bool(plan["small"]))


def _measure(group: Group, session: Session, mode: str, chosen: Sequence[Probe], seconds: float, *, small: bool) -> None:
    from steptime_lab.measure.host.recording import MarkedBench, ProfiledRunner, scenes

    passes, calls = SMALL_PASSES if small else PASSES[mode]
    group.barrier()
    done = session.store.done(HOST)
    bench = MarkedBench(group, session, bursts=1, calls=calls)
    avoid = AvoidList(session.folder, JOB)
    runner = ProfiledRunner(
        bench, session, seconds, passes=passes, mode=mode, done=done, avoided=avoid.cases(), marker=avoid.marker(group.rank)
    )
    progress = session.progress(f"host, profiler {mode}, {passes} bursts each", passes * len(chosen))
    for kind, times in scenes(runner.bench, mode).items():
        session.store.add(HOST, runner.row(kind, "neg_out", times))
    runner.run(chosen, progress)
    avoid.marker(group.rank).end()
    progress.close()


def issued_by(session: Session, group: Group) -> list[Issued]:
    """The calls that are asked: those recorded in the session's folder, then common ones."""
    from steptime_lab.measure.host.issued import common, grouped, recorded

    # Not every CPU multiplies in bfloat16.
    dtypes = ("float32", "bfloat16") if group.device_name.startswith("cuda") else ("float32",)
    try:
        return grouped([*recorded(session.folder), *common(dtypes)])
    except InputError as error:
        session.warn(f"{error}; only common ops are measured")
        return grouped(common(dtypes))


def _record_small(group: Group, session: Session) -> None:
    """The op calls of a small step of every workload, the ones included that leave the device alone."""
    from steptime_lab.measure.host.issued import SMALL_FILE
    from steptime_lab.measure.kernels.cases import write_calls
    from steptime_lab.measure.kernels.record import record_calls
    from steptime_lab.workloads.case import build
    from steptime_lab.workloads.cases import small_cases

    cases = small_cases(1)
    progress = session.progress("op calls of the workloads", len(cases))
    # Under its own name only when all of them are in it: what an interrupted recording lacks would never be asked.
    unfinished = session.folder / f"{SMALL_FILE}.unfinished"
    unfinished.unlink(missing_ok=True)
    for case in cases:
        try:
            step = build(case, group, group.device)
            step()
            write_calls(unfinished, case.name, record_calls(step, device_only=False))
            step.close()
            progress.step()
        # A workload whose library is missing, or whatever else a model raises: the others are recorded all the same.
        except Exception as error:
            session.warn(f"the ops of {case.name} are not recorded: {type(error).__name__}: {error}")
            progress.skip(type(error).__name__)
    if unfinished.exists():
        unfinished.replace(session.folder / SMALL_FILE)
    progress.close()
