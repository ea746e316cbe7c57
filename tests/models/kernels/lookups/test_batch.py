"""Lookups as columns: tables are shared, sums and maxima are over each lookup's own tables, bad questions are said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError
from steptime_lab.fit.lookups import skew_of


def _table(dim: int, *, batch: int = 32, name: str = "t", **values: float | str) -> TableStatistics:
    generator = Generator(**{"rows": 1000, "pooling": 5.0, "seed": dim, **values})  # type: ignore[arg-type]
    bags = generator.bags(batch)
    return table_statistics(bags.indices, bags.offsets, generator.rows, dim, name)


_TABLES = [_table(dim) for dim in (4, 8, 16, 32)]


def _lookups(members: list[list[int]]) -> Lookups:
    return Lookups.of([Lookup("table_batched", "forward", tuple(_TABLES[place] for place in some)) for some in members])


_MEMBERS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8)


@given(_MEMBERS)
def test_sums_and_maxima_are_of_a_lookups_own_tables(members: list[list[int]]) -> None:
    found = _lookups(members)
    assert len(found.pool) == len({place for some in members for place in some})
    dims = found.pool.tables.dim
    assert found.sums(dims).tolist() == [sum(_TABLES[place].dim for place in some) for some in members]
    assert found.maxima(dims).tolist() == [max(_TABLES[place].dim for place in some) for some in members]
    assert found.lookup.tolist() == [number for number, some in enumerate(members) for _ in some]


@given(_MEMBERS, st.data())
def test_taking_some_is_asking_for_some(members: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(members) - 1), min_size=1, max_size=5))
    taken, asked = _lookups(members).take(np.array(chosen)), _lookups([members[place] for place in chosen])
    assert taken.counts.tolist() == asked.counts.tolist()
    assert taken.pool.tables.dim[taken.member].tolist() == asked.pool.tables.dim[asked.member].tolist()


def test_a_table_of_two_types_has_two_places() -> None:
    asked = [Lookup("table_batched", "forward", (_TABLES[0],), dtype=dtype) for dtype in ("float32", "float16", "float32")]
    found = Lookups.of(asked)
    assert found.pool.row_bytes.tolist() == [16.0, 8.0]
    assert found.member.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"implementation": "bags"}, "implementation is 'bags'"),
        ({"direction": "sideways"}, "direction is 'sideways'"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; expected none forward"),
        ({"share": 0}, "share is 0; expected 1 or more"),
        ({"share": 2, "others": "busy"}, "others is 'busy'"),
        ({"tables": ()}, "tables is"),
        ({"implementation": "embedding_bag", "tables": tuple(_TABLES[:2])}, "expected one, unless table_batched"),
        ({"tables": (_TABLES[0], _table(8, batch=16, name="other"))}, r"other \(batch 16\).*all of one batch"),
    ],
)
def test_a_question_that_cannot_be_is_said(values: dict[str, object], said: str) -> None:
    usual: dict[str, object] = {"implementation": "table_batched", "direction": "forward", "tables": (_TABLES[0],)}
    with pytest.raises(InputError, match=said):
        Lookup(**{**usual, **values})  # type: ignore[arg-type]


def test_skew_is_of_the_distribution_and_not_of_the_batch() -> None:
    tables = [
        _table(8, batch=batch, kind=kind, alpha=alpha)
        for kind, alpha in (("uniform", 1.0), ("zipf", 0.9), ("zipf", 1.6))
        for batch in (256, 4096)
    ]
    found = skew_of(Lookups.of([Lookup("table_batched", "forward", (table,)) for table in tables])).reshape(3, 2)
    np.testing.assert_allclose(found[:, 0], found[:, 1], atol=0.25)
    assert found[0].max() < 0.2 < found[1].min() < found[1].max() < found[2].min()
