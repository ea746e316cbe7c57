"""A DLRM from a `.toml` file: what is read, and what every mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from steptime._build.config import read_dlrm_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import dlrm_of
from steptime._build.dlrm.model import DENSE_OPTIMIZERS, EXCHANGE_DTYPES, INTERACTIONS, PRECISIONS, PREFETCHES, Dlrm
from steptime._lookups import saved
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
HISTOGRAM = [0.5, 0.25, 0.125, 0.125, *[0.0] * 13]


def table(name: str | None = "a", **changes: Any) -> dict[str, Any]:
    values = {"name": name, "rows": 1000, "dim": 8, "pooling_factor": 2, "skew": {"kind": "uniform"}}
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def config(**changes: Any) -> dict[str, Any]:
    values = {"batch": 64, "dense_features": 4, "bottom": [16, 8], "top": [16, 1], "tables": [table("a"), table("b")]}
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLES.glob("dlrm*.toml")), EXAMPLES / "mlperf_dcnv2.toml"], ids=lambda path: path.stem
)
def test_shipped_examples_are_read_and_come_back_whole(path: Path) -> None:
    found = read_dlrm_config(path, Overrides())
    again = Dlrm.from_dict(json.loads(found.model.to_json()))
    assert again == found.model
    assert again.to_json() == found.model.to_json()


def test_what_is_left_out_has_a_default() -> None:
    found = dlrm_of(config(), "models/mine.toml")
    model = found.model
    assert (model.name, model.lookup, model.optimizer, model.interaction, model.loss) == (
        "mine", "table_batched", "sgd", "dot", "bce",
    )  # fmt: skip
    assert (found.ranks, found.plan, found.rule) == (None, None, None)


def test_tables_that_say_nothing_of_their_lookups_are_looked_up_evenly_with_the_line_to_write() -> None:
    found = dlrm_of(config(tables=[table("a"), table("b", skew=None)]))
    assert found.model.tables[1].generator.kind == "uniform"
    (note,) = found.notes
    assert "1 tables without skew or statistics" in note and "'b'" in note and "skew = { kind =" in note
    assert dlrm_of(config()).notes == ()


def test_tables_of_one_skew_are_drawn_apart() -> None:
    first, second = dlrm_of(config()).model.tables
    assert first.generator.seed != second.generator.seed


def test_a_skew_is_the_generator_of_that_kind() -> None:
    skew = {"kind": "power", "alpha": 3, "locality": 0.5, "lengths": "geometric", "window": 99, "seed": 7, "scatter": False}
    (found,) = dlrm_of(config(tables=[table(skew=skew)])).model.tables
    assert found.generator == Generator(
        rows=1000, pooling=2.0, lengths="geometric", kind="power", alpha=3.0, locality=0.5, window=99, scatter=False, seed=7
    )


def test_ranks_follow_from_a_plan_that_is_alone() -> None:
    assert dlrm_of(config(plan={"a": 3, "b": [1]})).ranks == 4


def test_counted_statistics_are_kept_and_drawn_alike(tmp_path: Path) -> None:
    counted = expected_statistics(Generator(rows=1000, pooling=2.0, kind="zipf", alpha=1.1), 64, 8)
    saved.save(tmp_path / "a.json", counted)
    values = config(tables=[table(skew=None, statistics="a.json")])
    (found,) = dlrm_of(values, "config", tmp_path).model.tables
    assert found.statistics == counted
    drawn = expected_statistics(found.generator, 64)
    assert drawn.unique == pytest.approx(counted.unique, rel=0.05)
    model = dlrm_of(values, "config", tmp_path).model
    assert Dlrm.from_dict(json.loads(model.to_json())) == model


@pytest.mark.parametrize("statistics", [HISTOGRAM, {"reuse": HISTOGRAM, "unique": 60, "batch": 128}])
def test_a_reuse_histogram_is_enough(statistics: Any) -> None:
    (found,) = dlrm_of(config(tables=[table(skew=None, statistics=statistics)])).model.tables
    assert found.statistics is not None
    assert found.statistics.counted.reuse == pytest.approx(HISTOGRAM)
    assert found.statistics.lookups == 2 * found.statistics.batch
    # Of mean counts 1, 2, 3 to 4 and 5 to 8 in these shares, a row is looked up two times and a bit.
    assert found.statistics.lookups / 2.8 < found.statistics.unique or "unique" in statistics
    if isinstance(statistics, dict):
        assert (found.statistics.unique, found.statistics.batch) == (60, 128)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (config(batches=3), "unknown key 'batches'; did you mean 'batch'?"),
    (config(batch=None), "'batch' is missing"),
    (config(batch=0), "batch is 0; expected a whole number of 1 or more"),
    (config(batch=True), "batch is True"),
    (config(batch="64"), "batch is '64'"),
    (config(kind="transformer"), "kind is 'transformer'; expected \"dlrm\""),
    (config(bottom=[]), "bottom is []"),
    (config(top=[16, 2]), "top ends in 2; expected 1"),
    (config(bottom=[16, 4]), "bottom ends in 4, table 'a' has dim 8"),
    (config(lookup="bag"), 'lookup is \'bag\'; expected "embedding_bag" or "table_batched"'),
    (config(optimizer="lamb"), "optimizer is 'lamb'"),
    (config(interaction="sum"), "interaction is 'sum'"),
    (config(loss="mae"), "loss is 'mae'"),
    (config(precision="half"), 'precision is \'half\'; expected "fp32" or "tf32" or "bf16-autocast" or "fp16-autocast"'),
    (config(precision="bf16"), 'write precision = "bf16-autocast" for PyTorch\'s layers, or add fused = true'),
    (config(dense_optimizer="adamw"), "dense_optimizer is 'adamw'"),
    (config(exchange_precision="int8"), "exchange_precision is 'int8'"),
    (config(prefetch=True), 'prefetch is True; expected "none" or "lookups"'),
    (config(cross_rank=8), 'cross_rank is for interaction "dcnv2"; drop it, or interaction = "dcnv2"'),
    (config(cross_layers=2, interaction="cat"), 'cross_layers is for interaction "dcnv2"'),
    (config(cross_layers=0, interaction="dcnv2"), "cross_layers is 0; expected a whole number of 1 or more"),
    (config(cross_rank=2**40, interaction="dcnv2"), "at most 1048576"),
    (config(ranks=3), "a batch of 64 cannot be split evenly over 3 ranks"),
    (config(tables=[]), "tables is []"),
    (config(tables=[table("a"), table("a")]), "table 'a' is there twice"),
    (config(tables=[table(rows=0)]), "table 'a': rows is 0"),
    (config(tables=[table(rows=2**40)]), "at most 2147483648"),
    (config(tables=[table(dim=6)], interaction="cat"), "multiple of 4"),
    (config(tables=[table(pooling_factor=-1)]), "pooling_factor is -1"),
    (config(tables=[table(pooling_factor=float("nan"))]), "pooling_factor is nan"),
    (config(tables=[table(pooling_factor=float("inf"))]), "pooling_factor is inf"),
    (config(tables=[table(poling_factor=3)]), "did you mean 'pooling_factor'?"),
    (config(tables=[table(name=None)]), "tables[0]: 'name' is missing"),
    (config(tables=[table(statistics=HISTOGRAM)]), "has both skew and statistics"),
    (config(tables=[table(skew={"kind": "pareto"})]), "kind is 'pareto'; expected uniform or power"),
    (config(tables=[table(skew={"alpha": 2})]), "'kind' is missing"),
    (config(tables=[table(skew={"kind": "zipf", "alpa": 2})]), "did you mean 'alpha'?"),
    (config(tables=[table(skew={"kind": "zipf", "alpha": "2"})]), "alpha is '2'; expected a number"),
    (config(tables=[table(skew={"kind": "zipf", "locality": 1.5})]), "locality is 1.5"),
    (config(tables=[table(skew="zipf")]), "skew is 'zipf'"),
    (config(tables=[table(skew=None, statistics=[1.0])]), "17 shares"),
    (config(tables=[table(skew=None, statistics={"reuse": [0.5] * 17})]), "17 shares of distinct rows that add up to 1"),
    (config(tables=[table(skew=None, statistics=3)]), "statistics is 3"),
    (config(tables=[table(skew=None, statistics="none.json")]), "none.json: cannot be read"),
    (config(plan={"a": 0}), "plan: the plan does not place table 'b'"),
    (config(plan={"a": 0, "b": 0, "c": 1}), "plan: the plan places 'c', which is no table"),
    (config(plan={"a": 0, "b": 2}, ranks=2), "puts table 'b' on rank 2; expected 0 to 1"),
    (config(plan={"a": 0, "b": [0, 1]}), "cuts table 'b' into slices, and interaction \"dot\""),
    (config(plan={"a": 0, "b": [0, 1, 2]}, interaction="cat", ranks=4), "'b' of 8 columns in 3 slices"),
    (config(plan={"a": 0, "b": "x"}), "'b': 'x'; expected a rank"),
    (config(batch=10**400), "batch is 1000"),
    (config(tables=[table(pooling_factor=10**400)]), "pooling_factor is 1000"),
    (config(plan=[0, 1]), "plan is [0, 1]"),
]


@pytest.mark.parametrize(("values", "said"), MISTAKES, ids=[said[:40] for _, said in MISTAKES])
def test_a_mistake_is_one_line_that_says_where_and_what(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        dlrm_of(values, "mine.toml")
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert message.startswith("mine.toml") or said.startswith("none.json")


@pytest.mark.parametrize("content", [b"batch = ", b"\xff\xfe", b"[[tables]\n"])
def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.toml: cannot be read as TOML"):
        read_dlrm_config(path, Overrides())


def test_statistics_of_another_table_are_refused(tmp_path: Path) -> None:
    saved.save(tmp_path / "a.json", expected_statistics(Generator(rows=500, pooling=2.0), 64, 8))
    with pytest.raises(InputError, match=r"rows is 1000, .* is of a table of 500"):
        dlrm_of(config(tables=[table(skew=None, statistics="a.json")]), "mine.toml", tmp_path)
    saved.save(tmp_path / "a.json", expected_statistics(Generator(rows=1000, pooling=5.0), 64, 8))
    with pytest.raises(InputError, match=r"pooling_factor is 2, .* has 5"):
        dlrm_of(config(tables=[table(skew=None, statistics="a.json")]), "mine.toml", tmp_path)


ODD: tuple[Any, ...] = (None, True, 0, -1, 2.5, float("nan"), 10**30, "", "fp8", [], [1], {}, {"kind": "dlrm"})
CHOSEN: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS,
    "interaction": INTERACTIONS,
    "dense_optimizer": DENSE_OPTIMIZERS,
    "exchange_precision": tuple(EXCHANGE_DTYPES),
    "prefetch": PREFETCHES,
    "cross_layers": (1, 2, 5),
    "cross_rank": (1, 7, 64),
    "ranks": (1, 2, 4),
}


def test_any_values_of_the_dense_side_are_built_or_refused_in_one_line() -> None:
    draws, built = Random(19), 0
    for _ in range(500):
        keys = draws.sample(list(CHOSEN), draws.randint(1, len(CHOSEN)))
        values = {key: draws.choice(ODD if draws.random() < 0.05 else CHOSEN[key]) for key in keys}
        try:
            found = dlrm_of({**config(), **values}, "mine.toml")
        except InputError as error:
            assert str(error).startswith("mine.toml") and "\n" not in str(error)
            continue
        assert Dlrm.from_dict(json.loads(found.model.to_json())) == found.model
        assert len(found.workload().programs[0].ops) > 100
        built += 1
    assert 50 < built < 450
