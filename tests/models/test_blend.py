"""Trees and networks together: batches that show every row, and a file that holds the same blend in fewer bytes."""

from __future__ import annotations

from io import BytesIO

import numpy as np

from steptime._models.engine.regression import Blend
from steptime._models.engine.stored import pack, unpack
from steptime_lab.fit.engine import regression
from steptime_lab.fit.engine.regression import Training, fit_blend, train_networks

_DICE = np.random.default_rng(0)
_FEATURES = _DICE.normal(size=(600, 4))
_TARGET = np.abs(_FEATURES[:, 0]) + 0.5 * _FEATURES[:, 1]


def test_batches_show_every_row_before_any_comes_again() -> None:
    seen = [rows for rows in regression._batches(100, 30, 7, seed=0) if isinstance(rows, np.ndarray)]
    assert len(seen) == 7
    assert all(len(set(np.concatenate(seen[first : first + 3]))) == 90 for first in (0, 3))
    assert all(rows == slice(None) for rows in regression._batches(20, 30, 2, seed=0))


def test_small_batches_learn_and_the_same_seed_gives_the_same_network() -> None:
    training = Training(width=32, steps=250, rate=0.02, knee=0.02, batch=64)
    first, second = (train_networks(_FEATURES, _TARGET, seed=3, count=1, training=training) for _ in range(2))
    assert np.abs(first.values(_FEATURES) - _TARGET).mean() < 0.1
    assert np.array_equal(first.values(_FEATURES), second.values(_FEATURES))


def test_many_rows_are_answered_as_a_few_are() -> None:
    networks = train_networks(_FEATURES, _TARGET, seed=0, count=2, training=Training(steps=5))
    many = np.tile(_FEATURES, (8, 1))
    np.testing.assert_allclose(networks.values(many)[-600:], networks.values(_FEATURES), rtol=1e-12)


def test_a_blend_survives_a_file_and_takes_half_the_bytes_where_nothing_is_lost() -> None:
    single = fit_blend(_FEATURES, _TARGET, seed=0, networks=1, training=Training(steps=5), single=True, rounds=20)
    arrays = pack(single)
    assert arrays["trees0.value"].dtype == arrays["networks.weights0"].dtype == np.float32
    assert arrays["trees0.threshold"].dtype == np.float64
    file = BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as kept:
        loaded = unpack(Blend, dict(kept))
    assert np.array_equal(loaded.values(_FEATURES), single.values(_FEATURES))
    whole = fit_blend(_FEATURES, _TARGET, seed=0, networks=0, rounds=20)
    assert pack(whole)["trees0.value"].dtype == np.float64
    np.testing.assert_allclose(single.trees[0].values(_FEATURES), whole.values(_FEATURES), rtol=1e-5, atol=1e-6)


def test_trees_go_by_the_way_that_is_guessed() -> None:
    ways = np.where(_FEATURES[:, 2] > 0, 7, 3)
    target = np.where(ways == 7, 2.0, 0.0) + 0.01 * _FEATURES[:, 0]
    made = fit_blend(_FEATURES, target, seed=0, networks=0, ways=ways, rounds=60, objective="regression")
    assert made.guess is not None
    clear = np.abs(_FEATURES[:, 2]) > 0.1
    assert np.array_equal(made.guess.flags(_FEATURES)[clear], regression.flags_of(ways)[clear])
    assert np.abs(made.values(_FEATURES) - target)[clear].max() < 0.3
    assert np.array_equal(unpack(Blend, pack(made)).values(_FEATURES), made.values(_FEATURES))


def test_one_way_alone_needs_no_guess() -> None:
    made = fit_blend(_FEATURES, _TARGET, seed=0, networks=0, ways=np.zeros(600, dtype=int), rounds=5)
    assert made.guess is None
