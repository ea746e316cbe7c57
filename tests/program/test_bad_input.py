"""Bad input: every kind of it gives a result with a warning that names what was lost, or one clear line; nothing else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.program.damaged import (
    WORKS,
    Change,
    assert_told_with_every_answer,
    changed,
    job,
    kernel,
    read,
    refused,
    said,
    without,
)
from tests.program.mutations import tar
from tests.program.small_traces import Json, small_chakra, small_et, small_kineto, small_saved

from steptime._program.load import load
from steptime._sim.prediction import predict
from steptime._sim.recorded.replay import replay
from steptime.errors import InputError, TraceError

# Files that are cut short or damaged.


def test_a_trace_cut_short_is_read_as_far_as_it_goes_and_every_answer_says_so(tmp_path: Path) -> None:
    data = small_kineto(0)
    whole = read(tmp_path, data)
    workload = read(tmp_path, data[: len(data) * 3 // 4])
    assert 0 < len(workload.programs[0].ops) < len(whole.programs[0].ops)
    assert_told_with_every_answer(workload, "rank0.json", "breaks off before its end")


def test_a_compressed_trace_cut_short_keeps_what_came_before(tmp_path: Path) -> None:
    data = gzip.compress(small_kineto(0), mtime=0)
    workload = read(tmp_path, data[: len(data) * 3 // 4], "rank0.json.gz")
    assert len(workload.programs[0].works) > 0
    assert said(workload, "rank0.json.gz", "breaks off before its end", "end-of-stream")


def test_compressed_data_that_breaks_at_once_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(small_kineto(0), mtime=0)[:14])
    assert "empty" not in refused([tmp_path / "rank0.json.gz"], "rank0.json.gz", "damaged")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_cut_short_is_one_clear_line(tmp_path: Path, mode: str) -> None:
    data = tar({"rank0.json": small_kineto(0), "rank1.json": small_kineto(1)}, mode)
    (tmp_path / "run.tar.gz").write_bytes(data[: len(data) // 2])
    refused([tmp_path], "run.tar.gz", "not a readable tar archive")


def test_a_damaged_event_costs_only_itself_and_is_counted(tmp_path: Path) -> None:
    data = small_kineto(0)
    at = data.index(b'"cat": "kernel"')
    workload = read(tmp_path, data[:at] + b"}]}" + data[at + 3 :])
    whole = read(tmp_path, data)
    assert len(whole.programs[0].works) - 2 <= len(workload.programs[0].works) < len(whole.programs[0].works)
    assert_told_with_every_answer(workload, "rank0.json", "not valid JSON")


@pytest.mark.parametrize(
    "damage", [rb"C:\models\dlrm \q", b"caf\xe9 \xff\xfe", b"tab\there\x00null", b"line\nbreak", rb"\u12", rb"C:\\fine \qad"]
)
def test_bad_escapes_and_bytes_that_are_no_utf_8_cost_no_event(tmp_path: Path, damage: bytes) -> None:
    data = small_kineto(0).replace(b'"name": "record_param_comms"', b'"name": "' + damage + b'"', 1)
    workload = read(tmp_path, data)
    assert len(workload.programs[0].ops) == len(read(tmp_path, small_kineto(0)).programs[0].ops)
    assert said(workload, "rank0.json", "repaired")


@pytest.mark.parametrize("data", [b"", b" \n\t \r\n", gzip.compress(b"", mtime=0), b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "job.0.et"])
def test_an_empty_file_is_one_clear_line(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    refused([tmp_path / name], name)


def test_a_binary_file_named_like_a_trace_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(bytes(range(256)) * 64)
    refused([tmp_path / "rank0.json.gz"], "rank0.json.gz", "not a Kineto")


# Values of the wrong type, and numbers that cannot be.

ODD_VALUES: dict[str, Change] = {
    "a time that is a list": lambda d: kernel(d).update(ts=[1]),
    "a time that is nothing": lambda d: kernel(d).update(ts=None),
    "a time that is an object": lambda d: kernel(d).update(ts={"us": 1}),
    "times that are all lists": lambda d: [e.update(ts=[e["ts"]]) for e in d["traceEvents"] if e.get("cat") == "kernel"],
    "durations that are all lists": lambda d: [e.update(dur=[1]) for e in d["traceEvents"] if e.get("cat") == "kernel"],
    "threads that are all lists": lambda d: [e.update(tid=[7]) for e in d["traceEvents"] if e.get("cat") == "cpu_op"],
    "a thread that is text": lambda d: kernel(d).update(tid="stream seven", args={}),
    "arguments that are text": lambda d: kernel(d).update(args="none"),
    "arguments that are a list": lambda d: kernel(d).update(args=[1, 2]),
    "a name that is a number": lambda d: kernel(d).update(name=7),
    "a category that is nothing": lambda d: kernel(d).update(cat=None),
    "an event that is a number": lambda d: d["traceEvents"].insert(3, 7),
    "a correlation that is text": lambda d: kernel(d)["args"].update(correlation="x"),
    "a stream beyond every integer": lambda d: kernel(d)["args"].update(stream=10**30),
    "a correlation beyond every integer": lambda d: kernel(d)["args"].update(correlation=2**64),
    "a time of not a number": lambda d: kernel(d).update(ts=float("nan")),
    "an infinite duration": lambda d: kernel(d).update(dur=float("inf")),
    "a time beyond every integer": lambda d: kernel(d).update(ts=10**40),
    "a time in the year 5000": lambda d: kernel(d).update(ts=9 * 10**16),
    "a time long before the others": lambda d: kernel(d).update(ts=-(10**12)),
    "a duration of thirty years": lambda d: kernel(d).update(dur=10**15),
    "a negative duration": lambda d: kernel(d).update(dur=-5.5),
}


@pytest.mark.parametrize("what", ODD_VALUES)
def test_an_odd_value_costs_an_event_at_most_and_is_said(tmp_path: Path, what: str) -> None:
    workload = read(tmp_path, changed(ODD_VALUES[what]))
    steps = replay(workload).steps
    assert steps and all(0 < s.measured_ns < 10**9 and 0 <= s.predicted_ns < 10**9 for s in steps)
    words = ("left out", "not valid JSON", "no launch", "wrong types", "end before they start")
    assert any(said(workload, "rank0.json", word) for word in words), workload.warnings


ODD_HEADERS: dict[str, Json] = {
    "rank": {"distributedInfo": {"rank": "one", "world_size": "four"}},
    "negative rank": {"distributedInfo": {"rank": -1, "world_size": -4}},
    "a world of billions": {"distributedInfo": {"rank": 0, "world_size": 10**10}},
    "a list": {"distributedInfo": [1, 2]},
    "groups": {
        "distributedInfo": {"rank": 0, "world_size": 4, "pg_config": [{"pg_name": ["0"], "ranks": [10**30, "a", -1]}, 7]}
    },
    "devices": {"deviceProperties": {"id": 0}},
    "device": {"deviceProperties": [7, {"id": 0, "name": ["H200"]}]},
    "base time": {"baseTimeNanoseconds": "yesterday"},
    "base time beyond every integer": {"baseTimeNanoseconds": 10**40},
}


@pytest.mark.parametrize("what", ODD_HEADERS)
def test_an_odd_header_costs_no_event(tmp_path: Path, what: str) -> None:
    workload = read(tmp_path, changed(lambda d: d.update(ODD_HEADERS[what])))
    assert workload.ranks == (0,)
    assert len(workload.programs[0].works) == len(read(tmp_path, small_kineto(0)).programs[0].works)
    assert replay(workload).steps


@pytest.mark.parametrize("events", [{}, None, "x", 7, {"0": {"ph": "X"}}])
def test_events_that_are_no_list_are_one_clear_line(tmp_path: Path, events: Any) -> None:
    (tmp_path / "rank0.json").write_bytes(changed(lambda d: d.update(traceEvents=events)))
    refused([tmp_path], "rank0.json", "no traceEvents", kind=TraceError)


def test_step_numbers_beyond_every_integer_are_replaced_by_their_order(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        for event in document["traceEvents"]:
            if str(event.get("name")).startswith("ProfilerStep#"):
                event["name"] += "9" * 5000

    workload = read(tmp_path, changed(change))
    assert workload.programs[0].steps == (0, 1)


def test_streams_with_absurd_numbers_are_kept_apart(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        kernel(document, 0)["args"].update(stream=2**62, device=2**40)
        kernel(document, 1)["args"].update(stream=2**62 + 2**32, device=2**40 - 1)

    workload = read(tmp_path, changed(change))
    ids = {(s.id, s.device) for s in workload.programs[0].streams}
    assert {(2**62, 2**40), (2**62 + 2**32, 2**40 - 1)} <= ids


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_deep_nesting_costs_an_event_at_most(tmp_path: Path, bracket: str, depth: int) -> None:
    closing = "]" if bracket == "[" else "}"
    deep = f'"args": {{"Concrete Inputs": {bracket * depth}0{closing * depth}, '
    data = small_kineto(0).decode().replace('"args": {', deep, 1)
    workload = read(tmp_path, data.encode())
    assert len(workload.programs[0].works) >= len(read(tmp_path, small_kineto(0)).programs[0].works) - 1


def test_arguments_that_hold_deep_text_are_kept_as_text(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        op = next(e for e in document["traceEvents"] if "Input Dims" in e.get("args", {}))
        op["args"].update(
            {"Input Dims": [[], 5], "Input type": ["Scalar", "TensorList"], "Concrete Inputs": ["[" * 50_000, ""]}
        )

    workload = read(tmp_path, changed(change))
    assert any(s.inputs[:1] == ("[" * 50_000,) for s in workload.programs[0].signatures)


# Traces that lack a whole kind of event.


def test_a_trace_without_gpu_events_can_be_read_but_not_replayed(tmp_path: Path) -> None:
    workload = read(tmp_path, changed(without(*WORKS)))
    assert len(workload.programs[0].ops) > 0
    for use in (replay, predict):
        with pytest.raises(InputError, match=r"rank0\.json: has no device times"):
            use(workload)


def test_a_trace_without_ops_is_replayed_from_its_calls(tmp_path: Path) -> None:
    workload = read(tmp_path, changed(without("cpu_op", "user_annotation")))
    assert_told_with_every_answer(workload, "rank0.json", "no ProfilerStep marks")


def test_a_filtered_trace_without_calls_says_that_launches_are_missing(tmp_path: Path) -> None:
    workload = read(tmp_path, changed(without("cuda_runtime", "cuda_driver")))
    assert_told_with_every_answer(workload, "rank0.json", "no launch")
    whole = replay(read(tmp_path, small_kineto(0)))
    assert replay(workload).steps[-1].measured_ns == pytest.approx(whole.steps[-1].measured_ns, rel=0.3)


def test_a_kernel_without_its_launch_starts_where_it_was_seen_and_is_counted(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        lost = kernel(document, 10)["args"]["correlation"]
        document["traceEvents"] = [
            e for e in document["traceEvents"] if e.get("cat") in WORKS or e.get("args", {}).get("correlation") != lost
        ]

    assert_told_with_every_answer(read(tmp_path, changed(change)), "rank0.json", "1 of", "no launch")


def test_launches_whose_work_was_lost_are_counted_and_what_that_costs(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        document["traceEvents"].remove(kernel(document, 4))
        document["traceEvents"].remove(kernel(document, 8))

    assert_told_with_every_answer(read(tmp_path, changed(change)), "rank0.json", "2 of", "no device event", "too short")


def test_events_that_occur_twice_count_once(tmp_path: Path) -> None:
    whole = read(tmp_path, small_kineto(0))
    twice = read(tmp_path, changed(lambda d: d["traceEvents"].extend(d["traceEvents"][20:60])))
    assert twice.programs[0].works == whole.programs[0].works
    assert twice.programs[0].collectives == whole.programs[0].collectives
    assert_told_with_every_answer(twice, "rank0.json", "occur twice", "count once")


# Several files.


def test_a_second_trace_of_a_rank_is_refused(tmp_path: Path) -> None:
    (job(tmp_path) / "zz.json").write_bytes(small_kineto(2))
    refused([tmp_path], "rank 2 has two traces", "zz.json")


def test_a_missing_rank_is_named_and_what_that_costs(tmp_path: Path) -> None:
    (job(tmp_path) / "rank2.json").unlink()
    assert_told_with_every_answer(load([tmp_path]), "1 of 4 ranks", "(2)", "known only where others met them")


def test_traces_of_jobs_of_different_sizes_are_refused(tmp_path: Path) -> None:
    job(tmp_path, rank3=changed(lambda d: d["distributedInfo"].update(world_size=8), 3))
    refused([tmp_path], "different jobs", "rank3.json")


def test_traces_of_different_programs_are_said_to_be(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        for event in document["traceEvents"]:
            if "nccl" in str(event.get("name")) and event.get("cat") == "kernel":
                event["args"]["Collective name"] = "reduce_scatter"

    assert_told_with_every_answer(load([job(tmp_path, rank1=changed(change, 1))]), "differ between ranks", "rank1.json")


def test_a_rank_that_lacks_a_collective_is_named_and_what_that_costs(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        last = max(e["ts"] for e in document["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"])
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "kernel" or e["ts"] != last]

    workload = load([job(tmp_path, rank1=changed(change, 1))])
    assert_told_with_every_answer(workload, "1 collectives are missing", "rank1.json", "do not wait for it")


def test_clocks_that_nothing_ties_together_are_refused(tmp_path: Path) -> None:
    def alone(document: Json) -> None:
        document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in str(e.get("name"))]

    def year_later(document: Json) -> None:
        alone(document)
        document["baseTimeNanoseconds"] += 365 * 24 * 3600 * 10**9

    (tmp_path / "rank0.json").write_bytes(changed(alone, 0))
    (tmp_path / "rank1.json").write_bytes(changed(year_later, 1))
    with pytest.raises(InputError, match=r"rank1\.json: begins 3153\d+ s after"):
        replay(load([tmp_path]))


def test_a_folder_without_traces_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    refused([tmp_path], str(tmp_path), "no trace files")


def test_unrelated_json_is_left_out_and_named_beside_traces_and_refused_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr": 0.1, "layers": [1, 2, 3]}')
    refused([tmp_path], str(tmp_path), "config.json")
    assert said(load([job(tmp_path)]), "left out", "config.json")


# Execution traces, Chakra traces, saved workloads.


def test_dangling_parents_and_circles_in_an_execution_trace_are_said(tmp_path: Path) -> None:
    document = json.loads(small_et(0))
    nodes = [n for n in document["nodes"] if not n["name"].startswith("[")]
    nodes[5]["ctrl_deps"] = 10**9
    nodes[8]["ctrl_deps"], nodes[9]["ctrl_deps"] = nodes[9]["id"], nodes[8]["id"]
    (tmp_path / "rank0.json").write_bytes(small_kineto(0))
    workload = read(tmp_path, json.dumps(document).encode(), "rank0.et.json")
    assert said(workload, "rank0.et.json", "parent that is not there")
    assert said(workload, "rank0.et.json", "circles of parents")
    linked = load([tmp_path])
    assert_told_with_every_answer(linked, "rank0.et.json", "circles of parents")


def test_a_number_beyond_every_float_costs_one_node_of_a_damaged_execution_trace(tmp_path: Path) -> None:
    data = small_et(0).rstrip().removesuffix(b"}").replace(b'"values": [', b'"values": [1e999, ', 1)
    whole = read(tmp_path, small_et(0), "rank0.et.json")
    workload = read(tmp_path, data, "rank0.et.json")
    assert len(workload.programs[0].ops) >= len(whole.programs[0].ops) - 1
    assert said(workload, "rank0.et.json", "damaged or cut short")


def test_an_execution_trace_of_another_program_is_not_linked_and_that_is_said(tmp_path: Path) -> None:
    document = json.loads(small_et(0))
    for number, node in enumerate(document["nodes"]):
        node["name"] = f"other::op{number}"
    (tmp_path / "rank0.json").write_bytes(small_kineto(0))
    (tmp_path / "rank0.et.json").write_bytes(json.dumps(document).encode())
    workload = load([tmp_path])
    assert (workload.programs[0].ops.node < 0).all()
    assert_told_with_every_answer(workload, "rank0.json: 0 of", "rank0.et.json")


def test_a_chakra_trace_cut_short_says_so(tmp_path: Path) -> None:
    data = small_chakra(0)
    workload = read(tmp_path, data[: len(data) // 2], "job.0.et")
    assert 0 < len(workload.programs[0].works) < 60
    assert said(workload, "job.0.et", "breaks off")


def test_a_chakra_trace_without_host_times_is_not_replayed_as_if_hosts_were_free(tmp_path: Path) -> None:
    workload = read(tmp_path, small_chakra(0), "job.0.et")
    with pytest.raises(InputError, match=r"job\.0\.et: .* have no times"):
        replay(workload)


def test_a_saved_workload_of_another_version_is_one_clear_line(tmp_path: Path) -> None:
    document = json.loads(small_saved())
    document["steptime_workload"] = 99
    (tmp_path / "w.json").write_text(json.dumps(document))
    refused([tmp_path], "w.json", "version 99")


def test_a_saved_workload_whose_ops_enclose_each_other_is_refused(tmp_path: Path) -> None:
    document = json.loads(small_saved())
    document["programs"][0]["ops"]["parent"][:2] = [1, 0]
    (tmp_path / "w.json").write_text(json.dumps(document))
    refused([tmp_path], "w.json", "enclosed by itself")
