"""Validation of collectives: what is compared with what, on synthetic rows whose law is known, and on the shipped ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.fitting import Points, Reduction, Swept, swept
from steptime._models.collectives.message import Message, Messages
from steptime._models.engine.splits import TEST
from steptime.errors import InputError
from steptime_lab.fit.fabrics import FittedFabric, fit_fabric, fit_points
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.collectives import validate_collectives
from steptime_lab.validate.engine import Validation

SIZES = sorted({int(2 ** (place / 2)) // 256 * 256 for place in range(18, 50)})
NOISE = 0.02


def rows(run: str = "main", speed: float = 1.0) -> Iterator[Swept]:
    """A fabric with one bandwidth: exchanges go by the busiest rank, times scatter by `NOISE`."""
    random = np.random.default_rng(8)
    for kind in ("all_reduce", "all_to_all"):
        for ranks in (2, 4, 8):
            for size in SIZES:
                yield swept_row(run, Message(kind, ranks, size), size * moved_share(kind, ranks), speed, random)
    for _ in range(60):
        sent = random.integers(1, 1 << 14, (4, 4)) * 256 * (random.random((4, 4)) < 0.7)
        splits = tuple(tuple(int(size) for size in some) for some in sent)
        message = Message("all_to_all", 4, max(map(sum, splits)), splits)
        moved = float(Messages.of([message]).load[0]) * moved_share("all_to_all", 4)
        yield swept_row(run, message, moved, speed, random)


def swept_row(run: str, message: Message, moved: float, speed: float, random: np.random.Generator) -> Swept:
    time = (10_000 * message.ranks + moved / 3) * speed
    return Swept(message, run, run, tuple((time * np.exp(random.normal(0, NOISE, 5))).tolist()))


@pytest.fixture(scope="module")
def found() -> Validation:
    own = list(rows())
    return validate_collectives("made up", fit_fabric(own), elsewhere=[*own, *rows("other box", 1.5)])


def test_a_law_that_is_met_is_met_to_about_its_noise(found: Validation) -> None:
    assert found.whole.summary.gmae < 2 * NOISE
    assert found.whole.summary.noise_floor == pytest.approx(NOISE / 3, rel=0.9)
    assert found.whole.summary.rows == len(found.cases)


def test_parts_are_by_kind_ranks_evenness_and_size(found: Validation) -> None:
    labels = set(found.groups)
    assert {
        "all_reduce",
        "all_to_all even",
        "all_to_all uneven",
        "all_reduce below 1 MiB",
        "all_to_all even from 1 MiB",
    } <= labels
    small, large = (found.groups[f"all_reduce {size}"].summary.rows for size in ("below 1 MiB", "from 1 MiB"))
    assert small + large == found.groups["all_reduce"].summary.rows


def test_every_message_is_asked_once_in_fifths(found: Validation) -> None:
    assert found.groups["all_reduce, in fifths"].summary.rows == 3 * len(SIZES)
    assert found.groups["all_reduce, 4 ranks, in fifths"].summary.rows == len(SIZES)
    assert found.groups["all_to_all uneven, in fifths"].summary.rows == 60


def test_baselines_are_asked_the_same_rows(found: Validation) -> None:
    part = found.groups["all_reduce, in fifths"]
    assert set(part.baselines) == {"line", "published"}
    assert {one.rows for one in part.baselines.values()} == {part.summary.rows}
    # The rows are a line with noise, and the published curve jumps.
    assert part.baselines["line"].gmae < part.baselines["published"].gmae


def test_the_rule_that_made_the_exchanges_wins(found: Validation) -> None:
    rules = {label: part.summary.gmae for label, part in found.groups.items() if label.startswith("uneven by ")}
    assert len([label for label in rules if "ranks" not in label]) == 6
    best = min(rules["uneven by busiest rank"], rules["uneven by load and pairs"])
    assert best == min(rules.values())
    assert found.facts["times_the_error_uneven_by_max_of_max_as_published_against_load_and_pairs"] > 2


def test_rank_counts_left_out_are_asked_of_the_others(found: Validation) -> None:
    part = found.groups["4 ranks from 2 and 8"].summary
    large = sum(size >= 1 << 20 for size in SIZES)
    assert part.rows == 2 * large
    assert part.gmae < 0.12
    assert "8 ranks from 2 and 4" in found.groups


def test_another_box_is_met_by_its_own_speed(found: Validation) -> None:
    as_is = found.groups["other runs and boxes"].summary
    scaled = found.groups["other runs and boxes, each at the speed of its all_reduce of 1 MiB"].summary
    assert as_is.bias == pytest.approx(-1 / 3, abs=0.05)
    assert abs(scaled.bias) < 0.05


def test_a_table_without_repeats_has_no_noise_floor() -> None:
    sizes = np.array(SIZES, dtype=float)
    points = Points([Message("all_reduce", 8, size) for size in SIZES], 20_000 + sizes / 3)
    found = validate_collectives("table", FittedFabric(fit_points(points), points, Reduction(0.5)))
    assert found.whole.summary.noise_floor is None
    assert not [label for label in found.groups if "uneven" in label or "from 2" in label or "boxes" in label]


def test_a_fabric_without_test_rows_says_so() -> None:
    sizes = np.array(SIZES, dtype=float)
    points = Points([Message("all_reduce", 8, size) for size in SIZES], 20_000 + sizes / 3)
    seen = points.take(points.split != TEST)
    with pytest.raises(InputError, match="table: no collectives of the split test"):
        validate_collectives("table", FittedFabric(fit_points(seen), seen, Reduction(0.5)))


@pytest.fixture(scope="module")
def loopback() -> Validation:
    measured: list[dict[str, Any]] = shipped("collectives").to_pylist()
    if not measured:
        pytest.skip("no measured collectives in this checkout")
    some = swept(measured, "loopback")
    return validate_collectives("loopback", fit_fabric(some), elsewhere=some)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "bar"),
    [
        ("all_reduce, in fifths", 0.045),
        ("all_to_all even, in fifths", 0.045),
        ("all_to_all uneven, in fifths", 0.05),
        ("all_gather, in fifths", 0.05),
        ("reduce_scatter, in fifths", 0.05),
        ("4 ranks from 2 and 8", 0.12),
    ],
)
def test_shipped_loopback_rows_are_met(loopback: Validation, label: str, bar: float) -> None:
    assert loopback.groups[label].summary.gmae < bar


@pytest.mark.slow
def test_shipped_uneven_exchanges_are_many_and_beat_the_published_rule(loopback: Validation) -> None:
    part = loopback.groups["all_to_all uneven, in fifths"]
    assert part.summary.rows >= 300
    assert part.baselines["published"].gmae > 2 * part.summary.gmae


@pytest.mark.slow
def test_shipped_intervals_hold_about_nine_rows_of_ten(loopback: Validation) -> None:
    covered = loopback.whole.summary.interval_coverage
    assert covered is not None
    assert 0.82 < covered < 0.97
