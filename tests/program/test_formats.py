"""What every trace format must do. A new file in `_program/formats` is tested here the moment it has a sample below."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.program import chakra_messages, test_execution_trace
from tests.program.traces import Trace, Work

from steptime._program.execution import ExecutionTrace
from steptime._program.formats import HEAD_BYTES, Format, TraceFile, TraceReader, format_of, formats, opened, saved
from steptime._program.program import Program
from steptime._program.workload import Progress, Workload
from steptime.errors import InputError


def kineto_sample() -> bytes:
    trace = Trace()
    trace.step(1, 0, 50_000)
    trace.op("aten::mm", 1_000, 20_000)
    trace.launch(2_000, 6_000, Work(7, 8_000, 30_000))
    return trace.text()


def saved_sample() -> bytes:
    trace = Trace()
    trace.launch(2_000, 6_000, Work(7, 8_000, 30_000))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.json"
        saved.write(Workload((trace.read(),), 1), path)
        return path.read_bytes()


@dataclass(frozen=True)
class Sample:
    """A small valid file of one format: what it is called and what it holds."""

    suffix: str
    content: Callable[[], bytes]


SAMPLES = {
    "kineto": Sample(".json", kineto_sample),
    "execution_trace": Sample(".json", lambda: test_execution_trace.document([test_execution_trace.flat(3, "aten::mm")])),
    "chakra": Sample(".et", lambda: chakra_messages.file(chakra_messages.node(1, num_ops=10))),
    "saved": Sample(".json", saved_sample),
}
FORMATS = {each.name: each for each in formats()}
every_format = pytest.mark.parametrize("name", sorted(FORMATS))


def written(folder: Path, name: str, packing: str) -> TraceFile:
    """The sample of a format on disk, plain or packed."""
    sample = SAMPLES[name]
    content, inner = sample.content(), f"toy.0{sample.suffix}"
    if packing == "plain":
        (folder / inner).write_bytes(content)
        return TraceFile(folder / inner)
    if packing == "gzip":
        (folder / f"{inner}.gz").write_bytes(gzip.compress(content))
        return TraceFile(folder / f"{inner}.gz")
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"deep/{inner}")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return TraceFile(folder / "all.tar.gz", f"deep/{inner}")


def read(name: str, file: TraceFile, progress: Progress | None = None) -> Program | ExecutionTrace | Workload:
    """What a format makes of a file, as `load` reads it: looked at, then read."""

    def looked_at(reader: TraceReader) -> Program | ExecutionTrace | Workload:
        reader.peek()
        return FORMATS[name].read(reader)

    return next(map(looked_at, opened([file], progress)))


def text_of(read: Program | ExecutionTrace | Workload) -> str:
    """Everything that was read, without the place it was read from."""
    if isinstance(read, Workload):
        return "".join(text_of(program) for program in read.programs)
    if isinstance(read, ExecutionTrace):
        return repr((read.schema, read.nodes, read.parents, read.groups, read.rank))
    tables = (read.ops, read.calls, read.works)
    columns = [values.tolist() for table in tables for values in table.columns().values()]
    return repr((read.rank, read.world_size, read.names, read.threads, read.streams, read.collectives, read.steps, columns))


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMATS)


@every_format
def test_a_format_recognises_its_own_sample_and_no_other(name: str) -> None:
    for other, sample in SAMPLES.items():
        content = sample.content()[:HEAD_BYTES]
        assert FORMATS[name].recognises(content, f"toy.0{sample.suffix}") == (other == name)


@every_format
@pytest.mark.parametrize("head", [b"", b"{}", b"[]", b"plain text", b"\x00\x01\x02", b'{"nodes": 3}', b'{"a": [{"ph": "X"}]}'])
def test_no_format_claims_what_is_no_trace(name: str, head: bytes) -> None:
    assert not FORMATS[name].recognises(head, "notes.json")


@every_format
@pytest.mark.parametrize("packing", ["gzip", "archive"])
def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path, name: str, packing: str) -> None:
    one = read(name, written(tmp_path, name, "plain"))
    other = read(name, written(tmp_path, name, packing))
    assert type(one) is type(other)
    assert text_of(one) == text_of(other)


@every_format
def test_reading_twice_gives_the_same(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, name, "plain")
    assert text_of(read(name, file)) == text_of(read(name, file))


@every_format
def test_progress_hears_of_every_byte(tmp_path: Path, name: str) -> None:
    heard: list[int] = []
    read(name, written(tmp_path, name, "gzip"), lambda _, count: heard.append(count))
    assert heard[-1] == len(SAMPLES[name].content())


@every_format
def test_an_error_names_the_file_in_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"broken{SAMPLES[name].suffix}"
    file.write_bytes(SAMPLES[name].content()[:30])
    with pytest.raises(InputError, match=r"broken") as failure:
        read(name, TraceFile(file))
    assert "\n" not in str(failure.value)


@every_format
def test_a_file_that_is_gone_is_one_clear_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="gone"):
        read(name, TraceFile(tmp_path / f"gone{SAMPLES[name].suffix}"))


def test_a_header_longer_than_what_is_looked_at_is_still_a_kineto_trace() -> None:
    groups = [{"pg_name": str(index), "ranks": list(range(1024))} for index in range(100)]
    trace = Trace(groups=groups, world_size=1024)
    head = trace.text()[:HEAD_BYTES]
    assert b"traceEvents" not in head
    found = format_of(head, "rank0.json")
    assert isinstance(found, Format)
    assert found.name == "kineto"
