"""`steptime validate collectives --rows`: a fabric on collectives that others timed, kinds and ranks left out or not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.mutated import mutated_text

from steptime._cli.app import run
from steptime._models.collectives.message import Message
from steptime._platforms.fabric import Fabric
from steptime.errors import InputError
from steptime_lab.measurements.timed_collectives import COLUMNS, read_timed_collectives

Captured = pytest.CaptureFixture[str]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def rows(fabric: str, gpu: str, slower: float) -> Iterator[str]:
    """What a fabric takes, so many times as long."""
    yield ",".join(COLUMNS)
    shipped = Fabric.load(fabric)
    for kind in KINDS:
        for ranks in (2, 4, 8):
            for power in range(10, 29, 2):
                (found,) = shipped.estimates([Message(kind, ranks, 1 << power)])
                yield f"{gpu},1,{ranks},{kind},{1 << power},{slower * found.time_ns / 1e3:.3f},2.29.2"


def table(folder: Path, fabric: str = "h200-nvlink", gpu: str = "h200_sxm", slower: float = 1.0) -> Path:
    file = folder / "rows.csv"
    file.write_text("\n".join(rows(fabric, gpu, slower)) + "\n", encoding="utf-8")
    return file


def groups(captured: Captured, *words: str) -> dict[str, float]:
    assert run(["validate", "collectives", *words, "--json"]) == 0
    found = json.loads(captured.readouterr().out)
    return {name: one["gmae"] for name, one in found["parts"].items()}


def test_rows_are_asked_of_the_fabric_as_it_is(tmp_path: Path, capsys: Captured) -> None:
    found = groups(capsys, "--fabric", "h200-nvlink", "--rows", str(table(tmp_path, slower=1.2)))
    assert found["from 1 MiB"] == pytest.approx(1 - 1 / 1.2, abs=0.01)


def test_left_out_rows_are_met_by_the_other_rows_and_not_by_the_shipped_curves(tmp_path: Path, capsys: Captured) -> None:
    file = table(tmp_path, slower=1.3)
    found = groups(capsys, "--fabric", "h200-nvlink", "--rows", str(file), "--leave-out")
    assert found["from 1 MiB"] < 0.06
    assert found["below 1 MiB"] < 0.06
    lines = file.read_text(encoding="utf-8").splitlines()
    # A kind and rank count that is unlike all others cannot be known without its rows.
    odd = [
        line.replace(line.split(",")[5], f"{3 * float(line.split(',')[5]):.3f}") if ",8,all_to_all," in line else line
        for line in lines
    ]
    file.write_text("\n".join(odd) + "\n", encoding="utf-8")
    assert groups(capsys, "--fabric", "h200-nvlink", "--rows", str(file), "--leave-out")["all_to_all, 8 ranks"] > 0.4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rows", "absent.csv"), "not readable"),
        (("--leave-out",), "--rows FILE"),
        (("--fabric", "a100-nvlink", "--rows", "ROWS"), "h200_sxm on 1 node"),
        (("--models", "fitted", "--rows", "ROWS"), "no such folder"),
        (("--models", "tests", "--rows", "ROWS"), "without --models"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path, capsys: Captured) -> None:
    file = str(table(tmp_path))
    assert run(["validate", "collectives", *(file if word == "ROWS" else word for word in words)]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_damaged_rows_are_counted_and_a_table_without_a_column_says_which(tmp_path: Path) -> None:
    file = table(tmp_path)
    text = file.read_text(encoding="utf-8")
    file.write_text(text + "h200_sxm,1,8,all_reduce,many,1.0,2.29.2\nh200_sxm,3,8,all_reduce,64,1.0,2.29.2\n", encoding="utf-8")
    assert read_timed_collectives(file).skipped == 2
    file.write_text(text.replace("ranks", "world", 1), encoding="utf-8")
    with pytest.raises(InputError, match="no column 'ranks'"):
        read_timed_collectives(file)


def test_damaged_tables_are_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(17)
    text = "\n".join(table(tmp_path).read_text(encoding="utf-8").splitlines()[:12])
    file = tmp_path / "damaged.csv"
    refused = 0
    for _ in range(500):
        file.write_text(mutated_text(text, draw), encoding="utf-8", errors="replace")
        try:
            assert read_timed_collectives(file).points
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused < 500
