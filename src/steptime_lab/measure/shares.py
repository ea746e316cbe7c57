"""`parts`: the same kernels on a part of a GPU, while the other parts do the same, nothing, or stream memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout
from steptime._calibrate.harness.session import Session
from steptime._units import MIB
from steptime_lab.measure.kernels import ATTEMPTS, JOB, plan_of, remaining, sweep
from steptime_lab.measure.kernels.cases import FILE_NAME
from steptime_lab.measure.restarts import AvoidList, run_avoiding

if TYPE_CHECKING:
    from steptime_lab.measure.kernels.cases import KernelCase

# Ranks that share a GPU where nobody says otherwise: halves, quarters, eighths.
_USUAL = (2, 4, 8)
# Calls that are measured again with the other parts idle, and again with them streaming.
_SAMPLE, _SMALL_SAMPLE = 150, 4
# Ranks disturb each other: one repeat is 7 % off the others, on a whole GPU 1 %.
_REPEATS = 7
# Of the last rank's rows, for showing that the parts are even.
_EVEN_SHARE = 0.1
# Of a part's arena: the largest call that is asked there.
_LARGEST = 0.2
# Of its share of the memory, what a rank may allocate; the rest is contexts and NCCL's buffers.
_OF_SHARE = 0.9
_STREAMED_BYTES = 1024 * MIB
# Copies queued at a time: about 30 ms, so that the queue never runs dry and the end is noticed soon.
_COPIES = 8


def run(session: Session, options: Options) -> None:
    """One group of ranks for every size of part; the time left is divided evenly among those to come."""
    sizes = [count for count in options.ranks if count > 1] or list(_USUAL)
    for index, count in enumerate(sizes):
        within = replace(session, budget=session.budget.part(1 / (len(sizes) - index)))
        layout = Layout(count, share_gpu=True, device=options.device)
        run_avoiding(within, __name__, layout, plan_of(within, options), AvoidList(session.folder, JOB), attempts=ATTEMPTS)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """Every rank runs the same calls in the same order; then the first one alone, then beside streams of copies."""
    import torch

    from steptime._calibrate.harness.session import Setting
    from steptime_lab.measure.kernels.bench import KernelBench
    from steptime_lab.measure.kernels.cases import part_cases
    from steptime_lab.measure.op_calls import Arena

    seed, small, only = int(plan["seed"]), bool(plan["small"]), tuple(plan["only"])
    if group.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(_OF_SHARE / group.share)
    arena = Arena.on(group.device, group.share, seed)
    file = session.folder / FILE_NAME
    cases = part_cases(file, only, seed, largest_bytes=int(_LARGEST * arena.nbytes), small=small)
    same = Setting(share=group.share, others="same", repeats=2 if small else _REPEATS, seed=seed)
    idle, streaming = replace(same, others="idle"), replace(same, others="streaming")
    sample = cases[: _SMALL_SAMPLE if small else _SAMPLE]
    asked = {
        setting: remaining(session, item, setting) for setting, item in ((same, cases), (idle, sample), (streaming, sample))
    }
    # What is done is read before anybody adds to it: the ranks have to ask the same.
    group.barrier()
    progress = session.progress(f"kernels on 1/{group.share}", sum(map(len, asked.values())))
    torch.manual_seed(seed)
    with torch.inference_mode():
        bench = KernelBench(group, session, arena, progress)
        sweep(session, bench, asked[same], same, keep=_dropped(group))
        alone = bench.alone()
        for setting in (idle, streaming):
            with others(group, session, setting.others) as mine:
                if mine:
                    sweep(session, alone, asked[setting], setting)
        bench.close()
    progress.close()


def _dropped(group: Group) -> Callable[[KernelCase, dict[str, Any]], bool]:
    """Whose rows are not stored: all but the first rank's, and a tenth of the last one's."""
    from steptime_lab.measure.kernels.cases import draw_of

    last = group.rank == group.ranks - 1
    return lambda case, _row: group.rank != 0 and not (last and draw_of(case.text, "even") < _EVEN_SHARE)


@contextmanager
def others(group: Group, session: Session, what: str) -> Iterator[bool]:
    """True on the first rank, which works inside; the others do `what` until it is done."""
    flag = session.folder / f"{session.recipe.run}-{group.share}-{what}.done"
    copy = _copies(group) if what == "streaming" and group.rank else None
    if group.rank == 0:
        # A group of this run that died left its flag: with it there, the others would stop before the first one has begun.
        flag.unlink(missing_ok=True)
    group.barrier()
    if group.rank == 0:
        try:
            yield True
        finally:
            flag.touch()
    else:
        if copy is not None:
            _stream(copy, flag, cuda=group.device.type == "cuda")
        yield False
    group.barrier()
    if group.rank == 0:
        flag.unlink(missing_ok=True)


def _copies(group: Group) -> Callable[[], None]:
    """A few copies of memory, queued."""
    import torch

    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    size = (_STREAMED_BYTES if group.device.type == "cuda" else MIB) // 4
    source = torch.randn(size, device=group.device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    copy()
    return copy


def _stream(copy: Callable[[], None], flag: Path, *, cuda: bool) -> None:
    """Copies memory until the flag is there, always with copies queued; whatever the time, for the first rank's last batch
    may end after it. Were that rank to die, the parent would end this one."""
    import torch

    waiting: list[torch.cuda.Event] = []
    while not flag.exists():
        copy()
        if cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            waiting.append(done)
            if len(waiting) > 1:
                waiting.pop(0).synchronize()
