"""Laws of loading: any mix of files makes one workload, and whatever was guessed or left out is said."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.program.traces import Trace, Work, plain

from steptime._program.load import load
from steptime._program.workload import Workload
from steptime.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def step_trace(rank: int | None, world_size: int | None, steps: tuple[int, ...] = (1, 2), **options: Any) -> Trace:
    """A step is one kernel and one all-reduce whose place in the job shows in its duration: 1 us per step."""
    trace = Trace(rank=rank, world_size=world_size, **options)
    for step in steps:
        at = 100_000 * step
        trace.step(step, at, at + 90_000)
        trace.launch(at + 1_000, at + 5_000, Work(7, at + 6_000, at + 20_000))
        trace.collective(at + 30_000, at + 39_000, Work(20, at + 40_000, at + 40_000 + 1_000 * step, NCCL))
    return trace


def warned(workload: Workload, text: str) -> bool:
    return any(text in warning for warning in workload.warnings)


def test_ranks_of_a_folder_are_sorted_whatever_the_files_are_called(tmp_path: Path) -> None:
    for name, rank in (("c", 0), ("a", 2), ("b", 1)):
        step_trace(rank, 3).write(tmp_path / f"{name}.json.gz")
    workload = load([tmp_path])
    assert (workload.ranks, workload.world_size, workload.absent) == ((0, 1, 2), 3, ())
    assert workload.warnings == ()


def test_files_folders_and_archives_give_the_same_programs(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    files = [step_trace(rank, 2).write(folder / f"rank{rank}.json") for rank in range(2)]
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for file in files:
            archive.add(file, f"deep/{file.name}")
    expected = [plain(p) for p in load([folder]).programs]
    assert [plain(p) for p in load(files).programs] == expected
    assert [plain(p) for p in load([tmp_path / "all.tar.gz"]).programs] == expected


def test_an_archive_is_decompressed_once_to_list_and_once_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for rank in (2, 0, 3, 1):
            archive.add(step_trace(rank, 4).write(tmp_path / f"rank{rank}.json"), f"rank{rank}.json")
    reader: Any = vars(gzip)["_GzipReader"]
    rewound, rewind = [], reader._rewind

    def counted(self: object) -> None:
        rewound.append(self)
        rewind(self)

    monkeypatch.setattr(reader, "_rewind", counted)
    assert load([tmp_path / "all.tar.gz"]).ranks == (0, 1, 2, 3)
    assert len(rewound) <= 2


def test_the_last_member_of_a_name_counts_and_a_link_of_it_does_not(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for rank, target in enumerate(("first", "second")):
            archive.add(step_trace(rank, 2).write(tmp_path / f"{target}.json"), "deep/trace.json")
        link = tarfile.TarInfo("deep/trace.json")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        archive.addfile(link)
    assert load([tmp_path / "all.tar"]).ranks == (1,)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    step_trace(1, 3).write(tmp_path / "rank1.json")
    workload = load([tmp_path])
    assert workload.absent == (0, 2)
    assert warned(workload, "2 of 3 ranks have no trace here (0, 2)")


def test_a_second_trace_of_a_rank_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        step_trace(0, 1).write(tmp_path / f"{name}.json")
    with pytest.raises(InputError, match=r"rank 0 has two traces, .*one\.json and .*two\.json"):
        load([tmp_path])


def test_a_file_given_twice_is_read_once(tmp_path: Path) -> None:
    step_trace(0, 1).write(tmp_path / "one.json")
    assert load([tmp_path, tmp_path / "one.json"]).ranks == (0,)


def test_files_of_different_jobs_are_refused(tmp_path: Path) -> None:
    step_trace(0, 2).write(tmp_path / "rank0.json")
    step_trace(1, 4).write(tmp_path / "rank1.json")
    with pytest.raises(InputError, match="different jobs"):
        load([tmp_path])


def test_a_rank_beyond_the_world_is_refused(tmp_path: Path) -> None:
    step_trace(0, 2).write(tmp_path / "rank0.json")
    step_trace(7, None).write(tmp_path / "rank7.json")
    with pytest.raises(InputError, match="rank 7 in a job of 2 ranks"):
        load([tmp_path])


def test_a_rank_taken_from_a_name_is_said(tmp_path: Path) -> None:
    for rank in range(2):
        step_trace(None, None).write(tmp_path / f"rank{rank}.json")
    workload = load([tmp_path])
    assert (workload.ranks, workload.world_size) == ((0, 1), 2)
    assert warned(workload, "rank 1 by the name of its file")
    assert warned(workload, "2 are assumed")


def test_ranks_nobody_knows_are_given_in_order_and_said(tmp_path: Path) -> None:
    step_trace(1, 3).write(tmp_path / "known.json")
    for name in ("x", "y"):
        step_trace(None, None).write(tmp_path / f"{name}.json")
    workload = load([tmp_path])
    assert [(p.rank, Path(p.source).name) for p in workload.programs] == [(0, "x.json"), (1, "known.json"), (2, "y.json")]
    assert warned(workload, "taken as rank 0")


def test_collectives_of_no_named_group_are_of_everyone_once_everyone_is_known(tmp_path: Path) -> None:
    for rank in range(3):
        step_trace(None, None).write(tmp_path / f"rank{rank}.json")
    assert {c.ranks for p in load([tmp_path]).programs for c in p.collectives} == {(0, 1, 2)}


def test_windows_that_begin_at_different_steps_meet_at_the_step_they_share(tmp_path: Path) -> None:
    step_trace(0, 2, (3, 4, 5)).write(tmp_path / "rank0.json")
    step_trace(1, 2, (4, 5, 6)).write(tmp_path / "rank1.json")
    workload = load([tmp_path])
    for program in workload.programs:
        works = program.works
        met = {program.collectives[works.collective[r]].sequence: int(works.end_ns[r] - works.start_ns[r]) // 1_000
               for r in range(len(works)) if works.collective[r] >= 0}  # fmt: skip
        assert {0: 4, 1: 5}.items() <= met.items()
    assert warned(workload, "begin at steps 3 to 4")


def test_windows_that_share_no_step_are_said(tmp_path: Path) -> None:
    step_trace(0, 2, (3, 4)).write(tmp_path / "rank0.json")
    step_trace(1, 2, (7, 8)).write(tmp_path / "rank1.json")
    assert warned(load([tmp_path]), "share no step")


def test_one_unreadable_file_among_others_is_left_out_and_named(tmp_path: Path) -> None:
    step_trace(0, 2).write(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text('{"traceEvents": []}')
    (tmp_path / "notes.json").write_text('{"hello": 1}')
    workload = load([tmp_path])
    assert workload.ranks == (0,)
    assert warned(workload, "rank1.json")
    assert warned(workload, "notes.json")


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "empty"), ("{}", "not a Kineto"), ('{"traceEvents": []}', "no framework ops"), ("\x00\x01", "not a Kineto")],
)
def test_a_file_that_holds_nothing_is_one_clear_line(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "rank0.json"
    file.write_text(content)
    with pytest.raises(InputError, match=expected) as failure:
        load([file])
    assert str(failure.value).startswith(str(file))
    assert "\n" not in str(failure.value)


def test_a_folder_without_traces_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing")
    with pytest.raises(InputError, match="no trace files in this folder"):
        load([tmp_path])


def test_a_path_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load([tmp_path / "nowhere"])


@pytest.mark.parametrize("name", ["all.tar.gz", "all.tar"])
def test_an_archive_that_is_none_is_one_clear_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8bnothing of the kind")
    with pytest.raises(InputError, match="not a readable tar archive"):
        load([tmp_path / name])


def test_progress_counts_every_file_up(tmp_path: Path) -> None:
    files = [step_trace(rank, 2).write(tmp_path / f"rank{rank}.json") for rank in range(2)]
    heard: dict[str, list[int]] = {}
    load(files, progress=lambda name, count: heard.setdefault(name, []).append(count))
    assert {name: counts[-1] for name, counts in heard.items()} == {f.name: f.stat().st_size for f in files}


def test_what_lies_beside_traces_is_no_trace(tmp_path: Path) -> None:
    step_trace(0, 1).write(tmp_path / "rank0.json")
    (tmp_path / "measured.json").write_text("{}")
    assert load([tmp_path]).warnings == ()


def test_the_shipped_run_is_four_linked_ranks_of_three_steps() -> None:
    workload = load([EXAMPLE])
    assert (workload.ranks, workload.world_size, workload.absent) == ((0, 1, 2, 3), 4, ())
    for program in workload.programs:
        assert program.steps == (2, 3, 4)
        assert (program.ops.node >= 0).all()
        # Per step: a broadcast of DDP's buffers, all_to_all forward and backward, two buckets of dense gradients.
        counted = Counter(c.kind for c in program.collectives if c.sequence >= 0)
        assert counted == {"broadcast": 3, "all_to_all": 6, "all_reduce": 6}
        assert {c.ranks for c in program.collectives} == {(0, 1, 2, 3)}
        backlog = program.works.call < 0
        assert program.works.start_ns[backlog].max() < program.works.start_ns[~backlog].max() / 2


def test_the_shipped_run_from_an_archive_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLE, folder)
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(folder / "rank3.kineto.json.gz", "rank3.kineto.json.gz")
    alone = load([tmp_path / "run.tar"]).programs[0]
    assert plain(alone) == plain(load([folder / "rank3.kineto.json.gz"]).programs[0])
