from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._calibrate.collectives.cases import (
    BUCKET,
    CUT,
    LOOPBACK,
    MAIN,
    OTHERS,
    CollectiveCase,
    Place,
    blocks,
    calls_of,
    cost_ns,
    fitting,
    laps,
    largest_buffer_bytes,
    once_ns,
    repeats_of,
    rough_ns,
)
from steptime._calibrate.harness.command import Options
from steptime._units import MIB
from steptime.errors import InputError
from steptime_lab.measure.collectives import share_s
from steptime_lab.measure.collectives.cases import WANTED, few, largest_sent_bytes, layout_of, places, tiers, uneven

RANKS = (2, 4, 8)
FOUR = Place(4, "loopback", 4)


def every(ranks: int, *, dense: bool = True) -> list[CollectiveCase]:
    return [case for tier in tiers(ranks, dense=dense, seed=0) for case in tier]


def test_the_rank_counts_together_have_at_least_500_different_uneven_cases() -> None:
    assert sum(len(set(uneven(ranks, count, seed=0))) for ranks, count in WANTED.items()) >= 500


@pytest.mark.parametrize("ranks", RANKS)
def test_split_matrices_are_uneven_whole_and_within_64_kib_to_64_mib(ranks: int) -> None:
    for splits in uneven(ranks, 60, seed=5):
        matrix = np.asarray(splits).reshape(ranks, ranks)
        assert (matrix % 4 == 0).all()
        assert (matrix > 0).all()
        assert matrix.min() < matrix.max()
        # Rounding to whole samples of whole tables moves small totals.
        assert 0.4 * 64 * 1024 <= matrix.sum() <= 1.5 * 64 * MIB


@pytest.mark.parametrize("ranks", RANKS)
def test_most_split_matrices_are_those_of_sharded_tables_in_one_direction_or_the_other(ranks: int) -> None:
    shapes: Counter[str] = Counter()
    for splits in uneven(ranks, 100, seed=1):
        matrix = np.asarray(splits).reshape(ranks, ranks)
        senders_share_evenly = (matrix == matrix[:, :1]).all()
        receivers_get_evenly = (matrix == matrix[:1, :]).all()
        shapes["forward" if senders_share_evenly else "backward" if receivers_get_evenly else "any"] += 1
    assert shapes["forward"] > shapes["any"] > 10
    assert shapes["backward"] > 3


def test_the_same_seed_draws_the_same_splits_and_another_seed_others() -> None:
    assert uneven(4, 30, seed=2) == uneven(4, 30, seed=2)
    assert not set(uneven(4, 30, seed=2)) & set(uneven(4, 30, seed=3))


@given(
    st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 999), min_size=n * n, max_size=n * n)))
)
def test_no_rank_sends_or_receives_more_than_the_largest_buffer(drawn: tuple[int, list[int]]) -> None:
    ranks, splits = drawn[0], tuple(drawn[1])
    sent = [sum(splits[rank * ranks : (rank + 1) * ranks]) for rank in range(ranks)]
    received = [sum(splits[rank::ranks]) for rank in range(ranks)]
    assert largest_sent_bytes(splits, ranks) == max(sent)
    assert largest_buffer_bytes(splits, ranks) == max(*sent, *received)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dense", [True, False])
def test_a_sweep_asks_each_question_once_and_the_same_ones_every_time(ranks: int, dense: bool) -> None:
    place = Place(ranks, "loopback", ranks)
    cases = every(ranks, dense=dense)
    assert len({case.key(place) for case in cases}) == len(cases)
    assert cases == every(ranks, dense=dense)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sweep_has_every_collective_from_bytes_to_hundreds_of_mib(ranks: int) -> None:
    plain = [case for case in every(ranks) if case.mode == "stream" and case.splits is None and case.dtype == "float32"]
    for name in (*MAIN, *OTHERS):
        sizes = {case.size_bytes for case in plain if case.collective == name}
        if (name, ranks) == ("send_recv_ring", 2):
            assert not sizes
            continue
        assert min(sizes) == (4 * ranks if name in CUT else 4)
        assert max(sizes) == 256 * MIB
        assert len(sizes) >= 24


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sweep_has_company_busy_hosts_skew_and_single_calls(ranks: int) -> None:
    cases = every(ranks)
    for name in MAIN:
        own = [case for case in cases if case.collective == name]
        assert {case.beside for case in own} == {"none", "gemm", "copy"}
        assert {case.host_threads for case in own} == {"idle", "busy"}
        assert {case.skew_ns for case in own} == {None, 200_000.0, 1_000_000.0, 5_000_000.0}
        assert {case.mode for case in own} == {"stream", "single"}
        assert {case.dtype for case in own} == {"float32", "bfloat16"}
    assert all((case.late_rank is None) == (case.skew_ns is None) for case in cases)
    assert all(0 <= case.late_rank < ranks for case in cases if case.late_rank is not None)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_first_cases_are_a_few_of_every_circumstance(ranks: int) -> None:
    first, second, *_ = tiers(ranks, dense=True, seed=0)
    assert first[0] == BUCKET
    sizes = {64 * 1024, MIB, 16 * MIB}
    for name in MAIN:
        own = [case for case in first if case.collective == name and case.splits is None]
        assert {case.size_bytes for case in own if case.beside == "gemm"} == sizes
        assert {case.size_bytes for case in own if case.beside == "copy"} == sizes
        assert {case.size_bytes for case in own if case.host_threads == "busy"} == sizes
        assert any(case.skew_ns for case in own)
    assert any(case.splits for case in first)
    assert {case.collective for case in first} >= set(OTHERS) - {"send_recv_ring"}
    assert all(case.splits for case in second)


def test_the_first_cases_take_a_few_seconds_at_every_place() -> None:
    for place in places(Options(ranks=RANKS, share_gpu=True), gpus=1):
        assert sum(cost_ns(case, place) for case in tiers(place.ranks, dense=place.dense, seed=0)[0]) < 10e9


def test_every_place_gets_its_essential_cases_before_any_gets_more() -> None:
    needs = [(10.0, 40.0), (12.0, 22.0), (20.0, 20.0)]
    assert share_s(needs, 42.0) == pytest.approx(10.0)
    assert share_s(needs, 82.0) == pytest.approx(40.0)
    assert share_s(needs, 62.0) == pytest.approx(10.0 + 20.0 * 30.0 / 40.0)
    assert share_s(needs, 21.0) == pytest.approx(5.0)
    assert share_s(needs[2:], 30.0) == pytest.approx(30.0)


def test_only_the_collectives_asked_for_are_measured() -> None:
    assert {case.collective for tier in tiers(4, dense=True, seed=0, only=["broadcast"]) for case in tier} == {"broadcast"}


@given(st.sampled_from((*MAIN, *OTHERS)), st.integers(1, 10**9), st.sampled_from(RANKS))
def test_a_fitting_size_is_the_next_one_that_can_be_cut(collective: str, size: int, ranks: int) -> None:
    unit = 4 * ranks if collective in CUT else 4
    fitted = fitting(collective, size, ranks)
    assert fitted % unit == 0
    assert 0 <= fitted - size < unit


def test_laps_and_blocks_hold_every_case_once_in_order_and_none_takes_long() -> None:
    cases = every(4)
    for cut, cost, most in (
        (laps(cases, FOUR), lambda case: cost_ns(case, FOUR), 10e9),
        (blocks(cases, 4), lambda case: once_ns(case, 4), 0.25e9),
    ):
        assert [case for part in cut for case in part] == cases
        assert all(sum(map(cost, part)) <= most or len(part) == 1 for part in cut)
    assert laps([], FOUR) == []


def test_cases_are_repeated_more_often_where_many_repeats_are_outliers() -> None:
    small, large = CollectiveCase("all_reduce", 4), CollectiveCase("all_reduce", 64 * MIB)
    assert (repeats_of(small, FOUR), repeats_of(large, FOUR)) == (5, 3)
    for place in (Place(8, "loopback", 8), Place(2, "loopback-2x2", 2)):
        assert (repeats_of(small, place), repeats_of(large, place)) == (7, 4)


def test_small_messages_are_timed_in_long_rows_and_large_ones_alone() -> None:
    assert calls_of(CollectiveCase("all_reduce", 4), 4) == 20
    assert calls_of(CollectiveCase("all_reduce", 8 * MIB), 4) == 2
    assert calls_of(CollectiveCase("all_reduce", 256 * MIB), 4) == 1
    assert calls_of(CollectiveCase("all_reduce", 4, mode="single"), 4) == 1
    assert calls_of(CollectiveCase("all_reduce", 4, skew_ns=1.0, late_rank=0), 4) == 1
    assert calls_of(BUCKET, 4) == 8


def test_the_rough_time_is_near_what_loopback_was_seen_to_take() -> None:
    for ranks, seen_ms in ((2, 20.0), (4, 32.3), (8, 43.7)):
        assert rough_ns("all_reduce", ranks, 64 * MIB) / 1e6 == pytest.approx(seen_ms, rel=0.25)


def test_a_smoke_run_has_a_few_small_cases_of_each_kind() -> None:
    (cases,) = few(2, seed=0)
    assert len(cases) < 60
    assert max(case.size_bytes for case in cases) < MIB
    assert {case.beside for case in cases} == {"none", "gemm", "copy"}
    assert any(case.splits for case in cases)
    assert any(case.skew_ns for case in cases)


def test_ranks_that_share_a_gpu_are_measured_on_both_fabrics_four_ranks_first() -> None:
    found = places(Options(ranks=(2, 4, 8), share_gpu=True), gpus=1)
    assert [(place.ranks, place.fabric) for place in found] == [(n, fabric) for fabric in LOOPBACK for n in (4, 2, 8)]
    assert all(place.share == place.ranks for place in found)
    assert [place.dense for place in found] == [True] * 3 + [False] * 3
    assert layout_of(found[0], "cuda").share_gpu


def test_ranks_with_a_gpu_each_have_one_fabric_and_only_the_counts_that_fit() -> None:
    found = places(Options(ranks=(2, 4, 8)), gpus=4)
    assert [(place.ranks, place.fabric, place.share) for place in found] == [(4, "default", 1), (2, "default", 1)]
    assert not layout_of(found[0], "cuda").share_gpu


def test_one_gpu_and_no_sharing_is_said_in_one_line() -> None:
    with pytest.raises(InputError, match=r"1 GPU\(s\).*--share-gpu"):
        places(Options(ranks=(1,)), gpus=1)


def test_the_settings_of_a_fabric_are_in_the_rows_and_in_the_key() -> None:
    case = CollectiveCase("all_reduce", 1024)
    plain, wide = Place(4, "loopback", 4), Place(4, "loopback-2x2", 4)
    assert plain.columns()["settings"] == "{}"
    assert '"NCCL_SOCKET_NTHREADS": "2"' in wide.columns()["settings"]
    assert case.key(plain) != case.key(wide)
