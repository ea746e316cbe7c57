"""A recommender as data."""

from __future__ import annotations

import json
from dataclasses import replace

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator


def model() -> Dlrm:
    tables = (
        Table("a", 16, Generator(rows=100, pooling=2.0)),
        Table("b", 8, Generator(rows=50, pooling=1.5, kind="zipf", seed=3)),
    )
    return Dlrm(
        "small", 64, 13, (32, 16), (8, 1), tables, lookup="embedding_bag", optimizer="rowwise_adagrad", interaction="cat"
    )


def test_a_saved_model_comes_back_whole() -> None:
    assert Dlrm.from_dict(json.loads(model().to_json())) == model()
    assert Dlrm.from_dict(json.loads(model().to_json())).to_json() == model().to_json()


def test_a_model_in_tf32_comes_back_whole() -> None:
    fast = replace(model(), precision="tf32")
    assert Dlrm.from_dict(json.loads(fast.to_json())) == fast


def test_another_batch_changes_nothing_else() -> None:
    assert model().with_batch(128).with_batch(64) == model()
    assert model().with_batch(128).batch == 128


def test_a_table_knows_its_size_and_lookups() -> None:
    table = model().tables[1]
    assert (table.rows, table.pooling_factor, table.nbytes) == (50, 1.5, 1600)
