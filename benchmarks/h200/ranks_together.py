"""What ranks on parts of one GPU do to each other: exchanges that they reach and leave one by one, lookups side by side.

    PYTHONPATH=src python3 benchmarks/h200/ranks_together.py --out DIR [--ranks 4]
        writes DIR/exchanges.json and DIR/lookups.json; a minute on four quarters of an H200

Exchanges: as in a step of a sharded DLRM, forward and backward one after the other, with drawn columns a rank, after drawn
pauses. Lookups: tables of drawn tasks on a drawn plan, one rank at a time, beside copying ranks, and all together. They begin
at once or after drawn pauses: backward, a pause as long as the dense layers take, forward. Moments are counted on the
stream of each rank, from an all_reduce that ends everywhere at once.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPEATS = 5
EXCHANGES = 160
# Heavy and ordinary tasks with equal and unequal tables and both optimisers.
KINDS = (0, 1, 3, 6, 8, 13, 5, 11, 16, 18, 20, 21, 22, 25, 27, 30, 32, 33, 37, 38)
# Tasks of the sharding study have seeds from 4000.
SEED = 9000
GAP_NS = 300_000.0
LIMIT_S = 420.0
JSON = dict[str, Any]


class Bench:
    """One rank: marks on its stream, counted from a moment that all ranks share."""

    def __init__(self, group: Any) -> None:
        import torch
        import torch.distributed as dist

        from steptime._calibrate.harness.clock import DeviceClock

        self.group, self.dist = group, dist
        self.token = torch.zeros(1, device=self.group.device)
        dist.all_reduce(self.token)
        self.clock = DeviceClock()

    def begin(self) -> Any:
        """A moment that all ranks share; what is queued next was queued before it."""
        from steptime._calibrate.harness.clock import align

        align(self.group)
        self.clock.run_ahead(600_000.0)
        self.dist.all_reduce(self.token)
        return self.clock.mark()

    def pause(self, duration_ns: float) -> None:
        """The stream does nothing for so long."""
        if duration_ns > 0:
            self.clock.pause(duration_ns)

    def since(self, first: Any, marks: Sequence[Any]) -> list[float]:
        """Nanoseconds of marks since the first."""
        self.clock.wait(marks[-1])
        return [round(self.clock.between_ns(first, mark)) for mark in marks]

    def gathered(self, mine: Sequence[Sequence[float]]) -> list[list[int]]:
        """Of every rank the middle of its repeats, [ranks][marks]."""
        flat = self.group.gather_rows([value for row in mine for value in row])
        readings = np.array(flat).reshape(self.group.ranks, len(mine), -1)
        return np.median(readings, axis=1).round().astype(int).tolist()  # type: ignore[no-any-return]


def exchanges(bench: Bench) -> list[JSON]:
    """Forward and backward exchanges, with what each rank began and ended."""
    import torch

    draws = np.random.default_rng(SEED)
    ranks = bench.group.ranks
    cases: list[JSON] = []
    for number in range(EXCHANGES):
        samples = int(draws.choice([2048, 4096, 8192]))
        mean = float(np.exp(draws.uniform(np.log(16), np.log(160))))
        shares = draws.dirichlet(np.full(ranks, [200.0, 8.0, 3.0][number % 3]))
        columns = np.maximum(8, np.round(mean * ranks * shares / 8) * 8).astype(int).tolist()
        late = float(draws.choice([0.0, 0.5, 1.5, 4.0, 8.0])) * 1e6
        pauses = (late * draws.random((2, ranks)) ** 2).round().tolist()
        if number % 2:
            pauses[1] = [0.0] * ranks  # as the dense layers between the exchanges, alike on all ranks
        cases.append({"samples": samples, "columns": columns, "pauses_ns": pauses})
    largest = max(ranks * case["samples"] * max(case["columns"]) for case in cases)
    whole = max(case["samples"] * sum(case["columns"]) for case in cases)
    own, all_of = (torch.zeros(size, device=bench.group.device) for size in (largest, whole))
    rank, readings = bench.group.rank, [[] for _ in cases]  # type: ignore[var-annotated]
    for repeat in range(REPEATS):
        for at in np.random.default_rng(repeat).permutation(len(cases)):
            case = cases[at]
            sent = [case["samples"] * case["columns"][rank]] * ranks
            received = [case["samples"] * width for width in case["columns"]]
            mine, every = own[: sum(sent)], all_of[: sum(received)]
            first, marks = bench.begin(), []
            for way, (target, source, into, out_of) in enumerate(
                ((every, mine, received, sent), (mine, every, sent, received))
            ):
                bench.pause(case["pauses_ns"][way][rank] + (200_000.0 if way else 0.0))
                marks.append(bench.clock.mark())
                bench.dist.all_to_all_single(target, source, into, out_of)
                marks.append(bench.clock.mark())
            readings[at].append(bench.since(first, marks))
    return [{**case, "marks_ns": bench.gathered(rows)} for case, rows in zip(cases, readings, strict=True)]


def lookups(bench: Bench, file: Path) -> None:
    """Lookups of drawn tasks, each rank alone, beside copies, and beside each other."""
    import torch

    from steptime_lab.workloads.drawn_tasks import drawn_task

    ranks = bench.group.ranks
    copied = torch.zeros(128 << 20, device=bench.group.device)
    into = torch.empty_like(copied)
    found: list[JSON] = []
    for number in range(len(KINDS)):
        task = drawn_task(KINDS[number], SEED + number)
        draws = np.random.default_rng(SEED + number)
        plan = (
            draws.integers(0, ranks, len(task.tables)).tolist()
            if number % 2
            else [at % ranks for at in range(len(task.tables))]
        )
        run = _prepared(bench, task, plan)
        case: JSON = {"task": task.name, "config": task.to_dict(), "batch": task.batch, "plan": plan, "readings": []}
        settings: list[tuple[str, list[float]]] = [("alone", [rank]) for rank in range(ranks)]
        settings += [("copies", [rank]) for rank in range(ranks)]
        settings += [("together", [0.0] * ranks)]
        settings += [("together", (3e6 * draws.random(ranks) ** 2).round().tolist()) for _ in range(3)]
        for kind, values in settings:
            readings = []
            for _ in range(3):
                first, marks = bench.begin(), []
                if kind == "together":
                    bench.pause(values[bench.group.rank])
                    marks = run()
                elif bench.group.rank == values[0]:
                    marks = run()
                elif kind == "copies":
                    for _ in range(60):
                        into.copy_(copied)
                if not marks:
                    marks = [bench.clock.mark()] * 4
                readings.append(bench.since(first, marks))
                bench.group.barrier()
            case["readings"].append({"kind": kind, "values": values, "marks_ns": bench.gathered(readings)})
        found.append(case)
        del run
        gc.collect()
        torch.cuda.empty_cache()
        if bench.group.rank == 0:
            file.write_text(json.dumps({"gap_ns": GAP_NS, "cases": found}), encoding="utf-8")
            print(task.name, flush=True)


def _prepared(bench: Bench, task: Any, plan: Sequence[int]) -> Any:
    """This rank's lookups backward and forward, as a function that leaves four marks."""
    import torch

    from steptime_lab.workloads.shared_buffers import shared_buffers
    from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
    from steptime_lab.workloads.torch_arrays import side_by_side

    mine = [table for table, rank in zip(task.tables, plan, strict=True) if rank == bench.group.rank]
    if not mine:
        return lambda: []
    device = bench.group.device
    bags = side_by_side([shared_buffers(device).bags(table.generator, task.batch, 0) for table in mine])
    lookup = TableBatchedLookup(
        [table.rows for table in mine],
        [table.dim for table in mine],
        optimizer=task.optimizer,
        learning_rate=1e-9,
        device=device,
    )
    gradient = torch.randn(task.batch, sum(table.dim for table in mine), device=device)
    lookup.look_up(*bags)
    lookup.update(gradient, *bags)

    def run() -> list[Any]:
        marks = [bench.clock.mark()]
        lookup.update(gradient, *bags)
        marks.append(bench.clock.mark())
        bench.pause(GAP_NS)
        marks.append(bench.clock.mark())
        lookup.look_up(*bags)
        marks.append(bench.clock.mark())
        return marks

    return run


def work(group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One rank: exchanges, then lookups."""
    bench, out = Bench(group), Path(plan["out"])
    gc.disable()
    measured = exchanges(bench)
    if group.rank == 0:
        (out / "exchanges.json").write_text(json.dumps({"cases": measured}), encoding="utf-8")
        print("exchanges", flush=True)
    lookups(bench, out / "lookups.json")


def main() -> None:
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    on_ranks(__file__, out, Layout(arguments.ranks, share_gpu=True), limit_s=LIMIT_S, out=str(out))


if __name__ == "__main__":
    main()
