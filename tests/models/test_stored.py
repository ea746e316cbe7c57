"""What is packed is unpacked the same, under names that files made before have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from steptime._models.engine.archive import Archive, write_archive
from steptime._models.engine.stored import Floats, Longs, pack, stored, unpack
from steptime.errors import InputError

columns = npst.arrays(np.float64, st.integers(0, 5), elements=st.floats(-1e300, 1e300))
names = st.text("abcdefgh", min_size=1, max_size=5)


@dataclass(frozen=True)
class Leaf:
    values: Floats
    depth: int = 0


@dataclass(frozen=True)
class Tree:
    name: str
    weight: float
    words: tuple[str, ...]
    seen: frozenset[str]
    counts: Longs
    leaves: tuple[Leaf, ...]
    pair: tuple[Floats, Floats]
    by_name: dict[str, Leaf]
    maybe: Leaf | None = None
    flat: Leaf = field(default_factory=lambda: Leaf(np.zeros(0)), metadata=stored(prefix="flat_"))


@dataclass(frozen=True)
class Narrow:
    NARROW: ClassVar[bool] = True
    values: Floats


leaves = st.builds(Leaf, columns, st.integers(0, 9))
trees = st.builds(
    Tree,
    name=names,
    weight=st.floats(-1e9, 1e9),
    words=st.lists(names, max_size=3).map(tuple),
    seen=st.frozensets(names, max_size=3),
    counts=npst.arrays(np.int64, 3),
    leaves=st.lists(leaves, max_size=3).map(tuple),
    pair=st.tuples(columns, columns),
    by_name=st.dictionaries(names, leaves, max_size=3),
    maybe=st.none() | leaves,
    flat=leaves,
)


def same(left: object, right: object) -> bool:
    ours, theirs = pack(left), pack(right)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@given(trees)
def test_what_is_packed_is_unpacked_the_same(tree: Tree) -> None:
    arrays = pack(tree)
    assert all(array.dtype.kind in "fiuUb" for array in arrays.values())
    again = unpack(Tree, arrays)
    assert same(again, tree)
    assert (again.name, again.weight, again.words, again.seen) == (tree.name, tree.weight, tree.words, tree.seen)
    assert (again.maybe is None) == (tree.maybe is None)


def test_names_nest_with_dots_and_numbers() -> None:
    leaf = Leaf(np.ones(1), 2)
    tree = Tree("t", 1.0, (), frozenset(), np.zeros(1, np.int64), (leaf,), (np.ones(1), np.ones(2)), {"a": leaf}, leaf, leaf)
    assert sorted(pack(tree)) == sorted(
        (
            *("name", "weight", "words", "seen", "counts", "leaves", "leaves0.values", "leaves0.depth", "pair0", "pair1"),
            *("by_name.a.values", "by_name.a.depth", "maybe.values", "maybe.depth", "flat_values", "flat_depth"),
        )
    )


@given(columns)
def test_half_the_bytes_hold_what_they_can_without_loss(values: Floats) -> None:
    arrays = pack(Narrow(values))
    assert np.array_equal(unpack(Narrow, arrays).values, values)
    assert unpack(Narrow, arrays).values.dtype == np.float64
    assert pack(Narrow(np.array([0.5, 2.0])))["values"].dtype == np.float32


def test_what_is_missing_is_named_unless_it_has_a_default() -> None:
    assert unpack(Leaf, {"values": np.zeros(2)}).depth == 0
    with pytest.raises(KeyError, match="values"):
        unpack(Leaf, {"depth": np.asarray(1)})


@dataclass(frozen=True)
class Named:
    arrays: dict[str, Floats] = field(metadata=stored(prefix=""))


def test_an_array_that_a_file_lacks_is_one_line_when_it_is_needed() -> None:
    model = unpack(Named, {"rate": np.ones(2)})
    assert "latency" not in model.arrays
    with pytest.raises(InputError, match="lacks 'latency'"):
        model.arrays["latency"]


def test_arrays_that_were_not_fitted_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.npz"
    write_archive(file, {}, {"a": {"x": np.arange(3.0), "y": np.arange(4.0)}})
    assert set(Archive.open(file).part("a")) == {"x", "y"}
    with np.load(file) as arrays:
        whole = dict(arrays)
    for changed in ({"a/y": np.arange(5.0)}, {"a/y": None}, {"a/z": np.arange(4.0)}):
        kept = {name: array for name, array in {**whole, **changed}.items() if array is not None}
        np.savez(file, **kept)
        with pytest.raises(InputError, match="not those that were fitted together"):
            Archive.open(file)


def test_the_same_models_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_archive(tmp_path / name, {"seed": 1}, {"a": {"x": np.arange(3.0)}})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
