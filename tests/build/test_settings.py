"""Settings: any key of a config with another value, as if its file said so."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import steptime
from steptime._build.config import read_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.settings import parsed
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime.errors import InputError

TRANSFORMER = """
layers = 2
width = 64
heads = 4
sequence = 32
vocabulary = 100
batch = 16

[parallel]
data = 8
"""
DLRM = """
batch = 64
dense_features = 4
bottom = [16, 8]
top = [16, 1]
ranks = 2
tables = [
  { name = "a", rows = 100, dim = 8, pooling_factor = 1, skew = { kind = "zipf", alpha = 0.9 } },
  { name = "b.c", rows = 200, dim = 8, pooling_factor = 1, skew = { kind = "uniform" } },
]

[plan]
a = 0
"b.c" = 1
"""


def config(folder: Path, text: str, ranks: int | None = None, **settings: Any) -> Any:
    file = folder / "mine.toml"
    file.write_text(text)
    return read_config(file, Overrides.of(file, ranks=ranks, settings=settings.get("settings", settings)))


def test_a_setting_is_as_if_the_file_said_it(tmp_path: Path) -> None:
    said = config(tmp_path, TRANSFORMER.replace("layers = 2", "layers = 6"))
    assert config(tmp_path, TRANSFORMER, layers=6) == said
    fewer = config(tmp_path, TRANSFORMER, settings={"parallel.data": 2, "experts.count": 4, "bias": False})
    assert isinstance(fewer, Transformer)
    assert (fewer.parallel.data, fewer.experts.count, fewer.bias) == (2, 4, False)


def test_tables_are_set_by_place_by_name_and_all_at_once(tmp_path: Path) -> None:
    keys = {"tables[0].rows": 7, 'tables."b.c".rows': 9, "tables[*].pooling_factor": 3, "tables.a.skew.alpha": 1.5}
    found = config(tmp_path, DLRM, settings=keys)
    assert isinstance(found, DlrmConfig)
    assert [table.rows for table in found.model.tables] == [7, 9]
    assert [table.pooling_factor for table in found.model.tables] == [3, 3]
    assert found.model.tables[0].generator.alpha == 1.5


def test_a_plan_that_is_set_is_for_the_ranks_asked_for(tmp_path: Path) -> None:
    found = config(tmp_path, DLRM, ranks=4, settings={"plan.a": 3})
    assert (found.ranks, found.plan.placements["a"].ranks) == (4, (3,))
    assert config(tmp_path, DLRM, ranks=4).plan is None


def test_nothing_takes_a_key_away(tmp_path: Path) -> None:
    assert config(tmp_path, DLRM, plan=None, ranks=None).plan is None
    assert config(tmp_path, TRANSFORMER, parallel=None).parallel == Parallelism()


@pytest.mark.parametrize(
    ("ranks", "settings", "sizes"),
    [
        (8, {"parallel.tensor": 4}, Parallelism(data=2, tensor=4)),
        (8, {"parallel.fsdp": 8}, Parallelism(fsdp=8)),
        (8, {"parallel.fsdp": 2}, Parallelism(data=4, fsdp=2)),
        (8, {"parallel": {"tensor": 2}}, Parallelism(data=4, tensor=2)),
        (None, {"ranks": 8, "parallel.tensor": 4}, Parallelism(data=2, tensor=4)),
        (None, {"parallel.tensor": 4, "batch": 32}, Parallelism(data=8, tensor=4)),
        (8, {"parallel.data": 2, "parallel.tensor": 4}, Parallelism(data=2, tensor=4)),
    ],
)
def test_ranks_are_shared_by_what_is_not_set(
    tmp_path: Path, ranks: int | None, settings: dict[str, Any], sizes: Parallelism
) -> None:
    assert config(tmp_path, TRANSFORMER, ranks, settings=settings).parallel == sizes


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"parallel.fsdp": 8, "parallel.tensor": 4}, "8 ranks with parallel.fsdp = 8 and parallel.tensor = 4; give a mult"),
        ({"parallel.data": 2}, "8 ranks with parallel.data = 2; they make 2"),
        ({"parallel.data": 2, "parallel.fsdp": 2}, "8 ranks with parallel.fsdp = 2 and parallel.data = 2; they make 4"),
    ],
)
def test_sizes_that_do_not_make_the_ranks_say_so(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        config(tmp_path, TRANSFORMER, 8, settings=settings)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("parallel.fdsp", "unknown key 'parallel.fdsp'; did you mean parallel.fsdp"),
        ("fsdp", "did you mean parallel.fsdp"),
        ("tables[0].rows", "unknown key"),
        ("parallel..fsdp", "is no key"),
        ("kind", "unknown key 'kind'"),
        ("", "is no key"),
    ],
)
def test_a_key_that_no_config_has_names_the_nearest(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        config(tmp_path, TRANSFORMER, settings={key: 1})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tables[2].rows", 1, "there are 2 tables; expected 0 to 1"),
        ("tables.aa.rows", 1, "none of the tables is called 'aa'; did you mean 'a'"),
        ("rows", 1, r"did you mean tables\[0\].rows"),
        ("tables[0].rows", -1, "rows is -1; expected a whole number"),
        ("tables[0].skew", "zipf", "skew is 'zipf'; expected a table"),
        ("batch", 1.5, "batch is 1.5; expected 1 or more"),
        ("batch", 10**30, "batch is 10.*; expected at most"),
        ("ranks", 2**31, "ranks is 2147483648; expected at most 262144"),
    ],
)
def test_tables_that_are_not_there_and_values_that_cannot_be(tmp_path: Path, key: str, value: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        config(tmp_path, DLRM, settings={key: value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=8", 8),
        ("k = 0.5", 0.5),
        ("k=true", True),
        ("k=bf16", "bf16"),
        ('k="bf16"', "bf16"),
        ("k=[1, 2]", [1, 2]),
        ("k={ a = 1 }", {"a": 1}),
        ("k=", None),
        ("k=plans/mine.json", "plans/mine.json"),
    ],
)
def test_values_are_toml_and_bare_words_are_texts(text: str, value: Any) -> None:
    assert parsed(text) == ("k", value)


@pytest.mark.parametrize("text", ["k", "=3", "k=[1", "k=1\nj=2", "k={a", "k=" + "[" * 9999])
def test_what_is_no_key_with_a_value_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parsed(text)


def test_a_workload_that_is_varied_keeps_what_was_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TRANSFORMER)
    first = steptime.read(file, settings={"layers": 4}, batch=32)
    second = first.varied(settings={"precision": "bf16"}).varied(ranks=4)
    made = second.meta["transformer"]
    assert (made["layers"], made["precision"], made["batch"], second.world_size) == (4, "bf16", 32, 4)
    with pytest.raises(InputError, match="batch is 8 and is set to 4"):
        first.varied(batch=8, settings={"batch": 4})


def test_what_is_no_config_has_nothing_to_set(tmp_path: Path) -> None:
    listed = tmp_path / "tables.csv"
    listed.write_text("name,rows,dim\na,100,8\n")
    with pytest.raises(InputError, match="'layers' is set, and a list of tables has no keys"):
        steptime.read(listed, settings={"layers": 2})
    assert steptime.read(listed, settings={"batch": 128}).description.batch == 128
    file = tmp_path / "mine.toml"
    file.write_text(TRANSFORMER)
    saved = tmp_path / "saved.json"
    steptime.read(file).save(saved)
    with pytest.raises(InputError, match="layers: only a config has keys that can be set"):
        steptime.read(saved, settings={"layers": 2})


def test_a_file_is_what_its_settings_change_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DLRM)
    before = tomllib.loads(DLRM)
    steptime.read(file, settings={"tables[*].rows": 5})
    assert tomllib.loads(file.read_text()) == before
