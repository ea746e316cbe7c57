"""Index streams: reproducible everywhere, and with the statistics they promise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptime._lookups.generators import (
    LENGTHS,
    MOST_ROWS,
    SHARES,
    UNIFORM_BITS,
    Generator,
    key_of,
    knots_of,
    stride_of,
    uniforms,
)
from steptime.errors import InputError
from steptime_lab.workloads.torch_arrays import TorchArrays

TORCH = TorchArrays(torch.device("cpu"))

generators = st.builds(
    Generator,
    rows=st.one_of(st.integers(1, 3000), st.integers(1, MOST_ROWS)),
    pooling=st.floats(0, 40),
    lengths=st.sampled_from(LENGTHS),
    kind=st.sampled_from(sorted(SHARES)),
    alpha=st.floats(0.05, 60),
    shift=st.floats(0.01, 1e5),
    locality=st.floats(0, 1),
    window=st.integers(1, MOST_ROWS),
    scatter=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
    long_bag=st.one_of(st.just(0), st.integers(1, 300)),
    long_bag_at=st.floats(0, 1),
)


@given(generators, st.integers(0, 70), st.integers(0, 3))
def test_numpy_and_torch_make_the_same_bits(generator: Generator, batch: int, iteration: int) -> None:
    here, there = generator.bags(batch, iteration), generator.bags(batch, iteration, TORCH)
    assert there.indices.dtype == there.offsets.dtype == torch.int64
    assert here.indices.tobytes() == there.indices.numpy().tobytes()
    assert here.offsets.tobytes() == there.offsets.numpy().tobytes()


@given(generators, st.integers(0, 70))
def test_lookups_are_well_formed(generator: Generator, batch: int) -> None:
    bags = generator.bags(batch)
    assert bags.offsets[0] == 0
    assert bags.offsets[-1] == len(bags.indices)
    assert len(bags.offsets) == batch + 1
    assert (np.diff(bags.offsets) >= 0).all()
    assert ((bags.indices >= 0) & (bags.indices < generator.rows)).all()


@given(generators, st.one_of(st.integers(0, 70), st.sampled_from([32_767, 32_768, 65_537])))
def test_lengths_without_offsets_are_those_between_them(generator: Generator, batch: int) -> None:
    found = np.concatenate([np.zeros(0, dtype=np.int64), *generator.bag_lengths(batch)])
    assert found.tobytes() == np.diff(generator.offsets(batch)[0]).tobytes()


@given(generators)
def test_a_saved_generator_makes_the_same_stream(generator: Generator) -> None:
    again = Generator.from_dict(generator.to_dict())
    assert again == generator
    assert again.to_json() == generator.to_json()


def test_a_stream_keeps_its_bits_for_ever() -> None:
    # Stored measurements name their indices by generator and version: whoever changes these numbers raises VERSION.
    stream = Generator(
        rows=1_000_003, pooling=2.5, lengths="geometric", kind="zipf", alpha=1.1, shift=4.0, locality=0.25, seed=7
    )
    bags = stream.bags(4, 1)
    assert bags.offsets.tolist() == [0, 0, 3, 9, 12]
    assert bags.indices.tolist() == [
        981817,
        870959,
        716874,
        488992,
        870959,
        961130,
        321849,
        153243,
        107025,
        805740,
        964560,
        768456,
    ]
    assert Generator(rows=1000, pooling=4, kind="power", alpha=3.0, scatter=False).bags(1).indices.tolist() == [134, 2, 0, 301]


def test_seeds_and_iterations_draw_anew() -> None:
    stream = Generator(rows=1 << 30, pooling=8)
    draws = [stream.bags(16, 0), stream.bags(16, 1), replace(stream, seed=1).bags(16, 0)]
    assert len({tuple(draw.indices.tolist()) for draw in draws}) == 3


def test_iterations_share_their_hot_rows() -> None:
    stream = Generator(rows=100_000, pooling=20, kind="zipf", alpha=1.3)
    tops = [set(np.argsort(np.bincount(stream.bags(512, i).indices))[-3:].tolist()) for i in range(3)]
    assert tops[0] == tops[1] == tops[2]


@given(st.integers(1, 20_000))
def test_scattering_is_a_bijection(rows: int) -> None:
    assert len(np.unique(np.arange(rows) * stride_of(rows) % rows)) == rows


def test_scattered_neighbours_in_popularity_share_no_cache_line() -> None:
    for rows in (1000, 4096, 1_000_000, 3_000_017):
        assert min(stride_of(rows), rows - stride_of(rows)) > rows // 4


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(key_of(1, 2, 3), np.arange(200_000)) / (1 << UNIFORM_BITS)
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # chi square of 99 degrees of freedom: 1 in 10,000
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


@pytest.mark.parametrize(("alpha", "rows"), [(1.0, 1000), (2.5, 1000), (6.0, 5_000_000), (0.5, 70_000)])
def test_power_is_rows_times_u_to_the_alpha(alpha: float, rows: int) -> None:
    stream = Generator(rows=rows, pooling=100, kind="power", alpha=alpha, scatter=False)
    found = stream.bags(2000).indices
    key = key_of(stream.seed, 0, 0)
    exact = np.floor(rows * (uniforms(key, np.arange(len(found))) / (1 << UNIFORM_BITS)) ** alpha)
    # Within one linear piece: a knot every 2 % of the row, or the row itself.
    assert (np.abs(found - exact) <= 1 + 2e-4 * exact).all()


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.4])
def test_zipf_rows_have_their_share(alpha: float) -> None:
    rows, shift = 10_000, 2.5
    found = np.bincount(
        Generator(rows, 200, kind="zipf", alpha=alpha, shift=shift, scatter=False).bags(2000).indices, minlength=rows
    )
    weights = (np.arange(rows) + 0.5 + shift) ** -alpha
    expected = weights / weights.sum() * found.sum()
    for part in (slice(0, 1), slice(1, 10), slice(10, 100), slice(100, 1000), slice(1000, None)):
        assert found[part].sum() == pytest.approx(expected[part].sum(), rel=0.03)


@given(st.sampled_from(sorted(SHARES)), st.integers(1, MOST_ROWS), st.floats(0.05, 60), st.floats(0.01, 1e5))
def test_knots_cover_all_rows_in_order(kind: str, rows: int, alpha: float, shift: float) -> None:
    knots = knots_of(kind, rows, alpha, shift)
    assert knots.uniforms[0] == 0
    assert knots.uniforms[-1] + knots.uniform_spans[-1] == 1 << UNIFORM_BITS
    assert (knots.uniform_spans > 0).all()
    assert (np.diff(knots.uniforms) == knots.uniform_spans[:-1]).all()
    assert ((knots.rows >= 0) & (knots.rows + knots.row_spans <= rows)).all()
    assert int(knots.row_spans.max()) < 1 << (63 - UNIFORM_BITS)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("pooling", [0.3, 7.0, 45.5])
def test_bags_have_the_mean_length_asked_for(lengths: str, pooling: float) -> None:
    found = np.diff(Generator(rows=10, pooling=pooling, lengths=lengths).bags(20_000).offsets)
    assert found.mean() == pytest.approx(pooling, rel=0.03)
    spread = {"fixed": 0.0, "uniform": pooling / math.sqrt(3), "geometric": pooling}[lengths]
    rounding = 0.5 if pooling % 1 or lengths != "fixed" else 0.0
    assert spread * 0.97 - 0.1 <= found.std() <= math.hypot(spread * 1.03, rounding) + 0.05


def test_fixed_bags_of_a_whole_mean_are_all_equal() -> None:
    assert set(np.diff(Generator(rows=10, pooling=7.0).bags(100).offsets)) == {7}


def test_one_bag_is_long_and_the_others_are_as_they_were() -> None:
    usual = Generator(rows=1000, pooling=4.5, lengths="geometric", seed=3)
    before = np.diff(usual.bags(50).offsets)
    after = np.diff(replace(usual, long_bag=77, long_bag_at=0.5).bags(50).offsets)
    place = int(np.argmax(after))
    assert (place, after[place]) == (round(0.5 * 49), 77)
    assert np.delete(after, place).tolist() == np.delete(before, place).tolist()


def test_a_stream_without_a_long_bag_is_written_as_before_there_were_any() -> None:
    assert Generator(rows=5, pooling=1.0).to_json() == (
        '{"alpha":1.0,"kind":"uniform","lengths":"fixed","locality":0.0,"pooling":1.0,"rows":5,"scatter":true,"seed":0,'
        '"shift":1.0,"version":1,"window":1024}'
    )
    assert '"long_bag":9' in Generator(rows=5, pooling=1.0, long_bag=9).to_json()


@pytest.mark.parametrize("hot", [1, 7, 200])
def test_hot_rows_share_their_odds_equally(hot: int) -> None:
    stream = Generator(rows=50_000, pooling=100, kind="hot", alpha=3.0, shift=float(hot), scatter=False)
    counts = np.bincount(stream.bags(2000).indices, minlength=50_000)
    assert counts[:hot].sum() == pytest.approx(0.75 * 200_000, rel=0.01)
    assert counts[:hot].max() < 1.3 * counts[:hot].min()
    assert counts[hot:].max() < 20


@pytest.mark.parametrize("locality", [0.0, 0.25, 0.5, 0.9])
def test_the_share_that_repeats_is_not_distinct(locality: float) -> None:
    # Uniform over so many rows that chance repeats do not matter.
    found = Generator(rows=MOST_ROWS, pooling=50, locality=locality, window=500).bags(2000).indices
    assert len(np.unique(found)) / len(found) == pytest.approx(1 - locality, abs=0.01)


def test_repeats_come_from_the_window() -> None:
    window = 64
    found = Generator(rows=MOST_ROWS, pooling=50, locality=0.5, window=window).bags(400).indices
    first_seen: dict[int, int] = {}
    fresh: list[int] = []
    for row in found.tolist():
        if row in first_seen:
            # Draws from before the batch are seen for the first time late, at most `window` of them.
            assert len(fresh) - first_seen[row] <= 2 * window
        else:
            first_seen[row] = len(fresh)
            fresh.append(row)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0), ("rows", MOST_ROWS + 1), ("pooling", -1.0), ("pooling", math.nan), ("lengths", "long"), ("kind", "normal"),
        ("alpha", 0.0), ("shift", -1.0), ("locality", 1.5), ("window", 0), ("version", 2),
        ("long_bag", -1), ("long_bag_at", 1.5),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{field} is .*expected"):
        Generator.from_dict({"rows": 10, "pooling": 1.0, field: value})


def test_unknown_fields_and_negative_batches_are_refused() -> None:
    with pytest.raises(InputError, match="unknown field 'skew'"):
        Generator.from_dict({"rows": 10, "pooling": 1.0, "skew": 2})
    with pytest.raises(InputError, match="batch is -1"):
        Generator(rows=10, pooling=1.0).bags(-1)
