"""`steptime measure check`: everything small on a real GPU, and what only a real GPU can show to be right."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._lookups.generators import Generator
from steptime._measurements.sets import COLLECTIVES, HOST, MeasuredSet
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measure.command import JOBS
from steptime_lab.measurements.sets import KERNELS, LOOKUPS, SHARDING, STEP_KERNELS, STEPS
from steptime_lab.workloads.table_batched.layout import Layout as TableLayout
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
from steptime_lab.workloads.torch_arrays import TorchArrays, side_by_side

# Job -> the ranks it is tried on, and the sets that must have got rows.
TRIED: dict[str, tuple[tuple[int, ...], tuple[MeasuredSet, ...]]] = {
    "kernels": ((1,), (KERNELS,)),
    "lookups": ((1,), (LOOKUPS,)),
    "host": ((1,), (HOST,)),
    "collectives": ((2,), (COLLECTIVES,)),
    "steps": ((2, 1), (STEPS, STEP_KERNELS)),
    "sharding": ((2,), (SHARDING,)),
    "calibrate": ((1,), ()),
}
# Kernel records and CUDA events must tell the same story where launching is no part of it.
AGREEMENT = 0.15


def run(session: Session, options: Options) -> None:
    """Tries every job, then the checks that need the device; says what failed and raises if anything did."""
    failures = []
    try:
        run_ranks(__name__, Layout(1, options.share_gpu, options.device), session.to_plan(), limit_s=300)
    except RanksError as error:
        failures.append(f"mathematics on the device: {error}")
    for job, (ranks, sets) in TRIED.items():
        if options.only and job not in options.only:
            continue
        before = {each.name: read(session.folder, each).num_rows for each in sets}
        together = options.share_gpu or options.device == "cpu"
        fitting = tuple(count for count in ranks if together or count <= max(1, session.recipe.gpus))
        if not fitting:
            session.warn(f"{job}: needs {min(ranks)} ranks and there is one GPU; not tried without --share-gpu")
            continue
        failures += _try(job, session, replace(options, ranks=fitting, small=True, only=()))
        failures += [
            f"{job}: no rows in {each.name}" for each in sets if read(session.folder, each).num_rows <= before[each.name]
        ]
    failures += disagreements(read(session.folder, KERNELS).to_pylist())
    for failure in failures:
        session.warn(failure)
    if failures:
        raise InputError(f"{len(failures)} of the checks failed; the first: {failures[0]}")


def names(_: Options) -> list[str]:
    """What `--only` may name: jobs."""
    return list(TRIED)


def _try(job: str, session: Session, options: Options) -> list[str]:
    try:
        JOBS[job].load().run(session, options)
    except InputError as error:
        return [f"{job}: {error}"]
    except Exception as error:
        # Whatever it is: the next job is tried too, and all failures are said at the end.
        traceback.print_exc()
        return [f"{job}: {type(error).__name__}: {error}"]
    return []


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Kernel records and CUDA events of calls longer than 50 us must agree, but for exceptions."""
    pairs = [(row["event_ns"] / row["time_ns"], row["op"]) for row in rows if row["event_ns"] and row["time_ns"] > 50_000]
    far = [pair for pair in pairs if abs(pair[0] - 1) > AGREEMENT]
    if len(far) * 4 <= len(pairs):
        return []
    return [f"kernels: events and records disagree in {len(far)} of {len(pairs)} calls, e.g. {far[0][1]} by {far[0][0]:.2f}x"]


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """What needs the device: the same indices as on the CPU, and the table-batched lookup as on the CPU."""
    del session, plan
    check_indices(group.device)
    for optimizer in ("sgd", "rowwise_adagrad"):
        for weighted in (False, True):
            check_lookup(group.device, optimizer, weighted=weighted)


def check_indices(device: torch.device) -> None:
    """The same generator gives the same bits here and on the device."""
    generators = [
        Generator(rows=100_003, pooling=13.0, seed=5),
        Generator(rows=999_983, pooling=7.5, kind="power", alpha=4.0, lengths="geometric", locality=0.3, seed=6),
        Generator(rows=50_021, pooling=20.0, kind="zipf", alpha=1.1, lengths="uniform", seed=7),
    ]
    for generator in generators:
        here, there = generator.bags(2048, 1), generator.bags(2048, 1, TorchArrays(device))
        if not torch.equal(torch.from_numpy(here.indices), there.indices.cpu()):
            raise RuntimeError(f"{generator.kind}: the device draws other indices than the CPU")
        if not torch.equal(torch.from_numpy(here.offsets), there.offsets.cpu()):
            raise RuntimeError(f"{generator.kind}: the device draws other offsets than the CPU")


def check_lookup(device: torch.device, optimizer: str, *, weighted: bool) -> None:
    """Two steps of the table-batched lookup on the device and on the CPU: the same output, the same tables afterwards."""
    torch.manual_seed(3)
    rows, dims, batch = (7, 100_003, 1, 5_000), (16, 64, 128, 24), 512
    arrays = TorchArrays(torch.device("cpu"))
    streams = [
        Generator(rows=count, pooling=pooling, kind="power", alpha=3.0, lengths="geometric", seed=number).bags(batch, 0, arrays)
        for number, (count, pooling) in enumerate(zip(rows, (40.0, 10.0, 3.0, 0.0), strict=True))
    ]
    indices, offsets = side_by_side(streams)
    scales = torch.rand(len(indices)) if weighted else None
    weights = torch.randn(TableLayout(rows, dims, torch.device("cpu")).elements)
    here = TableBatchedLookup(rows, dims, optimizer=optimizer, weights=weights.clone())
    there = TableBatchedLookup(rows, dims, optimizer=optimizer, weights=weights.to(device))
    for _ in range(2):
        gradient = torch.randn(batch, sum(dims))
        expected = here(indices, offsets, scales)
        got = there(indices.to(device), offsets.to(device), None if scales is None else scales.to(device))
        expected.backward(gradient)
        got.backward(gradient.to(device))
        torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(there.weights.cpu(), here.weights, rtol=1e-4, atol=1e-3)
