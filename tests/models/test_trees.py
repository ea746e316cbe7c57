"""Boosted trees as arrays: what LightGBM grew, evaluated without it."""

from __future__ import annotations

from io import BytesIO

import lightgbm
import numpy as np
import pytest

from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import pack, unpack
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import grow_trees, parse_trees


def _sample(rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    features = rng.normal(size=(rows, 4))
    return features, np.sin(features[:, 0]) + (features[:, 1] > 0.3) * features[:, 2]


def test_values_are_those_of_lightgbm() -> None:
    features, target = _sample()
    settings = {"objective": "regression_l1", "num_leaves": 31, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(features, label=target), num_boost_round=50)
    unseen = np.random.default_rng(4).normal(size=(1000, 4))
    assert np.allclose(parse_trees(booster.model_to_string()).values(unseen), booster.predict(unseen), atol=1e-9)


def test_a_step_is_learned_and_noise_columns_are_not_needed() -> None:
    features, target = _sample()
    fitted = grow_trees(features, target, seed=1)
    assert np.abs(fitted.values(features) - target).mean() < 0.3 * np.abs(target - np.median(target)).mean()


def test_the_same_rows_and_seed_give_the_same_trees() -> None:
    features, target = _sample()
    first, second = (pack(grow_trees(features, target, seed=5, rounds=20)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_weightless_rows_do_not_count() -> None:
    features, target = _sample()
    wrong = np.where(features[:, 3] > 0, 100.0, target)
    fitted = grow_trees(features, wrong, weight=np.where(features[:, 3] > 0, 0.0, 1.0), rounds=50)
    assert fitted.values(features).max() < 10.0


def test_arrays_survive_a_file_without_pickling() -> None:
    features, target = _sample()
    fitted = grow_trees(features, target, rounds=10)
    file = BytesIO()
    np.savez(file, **pack(fitted))  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as kept:
        loaded = unpack(Trees, dict(kept))
    assert np.array_equal(loaded.values(features), fitted.values(features))


def test_a_target_that_never_changes_gives_that_value_everywhere() -> None:
    features, _ = _sample(50)
    assert grow_trees(features, np.full(50, 2.5), rounds=5).values(features) == pytest.approx(2.5)


def test_chunks_of_rows_do_not_change_values() -> None:
    features, target = _sample()
    fitted = grow_trees(features, target, rounds=300)
    assert np.array_equal(fitted.values(features)[-1:], fitted.values(features[-1:]))


def test_a_constant_has_one_value() -> None:
    assert list(Trees.constant(1.5).values(np.zeros((3, 2)))) == [1.5, 1.5, 1.5]


def test_features_of_another_width_are_said() -> None:
    features, target = _sample(50)
    fitted = grow_trees(features, target, rounds=5)
    with pytest.raises(InputError, match="trees grown on 4 features were asked with 3: fit these models again"):
        fitted.values(features[:, :3])
