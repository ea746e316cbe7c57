from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.adopt.test_machine import driver, smi

from steptime._api.predict import calibration_for
from steptime._calibrate.harness.command import Job, Measured, Options
from steptime._cli.app import run
from steptime._hardware.device import read_device
from steptime._measurements.sets import HOST
from steptime._measurements.store import write_part
from steptime._models.collectives.message import Message
from steptime._models.estimate import Source
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.question import Question
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform, platform_parts
from steptime.errors import InputError
from steptime_lab.adopt import command
from steptime_lab.adopt.machine import FILE, GpuFacts, facts
from steptime_lab.measurements.sets import KERNELS
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.held_out import VISIT

# A sweep of the whole GPU that ships, and the host's.
_KERNELS_RUN, _HOST_RUN = "20261115T065458-b5b7", "20261115T085050-6014"
_FAMILIES = {"activation": 300, "softmax": 100, "fill": 10}
CONFIG = Path(__file__).parents[2] / "examples" / "configs"


def rows_of_run(name: str, run_id: str) -> pa.Table:
    table = shipped(name)
    chosen = pc.and_(pc.equal(table["run"].cast(pa.string()), run_id), pc.equal(table["share"], 1))
    return table.filter(chosen)


def few_rows(folder: Path) -> None:
    """Rows as a minute of measuring leaves them."""
    kernels = rows_of_run("kernels", _KERNELS_RUN)
    family = kernels["family"].cast(pa.string())
    parts = [kernels.filter(pc.equal(family, name)).slice(0, count) for name, count in _FAMILIES.items()]
    write_part(folder / KERNELS.name / "a-p1-0000.parquet", pa.concat_tables(parts).unify_dictionaries().combine_chunks())
    write_part(folder / HOST.name / "a-p1-0000.parquet", rows_of_run("host", _HOST_RUN).unify_dictionaries().combine_chunks())


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> GpuFacts:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return facts(driver(), smi())


@pytest.fixture
def machine(h200: GpuFacts, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """A machine with one GPU, whose sweeps take no time; the options that it was measured with."""
    asked: list[Options] = []

    def measured(job: Job, folder: Path, minutes: float, options: Options, words: Sequence[str]) -> Measured:
        assert (job.name, minutes, words[:3]) == ("adopt", 2.0, ["steptime", "adopt", "mine"])
        asked.append(options)
        few_rows(folder)
        return Measured({"kernels": 410, "host": 2000}, ["the clock moved"], 120.0)

    monkeypatch.setattr(command, "facts", lambda: h200)
    monkeypatch.setattr(command, "measured", measured)
    return asked


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A platform of few rows, fitted from them."""
    folder = tmp_path_factory.mktemp("adopted") / "box"
    folder.mkdir()
    # Rows of a card that is said to be a third of what it is, so that what it did not measure scales to three times as long.
    facts(driver(name="NVIDIA Thing", sms=44.0, memory_bus_bits=2048.0), smi()).write(folder / FILE)
    few_rows(folder / "measurements")
    shutil.copyfile(VISIT / "calibration-1.json", folder / "measurements" / "calibration.json")
    assert run(["adopt", "mine", "-o", str(folder), "--fit"]) == 0
    return folder


def question(op: str, *shapes: tuple[int, ...]) -> Question:
    return Question(Call(f"aten::{op}.default", tuple(TensorArg(shape) for shape in shapes)))


def test_a_machine_becomes_a_platform_in_one_command(
    machine: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", "mine", "-o", str(tmp_path), "--minutes", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"schema_version", "platform", "rows", "errors", "seconds", "warnings"} == set(document)
    assert machine == [Options(ranks=(1,))]
    assert document["platform"] == "mine"
    assert document["rows"]["kernels"] == sum(_FAMILIES.values())
    assert set(document["errors"]) >= {"all", "kernels", "activation", "softmax"}
    assert document["errors"]["kernels"]["gmae"] < 0.2
    assert document["seconds"]["measuring"] == 120.0
    assert document["warnings"][0] == "the clock moved"
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == document


def test_what_was_measured_is_fitted_and_the_rest_is_carried_over_with_a_wider_interval(adopted: Path) -> None:
    device = Platform.load(str(adopted)).device
    known, few, unknown = device.estimates(
        [question("relu", (4096, 1024)), question("zero_", (4096, 1024)), question("mm", (4096, 1024), (1024, 1024))]
    )
    assert known.estimate.source is Source.FITTED
    assert (few.estimate.source, unknown.estimate.source) == (Source.ANALYTIC, Source.ANALYTIC)
    assert unknown.why == "carried over from h200"
    (own,) = Platform.load("1xh200").device.estimates([question("mm", (4096, 1024), (1024, 1024))])
    assert unknown.estimate.time_ns == pytest.approx(3 * own.estimate.time_ns, rel=0.3)
    width = own.estimate.high_ns / own.estimate.low_ns
    assert unknown.estimate.high_ns / unknown.estimate.low_ns > 1.3 * width
    report = json.loads((adopted / "report.json").read_text(encoding="utf-8"))
    assert any("fill" in line and "matmul" in line for line in report["warnings"])
    assert any(line.startswith("lookups: too little was measured") for line in report["warnings"])


def test_what_another_device_of_the_same_kind_knows_better_is_left_to_it_unless_the_device_is_alone(
    h200: GpuFacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h200.write(tmp_path / FILE)
    few_rows(tmp_path / "measurements")
    asked, sources, warnings = question("relu", (4096, 1024)), [], []
    for words in ([], ["--alone"]):
        assert run(["adopt", "mine" + "-alone" * bool(words), "-o", str(tmp_path), "--fit", *words]) == 0
        (answer,) = Platform.load(str(tmp_path)).device.estimates([asked])
        sources.append(answer.estimate.source)
        warnings.append(json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["warnings"][-1])
    assert sources == [Source.ANALYTIC, Source.FITTED]
    assert warnings[0].startswith("too few calls of activation, ")
    assert warnings[1].endswith("they are guessed by the limits")
    assert "  ! too few calls of activation, " in capsys.readouterr().out


def test_predict_and_platforms_take_the_folder(adopted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", str(CONFIG / "gpt2.toml"), "--platform", str(adopted), "--ranks", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step_time_ms"] > 0
    assert document["coverage"]["analytic"] > 0
    assert run(["platforms", str(adopted)]) == 0
    assert "what the driver says" in capsys.readouterr().out


def test_a_platform_is_as_calibrated_as_its_machine_was_unless_its_host_is_swapped(adopted: Path) -> None:
    parts = platform_parts(str(adopted))
    assert parts.calibration == str(adopted / "calibration.json")
    platform = Platform.load(str(adopted))
    assert calibration_for(None, platform) == Calibration.read(Path(str(parts.calibration)), platform)
    assert calibration_for(None, platform) != UNCALIBRATED
    assert calibration_for(None, Platform.load(str(adopted), host="xeon-h200")) == UNCALIBRATED


def test_a_damaged_calibration_is_said_and_left_out(h200: GpuFacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h200.write(tmp_path / FILE)
    few_rows(tmp_path / "measurements")
    (tmp_path / "measurements" / "calibration.json").write_text("{}", encoding="utf-8")
    assert run(["adopt", "mine", "-o", str(tmp_path), "--fit"]) == 0
    assert "not calibrated: " in capsys.readouterr().err
    assert platform_parts(str(tmp_path)).calibration is None
    file = tmp_path / "platform.toml"
    file.write_text(file.read_text(encoding="utf-8") + "calibration = 3\n", encoding="utf-8")
    with pytest.raises(InputError, match="calibration is 3, expected the path of a file"):
        platform_parts(str(tmp_path))


def test_validate_scores_a_platform_on_its_own_rows(adopted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--platform", str(adopted), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["parts"]) == {"kernels", "activation", "softmax"}
    assert document["summary"]["interval_coverage"] > 0.6
    assert run(["validate", "kernels", "--platform", str(adopted)]) == 0
    assert "held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["validate", "steps", "--platform", "{folder}"], "an adopted platform has rows of kernels, lookups, collectives"),
        (["validate", "lookups", "--platform", "{folder}"], "no rows of lookups that no fit saw"),
        (["validate", "--platform", "{folder}/measurements"], "no platform"),
        (["adopt", "a/b", "-o", "{folder}"], "NAME 'a/b': expected letters"),
        (["adopt", "mine", "-o", "{folder}/nowhere", "--fit"], "no driver.json in it"),
        (["adopt", "mine"], "required: -o/--out"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], said: str, adopted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word.format(folder=adopted) for word in words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_is_of_one_kind_of_gpu(machine: list[Options], h200: GpuFacts, tmp_path: Path) -> None:
    replace(h200, name="NVIDIA L4").write(tmp_path / FILE)
    with pytest.raises(InputError, match="was measured on NVIDIA L4, this is NVIDIA H200; give every device a folder"):
        command.main(["mine", "-o", str(tmp_path), "--minutes", "2"])
    assert not machine


@pytest.mark.usefixtures("machine")
def test_without_what_fits_the_rows_are_kept_and_the_command_for_elsewhere_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "lightgbm" else object())
    assert command.main(["mine", "-o", str(tmp_path), "--minutes", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert "lightgbm is not installed here" in said.err
    assert "steptime adopt mine -o DIR --fit" in said.err
    document = json.loads(said.out)
    assert (document["platform"], document["errors"]) == (None, {})
    assert document["rows"]["kernels"] == sum(_FAMILIES.values())
    assert (tmp_path / FILE).is_file()
    assert list((tmp_path / "measurements" / "kernels").glob("*.parquet"))
    with pytest.raises(InputError, match="fitting needs lightgbm"):
        command.main(["mine", "-o", str(tmp_path), "--fit"])


def test_several_gpus_are_measured_together(machine: list[Options], h200: GpuFacts, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "facts", lambda: replace(h200, gpus=6))
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    command.main(["mine", "-o", str(tmp_path), "--minutes", "2"])
    assert machine == [Options(ranks=(1, 2, 4, 6))]


def test_a_machine_with_several_gpus_has_a_fabric_of_its_own(h200: GpuFacts, tmp_path: Path) -> None:
    replace(h200, gpus=6).write(tmp_path / FILE)
    few_rows(tmp_path / "measurements")
    table = shipped("collectives")
    table = table.filter(pc.and_(pc.is_in(table["ranks"], pa.array([2, 4], pa.int16())), pc.equal(table["fabric"], "loopback")))
    for name, value in {"fabric": "default", "share": 1}.items():
        column = table.schema.get_field_index(name)
        table = table.set_column(
            column, table.schema.field(name), pa.array([value] * len(table)).cast(table.schema.field(name).type)
        )
    write_part(tmp_path / "measurements" / "collectives" / "a-p1-0000.parquet", table.unify_dictionaries().combine_chunks())
    assert run(["adopt", "mine", "-o", str(tmp_path), "--fit"]) == 0
    platform = Platform.load(str(tmp_path))
    assert platform.ranks == 6
    assert platform.fabric is not None
    (estimate,) = platform.fabric.estimates([Message("all_reduce", 4, 1 << 20)])
    assert estimate.source is Source.FITTED
    errors = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["errors"]
    assert errors["collectives"]["rows"] > 20
    assert "all_reduce" in errors


@pytest.mark.parametrize("name", ["mine.toml", "platform.toml"])
def test_damaged_descriptions_are_one_line(name: str, adopted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(adopted, folder, ignore=shutil.ignore_patterns("measurements"))
    text, dice, refused = (folder / name).read_text(encoding="utf-8"), random.Random(2), 0
    for _ in range(500):
        place, length = dice.randrange(len(text)), dice.choice([0, 1, 1, 8])
        planted = dice.choice(["", "0", '"', "=", "\n", "nan", "-1e400", "[[x]]", "\0"])
        (folder / name).write_text(text[:place] + planted + text[place + length :], encoding="utf-8")
        try:
            platform_parts(str(folder)).check()
            read_device(folder / "mine.toml")
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


def test_the_device_of_a_damaged_folder_is_one_line(adopted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(adopted, folder, ignore=shutil.ignore_patterns("measurements"))
    text = (folder / "mine.toml").read_text(encoding="utf-8")
    (folder / "mine.toml").write_text(text.replace('carried_from = "h200"', 'carried_from = "a100"'), encoding="utf-8")
    with pytest.raises(InputError, match="takes the models of a100, which has none of its own"):
        Platform.load(str(folder))
    (folder / "mine.toml").write_text(text.replace('carried_from = "h200"', "carried_from = 3"), encoding="utf-8")
    with pytest.raises(InputError, match="carried_from is 3"):
        read_device(folder / "mine.toml")
    without = tmp_path / "without"
    shutil.copytree(adopted, without, ignore=shutil.ignore_patterns("measurements", "mine.npz"))
    with pytest.raises(InputError, match=r"mine\.npz"):
        Platform.load(str(without))
