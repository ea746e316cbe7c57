"""Tasks from files: what is read, what is taken for granted and said, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime._build.config_values import Overrides
from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.plan import DATA_PARALLEL, KINDS, ROW_WISE, TABLE_ROW_WISE, TABLE_WISE
from steptime._platforms.platform import Platform
from steptime._shard.memory import rank_limit
from steptime._shard.task import Task, read_task
from steptime.errors import InputError

CONFIG = """
batch = 1024
dense_features = 8
bottom = [16]
top = [16, 1]
interaction = "cat"
[[tables]]
name = "user"
rows = 1000
dim = 32
pooling_factor = 3.5
skew = { kind = "zipf" }
[[tables]]
name = "item"
rows = 2000
dim = 16
pooling_factor = 20
skew = { kind = "uniform" }
"""
CSV = "name,rows,dim,pooling_factor,kind,alpha\nuser,1000,32,3.5,zipf,1.1\nitem,2_000,16,20,uniform,\n"


def task(tmp_path: Path, text: str, name: str = "task.toml", **asked: Any) -> Task:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return read_task(file, Overrides(platform_ranks=4, **asked))


def test_a_config_without_ranks_takes_the_platforms_and_says_nothing(tmp_path: Path) -> None:
    found = task(tmp_path, CONFIG)
    assert (found.ranks, found.notes, found.doubts) == (4, (), ())
    assert found.allowed(0) == KINDS


def test_constraints_are_read(tmp_path: Path) -> None:
    more = '[constraints]\nmemory_bytes = 1_000_000_000\nkinds = ["table_wise"]\n'
    found = task(tmp_path, CONFIG + more + '[constraints.pinned]\nuser = 2\n[constraints.kinds_of]\nitem = ["row_wise"]\n')
    assert found.constraints.memory_bytes == 1_000_000_000
    assert found.allowed(0) == (TABLE_WISE,)
    assert found.allowed(1) == (ROW_WISE,)
    assert found.constraints.pinned == {"user": 2}


def test_constraints_of_single_tables_are_alike_in_a_config_and_in_a_list(tmp_path: Path) -> None:
    more = """[constraints]
pinned = { user = 2 }
kinds_of = { item = ["column_wise", "row_wise"] }
min_partition = { item = 4 }
max_partition = { item = 8 }
"""
    listed = "name,rows,dim,pooling_factor,kind,pinned,kinds,min_partition,max_partition,precision\n"
    listed += "user,1000,32,3.5,zipf,2,,,,fp16\nitem,2000,16,20,uniform,,column_wise row_wise,4,8,\n"
    config, table_list = task(tmp_path, CONFIG + more), task(tmp_path, listed, "tables.csv")
    assert config.constraints == table_list.constraints
    assert table_list.tables[0].precision == "fp16"
    assert config.constraints.slices(config.tables[1], 1, 4) == 2
    assert config.constraints.slices(config.tables[1], 9, 4) == 4
    assert config.constraints.slices(config.tables[0], 9, 4) == 8


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("4,,", "pinned to rank 4; expected 0 to 3"),
        ("-1,,", "pinned is '-1'; expected a whole number of 0 or more"),
        ("1.5,,", "pinned is '1.5'; expected a whole number"),
        (",row_wise sideways,", "kinds is .*sideways.*; expected a list of table_wise, column_wise"),
        ("1,row_wise,", "is pinned and may not be table_wise"),
        (",,0", "min_partition is '0'; expected a whole number of 1 or more"),
    ],
)
def test_constraints_of_a_list_that_make_no_sense_are_one_line(tmp_path: Path, cell: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        task(tmp_path, f"name,rows,dim,pinned,kinds,min_partition\nuser,1000,32,{cell}\n", "tables.csv")
    assert "\n" not in str(raised.value)


def test_headroom_leaves_a_share_of_memory_free(tmp_path: Path) -> None:
    limits = Platform.load("4xh200-quarter-loopback").device.limits
    given = task(tmp_path, CONFIG + "[constraints]\nheadroom = 0.25\nmemory_bytes = 1_000_000_000\n").constraints
    assert rank_limit(limits, 4, given)[0] == 750_000_000
    free, outside = rank_limit(limits, 4, Constraints())
    assert rank_limit(limits, 4, Constraints(headroom=0.5)) == (free // 2, outside)
    with pytest.raises(InputError, match="headroom is 1; expected a number of 0 or more, at most"):
        task(tmp_path, CONFIG + "[constraints]\nheadroom = 1\n")


def test_a_json_config_is_the_same_task(tmp_path: Path) -> None:
    import tomllib

    assert task(tmp_path, json.dumps(tomllib.loads(CONFIG)), "task.json").model == task(tmp_path, CONFIG).model


def test_ranks_and_batch_of_the_command_line_go_first(tmp_path: Path) -> None:
    found = task(tmp_path, "ranks = 2\n" + CONFIG, ranks=8, batch=4096)
    assert (found.ranks, found.model.batch) == (8, 4096)


def test_a_rule_that_is_left_aside_is_said(tmp_path: Path) -> None:
    for found in (task(tmp_path, 'rule = "naive"\n' + CONFIG), task(tmp_path, 'rule = "naive"\n' + CONFIG, ranks=2)):
        (note,) = found.notes
        assert "left aside" in note


def test_a_csv_says_what_it_left_open(tmp_path: Path) -> None:
    found = task(tmp_path, CSV, "tables.csv")
    assert [(table.name, table.rows, table.dim, table.pooling_factor) for table in found.tables] == [
        ("user", 1000, 32, 3.5),
        ("item", 2000, 16, 20.0),
    ]
    assert any("dense layers" in note for note in found.notes)
    assert any("--batch" in note for note in found.notes)
    assert not found.doubts


def test_missing_statistics_are_named_with_what_would_be_otherwise(tmp_path: Path) -> None:
    found = task(tmp_path, "name,rows,dim,pooling_factor\nuser,1000,32,\nitem,2000,16,20\n", "tables.csv")
    (doubt,) = found.doubts
    assert "1 tables without a pooling factor" in doubt.assumption
    assert "2 tables without a skew" in doubt.assumption
    assert "'user'" in doubt.assumption
    assert found.tables[0].pooling_factor == 1.0
    other = {table.name: table for table in doubt.model.tables}
    assert other["item"].pooling_factor == 20.0
    assert other["item"].generator.kind == "zipf"


def test_an_embedding_bag_collection_is_a_task(tmp_path: Path) -> None:
    tables = [
        {"name": "t1", "num_embeddings": 1000, "embedding_dim": 64, "feature_names": ["f1"]},
        {"name": "t2", "num_embeddings": 500, "embedding_dim": 32, "feature_names": ["f2", "f3"], "data_type": "FP16"},
        {"name": "t3", "num_embeddings": 500, "embedding_dim": 32, "feature_names": ["f4"], "data_type": "DataType.INT4"},
    ]
    for values in (tables, {"tables": tables}):
        found = task(tmp_path, json.dumps(values), "ebc.json")
        assert [(table.rows, table.dim, table.pooling_factor) for table in found.tables] == [
            (1000, 64, 1.0), (500, 32, 2.0), (500, 32, 1.0),
        ]  # fmt: skip
        assert [table.precision for table in found.tables] == ["fp32", "fp16", "fp32"]
        assert any("'t2' serves 2 features" in note for note in found.notes)
        assert any("'t3' has data_type INT4" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "name,rows,dim\na,10,16\na,10,16\n", "table 'a' is there twice"),
        ("t.csv", "name,rows,dim\na,0,16\n", "line 2: rows is 0"),
        ("t.csv", "name,rows,dim\na,10,6\n", "dim is 6; expected a multiple of 4"),
        ("t.csv", "name,rows,dim\na,ten,16\n", "rows is 'ten'"),
        ("t.csv", "name,rows,dim\na,10\n", "line 2: 2 values; expected 3"),
        ("t.csv", "name,rows,width\na,10,16\n", "column 'width'"),
        ("t.csv", "name,rows\na,10\n", "no column 'dim'"),
        ("t.csv", "name,rows,dim,alpha\na,10,16,-1\n", "alpha is -1"),
        ("t.csv", "name,rows,dim\n", "expected a head"),
        ("t.json", "{}", "no list of tables"),
        ("t.json", "{", "cannot be read as JSON"),
        ("t.json", '[{"name": "a", "num_embeddings": 0, "embedding_dim": 16}]', "rows is 0"),
        ("t.json", '[{"name": "a", "num_embeddings": 9, "embedding_dims": 16}]', "did you mean 'embedding_dim'"),
        ("t.yaml", "a: 1", "expected a .toml or .json"),
        ("t.toml", CONFIG + "[constraints]\nmemory = 3\n", "did you mean 'memory_bytes'"),
        ("t.toml", CONFIG + '[constraints]\nkinds = ["diagonal"]\n', "expected a list of table_wise"),
        ("t.toml", CONFIG + "[constraints.pinned]\nuser = 9\n", "'user' is pinned to rank 9; expected 0 to 3"),
        ("t.toml", CONFIG + "[constraints.pinned]\nusers = 1\n", "'users' is no table"),
        ("t.toml", CONFIG.replace("1024", "1022"), "a batch of 1022 cannot be split evenly over 4 ranks"),
        ("t.toml", CONFIG.replace("1000", "0"), "rows is 0"),
    ],
)
def test_bad_input_is_one_line_that_says_where(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        task(tmp_path, text, name)
    assert "\n" not in str(raised.value)


def test_dot_interactions_keep_vectors_whole(tmp_path: Path) -> None:
    dot = CONFIG.replace('"cat"', '"dot"').replace("bottom = [16]", "bottom = [32]").replace("dim = 16", "dim = 32")
    assert task(tmp_path, dot).allowed(0) == (TABLE_WISE, ROW_WISE, DATA_PARALLEL, TABLE_ROW_WISE)
    assert task(tmp_path, dot + '[constraints]\nkinds = ["row_wise", "column_wise"]\n').allowed(0) == (ROW_WISE,)
    with pytest.raises(InputError, match="takes whole vectors"):
        task(tmp_path, dot + '[constraints]\nkinds = ["column_wise"]\n')
