"""Launch lists: the nearest one is found in blocks as it would be all at once, and a file holds each list once."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.forms import lists
from steptime._models.kernels.forms.lists import Lists
from steptime.errors import InputError
from steptime_lab.fit.kernels.book import fit_lists

_DICE = np.random.default_rng(0)
_KINDS = ("a", "b", "c")
_KERNELS = (("move", "multiply"), ("multiply",), ("clear", "multiply", "reduce", "move"))


def _places(count: int, dtype: type = np.float32) -> npt.NDArray[Any]:
    """Places on a coarse grid, so that many are equally far."""
    return _DICE.integers(0, 4, size=(count, 5)).astype(dtype)


def _fitted(count: int = 300, dtype: type = np.float32) -> tuple[Lists, list[str], npt.NDArray[Any]]:
    kinds = [_KINDS[place % 3] for place in range(count)]
    places = _places(count, dtype)
    kernels = [_KERNELS[place % 7 % 3] for place in range(count)]
    times = [_DICE.uniform(1, 9, size=len(names)).tolist() for names in kernels]
    return fit_lists(kinds, places, kernels, times, _DICE.normal(size=count)), kinds, places


@pytest.mark.parametrize("block", [1, 1000, 1 << 17])
def test_the_nearest_is_the_same_in_blocks_as_all_at_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_BLOCK", block)
    fitted, _, _ = _fitted()
    asked, places = [_KINDS[place % 3] for place in range(200)], _places(200) + 0.25
    near = fitted.nearest(asked, places)
    for call, (kind, place) in enumerate(zip(asked, places, strict=True)):
        of_kind = int(np.flatnonzero(fitted.kinds == kind)[0])
        first, last = fitted.bounds[of_kind], fitted.bounds[of_kind + 1]
        apart = np.abs(fitted.places[:, first:last].T - place).sum(axis=1)
        assert near.distances[call] == apart.min()
        assert near.nearest[call] == first + int(np.flatnonzero(apart == apart.min())[0])


def test_a_kind_that_was_not_measured_is_not_known() -> None:
    fitted, _, _ = _fitted()
    near = fitted.nearest(["aa", "b", "z"], _places(3))
    assert near.known.tolist() == [False, True, False]


def test_of_calls_at_one_place_the_first_is_kept_with_a_level_for_each_state() -> None:
    places = np.array([[1.0], [1.0], [2.0], [1.0]], dtype=np.float32)
    kernels = [["cold"], ["warm"], ["other"], ["later"]]
    fitted = fit_lists(["a"] * 4, places, kernels, [[1.0]] * 4, np.array([0.5, 0.25, 2.0, 9.0]), [0, 1, 1, 0])
    assert len(fitted.which) == 2
    near = fitted.nearest(["a"] * 4, places[[0, 0, 2, 2]], [0, 1, 0, 1])
    levels, belief = near.twins()
    assert levels.tolist() == [0.5, 0.25, 2.0, 2.0]
    assert belief.min() == pytest.approx(0.9)
    assert [fitted.launches(call)[0] for call in near.nearest] == [("cold",), ("cold",), ("other",), ("other",)]


def test_a_state_that_was_never_measured_is_answered_by_the_one_that_was() -> None:
    fitted, kinds, places = _fitted()
    assert np.array_equal(
        fitted.nearest(kinds, places, [1] * len(kinds)).twins()[0], fitted.nearest(kinds, places, [0] * len(kinds)).twins()[0]
    )


def test_places_of_other_models_are_refused_in_one_line() -> None:
    fitted, kinds, places = _fitted()
    with pytest.raises(InputError, match="fit these models again"):
        fitted.nearest(kinds, places[:, :4])


def test_a_distant_list_is_hardly_believed() -> None:
    fitted = fit_lists(["a"], np.zeros((1, 1)), [["one"]], [[1.0]], np.ones(1))
    belief = fitted.nearest(["a"] * 3, np.array([[0.0], [0.2], [3.0]])).twins()[1]
    assert belief[0] > belief[1] > 0.1
    assert belief[2] < 1e-4


def test_lists_survive_a_file_that_holds_each_of_them_once() -> None:
    fitted, kinds, places = _fitted(3000)
    arrays = pack(fitted)
    assert sorted(arrays["kernels.lengths"].tolist()) == [1, 2, 4]
    assert arrays["names"].tolist() == ["clear", "move", "multiply", "reduce"]
    assert arrays["places"].dtype == arrays["levels"].dtype == arrays["shares"].dtype == np.float32
    file = BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as kept:
        loaded = unpack(Lists, dict(kept))
    mine, its = fitted.nearest(kinds, places), loaded.nearest(kinds, places)
    assert np.array_equal(mine.nearest, its.nearest)
    assert np.array_equal(mine.twins()[0], its.twins()[0])
    for call in range(0, 3000, 97):
        assert mine.launches(call, 7.0, "") == its.launches(call, 7.0, "")
        assert sum(launch.time_ns for launch in its.launches(call, 7.0, "")) == pytest.approx(7.0)


def test_one_long_list_costs_the_others_nothing() -> None:
    kernels = [["one"]] * 99 + [["one"] * 5000]
    times = [[1.0] * len(names) for names in kernels]
    fitted = fit_lists(["a"] * 100, np.arange(100.0)[:, None], kernels, times, np.zeros(100))
    assert pack(fitted)["shares"].size == 5099
