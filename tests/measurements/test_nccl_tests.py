from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from steptime._measurements.nccl_tests import (
    kind_of,
    read_nccl_tests,
)
from steptime.errors import InputError

TABLES = Path(__file__).parents[2] / "scripts" / "published_tables.py"
RANKS = "\n".join(
    f"#  Rank {rank:2} Group  0 Pid  1{rank} on  host{rank // 2} device {rank % 2:2} [0000:0{rank}:00] NVIDIA H100 80GB HBM3"
    for rank in range(4)
)
HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
TEXT = f"""\
# nccl-tests version 2.17.9 nccl-headers=22903 nccl-library=22902
# Collective test starting: alltoall_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
{RANKS}
#
{HEADER}
     1048576         65536     float    none      -1    45.25   23.17   17.38     N/A    44.90   23.35   17.51     N/A
     2097152        131072     float    none      -1    1.1e2   19.06   14.30     N/A    90.00   23.30   17.48     N/A
     4194304        262144     float    none      -1
     8388608        262144     float    none      -1     oops   19.06   14.30     N/A    90.00   23.30   17.48     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 17.4
"""


def write(folder: Path, text: str, name: str = "log.txt") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_text_table_becomes_points_and_damaged_rows_are_counted(tmp_path: Path) -> None:
    found = read_nccl_tests(write(tmp_path, TEXT))
    assert [(one.kind, one.ranks, one.nodes, one.bytes, one.ns) for one in found.points] == [
        ("all_to_all", 4, 2, 1048576, 45250.0),
        ("all_to_all", 4, 2, 2097152, 110000.0),
    ]
    assert found.skipped == 2
    assert {(one.nccl, one.device) for one in found.points} == {("2.29.2", "NVIDIA H100 80GB HBM3")}


def test_a_log_of_several_runs_keeps_them_apart(tmp_path: Path) -> None:
    other = TEXT.replace("alltoall_perf", "all_reduce_perf").replace(RANKS, "\n".join(RANKS.splitlines()[:2]))
    found = read_nccl_tests(write(tmp_path, TEXT + other))
    assert [(one.kind, one.ranks, one.nodes) for one in found.points] == [("all_to_all", 4, 2)] * 2 + [("all_reduce", 2, 1)] * 2


def test_old_output_is_told_its_collective_by_the_file_or_the_caller(tmp_path: Path) -> None:
    old = TEXT.replace("# Collective test starting: alltoall_perf\n", "")
    assert {one.kind for one in read_nccl_tests(write(tmp_path, old, "reduce_scatter_perf.log")).points} == {"reduce_scatter"}
    assert {one.kind for one in read_nccl_tests(write(tmp_path, old), kind="broadcast").points} == {"broadcast"}
    with pytest.raises(InputError, match=r"4 damaged or unknown rows.*the file's name has to"):
        read_nccl_tests(write(tmp_path, old))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_reduce_8.log", "all_reduce"),
        ("2-gpus.all-reduce-perf.txt", "all_reduce"),
        ("node1_allgather8.log", "all_gather"),
        ("reduce_scatter_4gpus.log", "reduce_scatter"),
        ("run3_reduce.log", "reduce"),
    ],
)
def test_a_file_may_be_named_after_more_than_its_collective(tmp_path: Path, name: str, kind: str) -> None:
    old = TEXT.replace("# Collective test starting: alltoall_perf\n", "")
    assert {one.kind for one in read_nccl_tests(write(tmp_path, old, name)).points} == {kind}


def test_a_file_named_after_two_collectives_does_not_say_which(tmp_path: Path) -> None:
    old = TEXT.replace("# Collective test starting: alltoall_perf\n", "")
    with pytest.raises(InputError, match="the file's name has to"):
        read_nccl_tests(write(tmp_path, old, "all_reduce_and_broadcast.log"))


def test_older_columns_are_found_by_their_names(tmp_path: Path) -> None:
    text = f"""\
# Using devices
{RANKS}
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
     1048576         65536   float    33.00   23.17   17.38  0e+00    44.90   23.35   17.51  0e+00
"""
    assert [one.ns for one in read_nccl_tests(write(tmp_path, text, "all_gather.txt")).points] == [pytest.approx(33000)]


def test_a_cpu_time_and_stamps_at_the_end_do_not_disturb(tmp_path: Path) -> None:
    text = TEXT.replace("time   algbw", "cputime   algbw").replace("17.51     N/A", "17.51     N/A  2026-01-28 01:02:03")
    assert len(read_nccl_tests(write(tmp_path, text)).points) == 2


def content(**changes: object) -> dict[str, object]:
    row = {
        "size": 1024,
        "count": 256,
        "type": "float",
        "out_of_place": {"time": 12.5, "alg_bw": 1.0},
        "in_place": {"time": 9.0},
    }
    devices = [{"rank": 4 * place, "hostname": f"host{place}", "device_info": "NVIDIA A100"} for place in range(2)]
    return {
        "version": 1,
        "args": ["./build/sendrecv_perf", "-g", "4"],
        "nccl_version": 22807,
        "config": {"nthreads": 1, "ngpus": 4, "devices": devices},
        "results": [row, {**row, "out_of_place": None}],
        **changes,
    }


def test_json_becomes_the_same_points(tmp_path: Path) -> None:
    found = read_nccl_tests(write(tmp_path, json.dumps(content()), "out.json"))
    (one,) = found.points
    assert (one.kind, one.ranks, one.nodes, one.bytes, one.ns) == ("send_recv", 8, 2, 1024, 12500.0)
    assert (one.nccl, one.device) == ("2.28.7", "NVIDIA A100")
    assert found.skipped == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing here\n",
        "{",
        "{}",
        json.dumps(content(results=[])),
        json.dumps(content(config={"devices": 3})),
        json.dumps(content(args=["hypercube_perf"])),
        TEXT.split("     1048576", maxsplit=1)[0],
        TEXT.replace("alltoall_perf", "hypercube_perf"),
    ],
)
def test_output_without_results_is_one_clear_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nccl_tests(write(tmp_path, text))
    assert "log.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not readable"):
        read_nccl_tests(tmp_path / "absent.txt")


def test_names_of_programs_files_and_columns_are_understood() -> None:
    assert kind_of("/opt/nccl-tests/build/all_reduce_perf") == "all_reduce"
    assert kind_of("alltoall") == "all_to_all"
    assert kind_of("sendrecv") == "send_recv"
    assert kind_of("scatter") is None


def zipped(folder: Path, text: str, name: str = "table.csv.gz") -> Path:
    file = folder / name
    file.write_bytes(gzip.compress(text.encode()))
    return file


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("published_tables", TABLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_tables_become_points(tmp_path: Path, tables: Any) -> None:
    single = tables.read_single_node_table(
        zipped(
            tmp_path,
            "gpu,nccl,collective,dtype,num_gpus,nbytes,us\nh100,2.29.2,alltoall,half,4,512,9.5\nh100,2,scatter,half,4,5,9\n",
        )
    )
    assert [(one.kind, one.ranks, one.nodes, one.bytes, one.ns) for one in single.points] == [("all_to_all", 4, 1, 512, 9500.0)]
    assert single.skipped == 1
    multi = tables.read_multi_node_table(
        zipped(
            tmp_path,
            "source,collective,device,n_ranks,n_nodes,nccl,size_bytes,time_us_oop\n"
            "a:b.log,sendrecv,H100,16.0,2.0,22902,1024,3.5\na:b.log,sendrecv,H100,,2.0,22902,1024,3.5\n",
        )
    )
    (one,) = multi.points
    assert (one.kind, one.ranks, one.nodes, one.nccl, one.source, multi.skipped) == ("send_recv", 16, 2, "2.29.2", "a:b.log", 1)
    profiled = tables.read_profiled_table(
        zipped(
            tmp_path, "size,num_workers,devices_per_node,time_stats.all_reduce.median\n2048,8,4,0.043\n", "all_reduce.csv.gz"
        )
    )
    assert [(one.ranks, one.nodes, round(one.ns)) for one in profiled.points] == [(8, 2, 43000)]


def test_a_table_without_its_columns_says_which_are_there(tmp_path: Path, tables: Any) -> None:
    with pytest.raises(InputError, match="there are gpu, us"):
        tables.read_single_node_table(zipped(tmp_path, "gpu,us\nh100,3\n"))
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(b"gpu,us\n" * 100)[:20])
    with pytest.raises(InputError, match="not readable"):
        tables.read_single_node_table(broken)
