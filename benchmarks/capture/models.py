"""Captures a training step of every model in `models.toml`, predicts it, and says which were captured and which were not.

A model counts as captured where its step becomes a workload, the parameters in it are the model's own count, and less than 2 %
of its device time is guessed. Each runs in a process of its own.

    python benchmarks/capture/models.py [NAME ...] [-o FILE] [--jobs N] [--resume]

NAME is the beginning of a name such as timm/ or transformers/Bert; without one the whole list runs (244 steps of 4 s each on a
core). FILE is written after every model; `--resume` takes what is in it as done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from steps import Case, cases, step_of

LIMIT_S = 240
MOST_GUESSED = 0.02
PLATFORM = "1xh200"


@dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    name: str
    failure: str  # one line; empty where it was captured
    seconds: float
    parameters: int = 0
    step_time_ms: float = 0.0
    guessed: float = 0.0  # share of device time


def outcome(case: Case) -> Outcome:
    """Captures and predicts one model here."""
    import steptime

    start, own = time.perf_counter(), []

    def make() -> object:
        step, count = step_of(case)
        own.append(count)
        return step

    try:
        workload = steptime.capture(make)
        prediction = steptime.predict(workload, platform=PLATFORM)
    except steptime.SteptimeError as error:
        return Outcome(case.name, str(error).partition(": ")[2], time.perf_counter() - start)
    guessed = prediction.coverage.get("fallback", 0.0)
    counted = workload.description.parameters
    failure = f"parameters: {counted} in the workload, {own[0]} in the model" if counted != own[0] else ""
    if guessed >= MOST_GUESSED:
        failure = f"{guessed:.1%} of the device time is guessed"
    return Outcome(case.name, failure, time.perf_counter() - start, own[0], prediction.step_time_ms, guessed)


def _run(case: Case, wire: Connection) -> None:
    wire.send(outcome(case))


def apart(case: Case) -> Outcome:
    """The same in a process of its own, ended after a while."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(case, there))
    process.start()
    there.close()
    try:
        result: Outcome = here.recv() if here.poll(LIMIT_S) else Outcome(case.name, f"not done after {LIMIT_S} s", LIMIT_S)
    except EOFError:
        result = Outcome(case.name, "its process ended", 0.0)
    if process.is_alive():
        process.join(5)
        process.kill()
    process.join()
    return result


def table(rows: Iterable[Outcome]) -> Iterator[str]:
    """Rates by library, and what failed."""
    rows = list(rows)
    yield "| library | captured | of |"
    yield "|---|---|---|"
    for library in dict.fromkeys(row.name.partition("/")[0] for row in rows):
        own = [row for row in rows if row.name.startswith(f"{library}/")]
        yield f"| {library} | {sum(not row.failure for row in own)} | {len(own)} |"
    good = sum(not row.failure for row in rows)
    yield f"| all | {good} ({good / len(rows):.1%}) | {len(rows)} |"
    yield ""
    yield from (f"- {row.name}: {row.failure}" for row in rows if row.failure)


def _import_libraries() -> None:
    """Once, for every process: they take longer than most captures."""
    from steptime._capture.vision_ops import declared_when_imported

    declared_when_imported()
    for name in ("steptime._capture.capture", "torchvision", "timm", "transformers"):
        importlib.import_module(name)


def keep(rows: Sequence[Outcome], output: Path | None) -> None:
    """Writes the rows, where asked to."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


def finish(rows: Sequence[Outcome], output: Path | None) -> None:
    """Prints the table and, where asked to, keeps the rows."""
    print("\n".join(table(rows)))
    keep(rows, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    resumed = args.resume and args.output is not None and args.output.is_file()
    rows = [Outcome(**row) for row in json.loads(args.output.read_text(encoding="utf-8"))] if resumed else []
    done = {row.name for row in rows}
    chosen = [case for case in cases() if not args.names or case.name.startswith(tuple(args.names))]
    chosen = [case for case in chosen if case.name not in done]
    _import_libraries()
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(apart, chosen):
            print(f"{row.name}: {row.failure or f'{row.step_time_ms:.1f} ms'} ({row.seconds:.0f} s)", flush=True)
            rows.append(row)
            keep(rows, args.output)
    finish(rows, args.output)


if __name__ == "__main__":
    main()
