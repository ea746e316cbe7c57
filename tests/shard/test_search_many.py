"""Many tasks on several processes and on a cluster."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from tests.shard.additive import model_of

from steptime._platforms.platform import Platform
from steptime._shard.search import search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task

PLATFORM = Platform.load("4xh200-quarter-loopback")
SEARCH = partial(search, platform=PLATFORM, budget=SearchBudget(60))
TASKS = [Task(model_of(6, seed=seed, batch=8192), 4) for seed in range(2)]


@pytest.mark.slow
def test_processes_find_what_one_does() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        found = list(executor.map(SEARCH, TASKS))
    assert [one.options for one in found] == [SEARCH(task).options for task in TASKS]


@pytest.mark.slow
def test_a_dask_cluster_finds_what_one_does(tmp_path: Path) -> None:
    # A worker process of its own, on any free port of this machine alone; what it leaves behind is the test's. A platform goes
    # with its models, about 10 MiB, of which Dask warns.
    with (
        dask.config.set({"temporary-directory": str(tmp_path), "distributed.admin.large-graph-warning-threshold": "64MiB"}),
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        found = list(client.get_executor().map(SEARCH, TASKS))
    assert [one.options for one in found] == [SEARCH(task).options for task in TASKS]
