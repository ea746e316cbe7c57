"""A sweep on a Dask cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import steptime

SMALL = Path(__file__).parents[2] / "examples" / "configs" / "dlrm_small.toml"


@pytest.mark.slow
def test_a_dask_cluster_answers_as_one_process_does(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"batch": [512, 1024, 2048], "settings": {"optimizer": ["sgd", "rowwise_adagrad"]}, "ranks": [2, 3]}
    machines = ["2xh200-nvlink", "8xh100-nvlink"]
    alone = steptime.sweep(SMALL, machines, **asked, workers=1)
    # Worker processes of their own, on any free port of this machine alone; what they leave behind is the test's.
    with (
        dask.config.set({"temporary-directory": str(tmp_path)}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        found = steptime.sweep(SMALL, machines, **asked, executor=client.get_executor(), journal=tmp_path / "journal")
        again = steptime.sweep(SMALL, machines, **asked, executor=client.get_executor(), journal=tmp_path / "journal")
    assert found.to_dict() == alone.to_dict() == again.to_dict()
