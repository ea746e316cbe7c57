"""The shipped lookup models: any mix of tables gets a finite time that goes with what is looked up, and bad files are said."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from steptime._hardware.device import FOLDER
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._models.engine.archive import Archive, write_archive
from steptime._models.lookups.fitted import LookupModels, group_of, lookups_file
from steptime._models.lookups.forms import FORMS
from steptime._models.lookups.question import Lookup, Lookups
from steptime._platforms.device import Device
from steptime.errors import InputError

_BATCH = 2048


@cache
def _models() -> LookupModels:
    return LookupModels.load(lookups_file(FOLDER, "h200"))


@cache
def _table(dim: int = 32, *, pooling: float = 20.0, alpha: float = 0.0, rows: int = 500_000, seed: int = 0) -> TableStatistics:
    kind = "zipf" if alpha else "uniform"
    generator = Generator(rows=rows, pooling=pooling, kind=kind, alpha=alpha or 1.0, seed=seed)
    bags = generator.bags(_BATCH)
    return table_statistics(bags.indices, bags.offsets, rows, dim, f"t{seed}")


def _time(*tables: TableStatistics, kind: tuple[str, str] = ("table_batched", "forward"), optimizer: str = "none") -> float:
    (found,) = _models().estimates([Lookup(*kind, tables, optimizer=optimizer)])
    return found.estimate.time_ns


@pytest.mark.parametrize("kind", FORMS, ids=group_of)
def test_every_kind_answers_with_launches_that_add_up(kind: tuple[str, str]) -> None:
    optimizer = "none" if kind[1] == "forward" else "sgd"
    (found,) = _models().estimates([Lookup(*kind, (_table(),), optimizer=optimizer)])
    assert 1_000 < found.estimate.time_ns < 1e8
    assert found.estimate.low_ns <= found.estimate.time_ns <= found.estimate.high_ns
    assert sum(launch.time_ns for launch in found.launches) == pytest.approx(found.estimate.time_ns)


@pytest.mark.parametrize(("direction", "optimizer"), [("forward", "none"), ("backward", "rowwise_adagrad")])
def test_the_order_of_tables_does_not_matter(direction: str, optimizer: str) -> None:
    tables = [_table(dim, pooling=pooling, seed=dim) for dim, pooling in ((16, 3.0), (64, 40.0), (32, 0.0), (128, 10.0))]
    kind = ("table_batched", direction)
    expected = _time(*tables, kind=kind, optimizer=optimizer)
    assert _time(*tables[::-1], kind=kind, optimizer=optimizer) == pytest.approx(expected, rel=1e-9)


def test_asking_many_plans_at_once_is_asking_each() -> None:
    tables = [_table(dim, seed=dim) for dim in (16, 32, 64, 128)]
    plans = [tables[:1], tables[1:], tables[::2], tables]
    asked = [Lookup("table_batched", "forward", tuple(plan)) for plan in plans]
    together = _models().form("table_batched", "forward").times(Lookups.of(asked)).time_ns
    np.testing.assert_allclose(together, [_time(*plan) for plan in plans], rtol=1e-9)


def test_repeated_rows_are_found_in_caches_and_wait_for_each_other_when_updated() -> None:
    uniform, skewed = (_table(128, pooling=60.0, alpha=alpha, rows=4_000_000, seed=9) for alpha in (0.0, 1.4))
    assert _time(skewed) < 0.9 * _time(uniform)
    bags = {"kind": ("embedding_bag", "backward"), "optimizer": "sgd"}
    hot = _table(64, pooling=60.0, alpha=2.2, rows=4_000_000, seed=9)
    cold = _table(64, pooling=60.0, rows=4_000_000, seed=9)
    assert _time(hot, **bags) > 1.2 * _time(cold, **bags)  # type: ignore[arg-type]


def test_tables_without_lookups_cost_next_to_nothing() -> None:
    table, empty = _table(64), _table(64, pooling=0.0, seed=5)
    assert _time(table, empty) == pytest.approx(_time(table), rel=0.1)
    assert 0 < _time(empty) < 20_000


def test_a_part_of_a_gpu_takes_longer() -> None:
    asked = Lookup("table_batched", "forward", tuple(_table(64, pooling=50.0, seed=seed) for seed in range(6)))
    times = [Device.load(name).lookup_estimates([asked])[0].estimate.time_ns for name in ("h200", "h200-half", "h200-quarter")]
    assert times == sorted(times)


def test_a_kind_without_a_model_is_said() -> None:
    models = LookupModels({}, _models().residuals, {})
    with pytest.raises(InputError, match="lookups of table_batched forward have no fitted model"):
        models.estimates([Lookup("table_batched", "forward", (_table(),))])


def test_a_file_read_and_written_again_says_the_same(tmp_path: Path) -> None:
    models = _models()
    LookupModels(dict(models.forms), models.residuals, models.recipe).save(tmp_path / "again.npz")
    again = LookupModels.load(tmp_path / "again.npz")
    asked = [Lookup("table_batched", "backward", (_table(), _table(64, seed=1)), optimizer="sgd")]
    assert again.estimates(asked) == models.estimates(asked)


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    archive = Archive.open(lookups_file(FOLDER, "h200"))
    parts = {part: archive.part(part) for part in archive.parts}
    parts["table_batched forward"] = {"nothing": np.zeros(1)}
    write_archive(tmp_path / "bad.npz", archive.recipe, parts)
    models = LookupModels.load(tmp_path / "bad.npz")
    with pytest.raises(InputError, match=r"bad.npz: not the table_batched forward model that this steptime reads"):
        models.estimates([Lookup("table_batched", "forward", (_table(),))])
    del parts["residuals"]
    write_archive(tmp_path / "worse.npz", archive.recipe, parts)
    with pytest.raises(InputError, match="has no part 'residuals'"):
        LookupModels.load(tmp_path / "worse.npz")
