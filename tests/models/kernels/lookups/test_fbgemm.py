"""FBGEMM's lookups: what arguments, gradients and kernel names tell, and laws that an analytic time has to keep."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._hardware.description import Quantity
from steptime._hardware.device import DeviceLimits, reference_device
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics
from steptime._models.estimate import Source
from steptime._models.kernels.from_ops import LOOKUP, questions_of
from steptime._models.lookups.fbgemm import STATE_ELEMENTS, FbgemmCall, FbgemmLookup, calls_in, lookup_of, optimizer_of
from steptime._models.lookups.fbgemm_kernels import backward_kernels, forward_kernels, total_ns
from steptime._platforms.platform import Platform
from steptime._program.program import Calls, Ops, Program, Signature, Stream, Tensor, Thread, Value, Works
from steptime._sim.modelled.issue import DeviceWork
from steptime._sim.modelled.lookup_work import lookup_questions
from steptime.errors import InputError

ROOT = Path(__file__).parents[4]
ROWWISE = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
ADAGRAD = "fbgemm::split_embedding_codegen_lookup_adagrad_function"
DENSE = "fbgemm::dense_embedding_codegen_lookup_function"
ROWWISE_BACKWARD = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"
KERNEL = "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 5ul>(at::Generic<float, 1ul, int>)"

SHEET = "NVIDIA V100 data sheet"
V100 = DeviceLimits(
    name="v100",
    title="V100",
    whole="v100",
    share=1,
    models="",
    sms=Quantity(80, SHEET),
    memory_bytes=Quantity(16e9, SHEET),
    bandwidth_bytes_per_s=Quantity(900e9, SHEET),
    cache_bytes=Quantity(6e6, SHEET),
    clock_hz=Quantity(1.53e9, SHEET),
    threads_per_sm=Quantity(2048, SHEET),
    dispatch=reference_device().dispatch,
    peak_flop_per_s={"float32": Quantity(15.7e12, SHEET)},
)
LARGE = FbgemmLookup("rowwise_adagrad", 40, 2048, 2_000_000, 4_000_000, 2560, 64)


def vector(length: int, dtype: str = "float32") -> Tensor:
    return Tensor((length,), dtype)


def split_arguments(tables: int, batch: int, lookups: int, weights: int, state: int) -> list[Value]:
    """As Kineto recorded them in 2022: shapes, but no numbers."""
    inputs: list[Value] = [None] * 29
    inputs[0:4] = [vector(0), vector(weights), vector(0), Tensor((0, 0), "float32")]
    inputs[4:7] = [vector(tables, "int32"), vector(tables, "int64"), vector(tables + 1, "int32")]
    inputs[9] = vector(tables + 1, "int64")
    inputs[11:13] = [vector(lookups, "int64"), vector(batch * tables + 1, "int64")]
    inputs[20] = vector(state)
    return inputs


def with_numbers(inputs: list[Value], total_dim: int, max_dim: int, pooling: int = 0) -> list[Value]:
    return [*inputs[:7], total_dim, max_dim, inputs[9], 26, *inputs[11:13], pooling, *inputs[14:]]


def statistics(lookup: FbgemmLookup, **skew: object) -> list[TableStatistics]:
    """Tables alike, each with bags of one length."""
    rows, pooling = lookup.rows // lookup.tables, lookup.lookups / lookup.tables / lookup.batch
    generator = Generator(rows, pooling, **skew)  # type: ignore[arg-type]
    return [expected_statistics(generator, lookup.batch, lookup.total_dim // lookup.tables)] * lookup.tables


def both_ns(
    lookup: FbgemmLookup, device: DeviceLimits = V100, tables: list[TableStatistics] | None = None
) -> tuple[float, float]:
    return total_ns(forward_kernels(lookup, device, tables)), total_ns(backward_kernels(lookup, device, tables))


def part_ns(lookup: FbgemmLookup, part: str, tables: list[TableStatistics] | None = None) -> float:
    return {kernel.name: kernel.time_ns for kernel in backward_kernels(lookup, V100, tables)}[part]


# Arguments.


def test_the_name_of_an_op_tells_the_optimiser() -> None:
    assert optimizer_of(ROWWISE) == optimizer_of(ROWWISE_BACKWARD) == "rowwise_adagrad"
    assert optimizer_of(DENSE) == optimizer_of("torch::autograd::CppNode<SplitLookupFunction_Dense_Op>") == "dense"
    assert optimizer_of("fbgemm::permute_sparse_features") is None
    assert optimizer_of(f"autograd::engine::evaluate_function: {ROWWISE_BACKWARD}") is None  # it encloses the node of that name


def test_shapes_alone_tell_rows_from_the_state_and_width_from_the_gradient() -> None:
    inputs = split_arguments(tables=5, batch=2048, lookups=169_530, weights=480_000, state=5_000)
    lookup = lookup_of(ROWWISE, inputs, Tensor((2048, 480), "float32"))
    assert lookup == FbgemmLookup("rowwise_adagrad", 5, 2048, 169_530, 5_000, 480, 96)
    assert lookup_of(ROWWISE, inputs) == lookup  # rows of 96 elements on average: 480,000 / 5,000
    assert lookup.bits == 13
    wide_tables_are_long = split_arguments(tables=5, batch=2048, lookups=9, weights=700_000, state=5_000)
    assert lookup_of(ROWWISE, wide_tables_are_long, Tensor((2048, 480), "float32")).rows == 5_000


def test_numbers_are_taken_where_they_are_recorded() -> None:
    inputs = with_numbers(split_arguments(3, 128, 768, 640_649_648, 640_649_648), 48, 16, pooling=1)
    inputs[14] = vector(768)
    lookup = lookup_of(ADAGRAD, inputs)
    assert (lookup.rows, lookup.total_dim, lookup.max_dim, lookup.mean, lookup.weighted) == (40_040_603, 48, 16, True, True)
    assert lookup.bits == 26  # the trace says so in argument 10


def test_a_dense_lookup_has_its_arguments_elsewhere() -> None:
    inputs: list[Value] = [vector(112), vector(2, "int64"), vector(3, "int32"), 32, 16, vector(3, "int64"), 3]
    inputs += [vector(32, "int64"), vector(33, "int64"), 0, None, None, 0]
    assert lookup_of(DENSE, inputs) == FbgemmLookup("dense", 2, 16, 32, 7, 32, 16)


@pytest.mark.parametrize(
    ("kernel", "vectors", "lanes"),
    [
        (KERNEL, 5, 32),
        ("void split_embedding_codegen_forward_unweighted_kernel<float, float, float, false, long, 1ul, 8ul>(int)", 1, 8),
        (
            "void split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1<float, float, float, 1ul, 8>(int)",
            1,
            8,
        ),
    ],
)
def test_kernel_names_tell_the_widest_row_where_no_argument_does(kernel: str, vectors: int, lanes: int) -> None:
    lookup = lookup_of(ROWWISE, split_arguments(4, 8, 64, 1_000, 100), None, ["void cub::Other<int, 3ul>(int)", kernel])
    assert (lookup.vectors, lookup.lanes, lookup.max_dim) == (vectors, lanes, 4 * vectors * lanes)


def broken(place: int, value: Value) -> list[Value]:
    inputs = split_arguments(4, 8, 64, 1_000, 100)
    inputs[place] = value
    return inputs


@pytest.mark.parametrize(
    ("op", "inputs", "said"),
    [
        ("aten::embedding_bag", split_arguments(4, 8, 64, 1_000, 100), "not a table-batched lookup"),
        (ROWWISE_BACKWARD, [], "not a table-batched lookup"),
        ("fbgemm::split_embedding_codegen_lookup_shampoo_function", [], "optimiser 'shampoo' is not known"),
        (ROWWISE, [], "argument 6 (D_offsets) is 'missing'; expected a vector of int32 or int64"),
        (ROWWISE, broken(11, None), "argument 11 (indices) is None; expected a vector of int32 or int64"),
        (ROWWISE, broken(11, vector(64)), "argument 11 (indices) is float32 of shape (64,)"),
        (
            ROWWISE,
            broken(12, vector(32, "int64")),
            "argument 12 (offsets) is int64 of shape (32,); expected a multiple of the 4",
        ),
        (ROWWISE, broken(1, vector(1_000, "int8")), "argument 1 (weights) is int8"),
        (ROWWISE, broken(2, vector(7)), "tables outside the device's memory are not modelled"),
        (ROWWISE, broken(13, 2), "argument 13 (pooling_mode) is 2"),
        (ROWWISE, broken(7, "wide"), "argument 7 (total_D) is 'wide'; expected a whole number"),
        (ADAGRAD, split_arguments(4, 8, 64, 1_000, 1_000), "argument 7 (total_D) is None"),
    ],
)
def test_arguments_that_do_not_match_are_one_line_that_names_them(op: str, inputs: list[Value], said: str) -> None:
    with pytest.raises(InputError) as caught:
        lookup_of(op, inputs)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gradient_of_another_batch_is_refused() -> None:
    with pytest.raises(InputError, match=r"gradient has shape \(9, 40\); expected a row for each of 8 samples"):
        lookup_of(ROWWISE, split_arguments(4, 8, 64, 1_000, 100), Tensor((9, 40), "float32"))


# Lookups of a program.


def program() -> Program:
    """Two lookups and their backward passes in the other order; each launches a kernel, the last another by an op inside."""
    inputs = (split_arguments(5, 16, 300, 500, 50), split_arguments(2, 16, 80, 400, 20))
    gradients = (Tensor((16, 50), "float32"), Tensor((16, 40), "float32"))
    signatures = (*(Signature(tuple(each)) for each in inputs), *(Signature((each,)) for each in gradients))
    names = (ROWWISE, f"autograd::engine::evaluate_function: {ROWWISE_BACKWARD}", ROWWISE_BACKWARD, KERNEL, "aten::zeros")
    rows = [(0, -1, 0), (0, -1, 1), (1, -1, -1), (2, 2, 3), (1, -1, -1), (2, 4, 2), (4, 5, -1)]  # name, parent, signature
    none, zero = np.full(len(rows), -1), np.zeros(len(rows), dtype=int)
    start = np.arange(len(rows)) * 100
    ops = Ops.from_columns(
        {
            "name": [row[0] for row in rows],
            "parent": [row[1] for row in rows],
            "signature": [row[2] for row in rows],
            "start_ns": start,
            "end_ns": start + 90,
            **dict.fromkeys(("thread", "step", "phase"), zero),
            **dict.fromkeys(("sequence", "node"), none),
        }
    )
    launching = np.array([0, 1, 3, 5, 6, -1])
    some, unknown = np.zeros(6, dtype=int), np.full(6, -1)
    times = {"start_ns": np.arange(6), "end_ns": np.arange(6) + 1}
    calls = {**dict.fromkeys(("kind", "api", "thread", "step"), some), **dict.fromkeys(("stream", "awaits", "after"), unknown)}
    works = {**dict.fromkeys(("kind", "stream", "step", "bytes"), some), "collective": unknown}
    works |= {
        "name": np.array([3, 3, 3, 3, 4, 4]),
        "call": np.arange(6),
        "start_ns": some,
        "end_ns": np.array([1, 2, 4, 3, 5, 9]) * 1_000,
    }
    return Program(
        rank=0,
        world_size=1,
        names=names,
        threads=(Thread(1),),
        streams=(Stream(7),),
        ops=ops,
        calls=Calls.from_columns({**calls, **times, "op": launching}),
        works=Works.from_columns(works),
        signatures=signatures,
        steps=(0,),
    )


def test_lookups_of_a_program_have_their_own_kernels_and_backward_passes() -> None:
    first, second = calls_in(program())
    assert (first.lookup.tables, first.lookup.total_dim, second.lookup.tables, second.lookup.total_dim) == (5, 50, 2, 40)
    assert [total_ns(kernels) for kernels in (first.forward, first.backward)] == [1_000, 8_000]
    assert [total_ns(kernels) for kernels in (second.forward, second.backward)] == [2_000, 4_000]
    assert first.lookup.vectors == 5
    assert isinstance(first, FbgemmCall)


def looked_up(recorded: Program) -> DeviceWork:
    device = Platform.load("1xa100").device
    issued = [work for work in questions_of(recorded, cached_bytes=device.cached_bytes) if work.kind == LOOKUP]
    return lookup_questions(recorded, issued, None).work([], device)


def test_recorded_lookups_are_predicted_by_their_shapes_on_another_device() -> None:
    work = looked_up(program())
    assert [each.op for each in work.works] == [0, 1, 3, 5]
    assert all(each.estimate.source is Source.ANALYTIC and each.estimate.time_ns > 0 for each in work.works)
    assert [len(each.launches) for each in work.works] == [1, 1, 5, 5]
    assert "its 7 tables are asked for is not known" in work.warnings[0]


def test_recorded_lookups_whose_shapes_tell_nothing_are_a_guess_that_says_so() -> None:
    recorded = program()
    told = Signature(tuple(broken(12, vector(32, "int64"))))
    work = looked_up(replace(recorded, signatures=(told, *recorded.signatures[1:])))
    assert [each.op for each in work.works] == [0, 1, 3, 5]
    assert all(each.estimate.source is Source.FALLBACK for each in work.works)
    assert "expected a multiple of the 4" in work.warnings[0] and "give what is looked up with --lookups" in work.warnings[1]


# Times.


def test_a_large_forward_takes_no_less_than_its_bytes_and_not_many_times_as_long() -> None:
    lookup = replace(LARGE, tables=1, rows=50_000_000, total_dim=128, max_dim=128, lookups=20_000_000)
    moved = lookup.lookups * (128 * 4 + 8) + lookup.batch * 128 * 4
    forward, _ = both_ns(lookup)
    assert 1.0 < forward / (1e9 * moved / 900e9) < 6


def test_a_longer_chain_of_loads_takes_as_many_times_the_latency_of_memory() -> None:
    few = FbgemmLookup("sgd", 1, 1, 100, 40_000_000, 16, 16)
    more = replace(few, lookups=200)
    cycles = (both_ns(more)[0] - both_ns(few)[0]) * 1.53
    assert cycles == pytest.approx(100 * 1029, rel=0.05)  # rows of a table too large for translations


@pytest.mark.parametrize("change", [{"lookups": 0}, {"lookups": 1, "rows": 40}, {"rows": 10**12}, {"lookups": 10**12}])
@pytest.mark.parametrize("optimizer", sorted(STATE_ELEMENTS))
def test_times_are_finite_and_positive_at_the_ends(change: dict[str, int], optimizer: str) -> None:
    for weighted in (False, True):
        forward, backward = both_ns(replace(LARGE, optimizer=optimizer, weighted=weighted, **change))  # type: ignore[arg-type]
        assert np.isfinite([forward, backward]).all()
        assert forward > 0
        assert backward > 0 or change == {"lookups": 0}


@given(st.integers(1, 60), st.integers(1, 4096), st.floats(0, 200), st.integers(1, 10**7), st.sampled_from([16, 64, 128, 512]))
def test_more_lookups_never_take_less_forward_and_not_much_less_backward(
    tables: int, batch: int, pooling: float, rows: int, dim: int
) -> None:
    few = FbgemmLookup("rowwise_adagrad", tables, batch, int(tables * batch * pooling), tables * rows, tables * dim, dim)
    more = replace(few, lookups=2 * few.lookups + tables)
    (few_forward, few_backward), (more_forward, more_backward) = both_ns(few), both_ns(more)
    assert more_forward >= few_forward * (1 - 1e-9)
    assert more_backward >= 0.9 * few_backward


def test_statistics_of_tables_alike_say_what_is_assumed_without_them() -> None:
    lookup = replace(LARGE, lookups=20 * 40 * 2048)
    for told, assumed in zip(both_ns(lookup, V100, statistics(lookup)), both_ns(lookup), strict=True):
        assert told == pytest.approx(assumed, rel=0.1)


def test_repeated_rows_make_the_forward_pass_shorter() -> None:
    lookup = replace(LARGE, lookups=20 * 40 * 2048, rows=40 * 10**7)
    skewed = statistics(lookup, kind="zipf", alpha=1.3)
    assert both_ns(lookup, V100, skewed)[0] < 0.8 * both_ns(lookup)[0]


def test_one_row_that_everyone_looks_up_is_waited_for() -> None:
    lookup = replace(LARGE, tables=1, lookups=20 * 2048, rows=500, total_dim=64)
    hot = statistics(lookup, kind="hot", alpha=1.0, shift=1.0)
    assert hot[0].hottest[0] > 0.4 * lookup.lookups
    steps = hot[0].hottest[0] / 32  # the warps of a block share the lookups of a row
    assert part_ns(lookup, "block per row", hot) > steps * 193 / 1.53  # each waits for its gradient
    assert part_ns(lookup, "block per row", hot) > 3 * part_ns(lookup, "block per row")


def test_tables_in_another_order_take_as_long() -> None:
    lookup = replace(LARGE, tables=2, lookups=30 * 2048, total_dim=80, rows=2_100_000)
    small, large = Generator(100_000, 10.0, kind="zipf"), Generator(2_000_000, 20.0, lengths="geometric")
    tables = [expected_statistics(small, 2048, 16), expected_statistics(large, 2048, 64)]
    assert both_ns(lookup, V100, tables) == pytest.approx(both_ns(lookup, V100, tables[::-1]), rel=1e-12)


def test_statistics_of_other_tables_are_refused() -> None:
    with pytest.raises(InputError, match="statistics of 39 tables of 2496 elements"):
        both_ns(LARGE, V100, statistics(LARGE)[1:])
    with pytest.raises(InputError, match=r"batch \[2048\]; expected .* batch \[1024\]"):
        both_ns(replace(LARGE, batch=1024), V100, statistics(LARGE))


def test_a_table_without_lookups_costs_next_to_nothing_in_the_backward_pass() -> None:
    lookup = replace(LARGE, tables=2, lookups=20 * 2048, total_dim=128, rows=200_000)
    one = expected_statistics(Generator(100_000, 20.0), 2048, 64)
    tables = [one, expected_statistics(Generator(100_000, 0.0), 2048, 64)]
    alone = replace(lookup, tables=1, total_dim=64, rows=100_000)
    assert both_ns(lookup, V100, tables)[1] == pytest.approx(both_ns(alone, V100, [one])[1], rel=0.1)


def test_a_sort_passes_over_its_keys_once_for_every_eight_bits() -> None:
    sorts = [part_ns(replace(LARGE, lookups=50_000_000, rows=rows), "sort") for rows in (2**8 - 1, 2**16 - 1, 2**24 - 1)]
    assert sorts[0] == pytest.approx(1e9 * 32 * 50_000_000 / (0.68 * 900e9), rel=0.02)  # and once before, over keys alone
    assert sorts[2] - sorts[1] == pytest.approx(sorts[1] - sorts[0], rel=0.01)
    assert sorts[1] - sorts[0] == pytest.approx(1e9 * 24 * 50_000_000 / (0.68 * 900e9), rel=0.02)


def test_weights_and_means_and_state_cost_extra() -> None:
    plain = both_ns(replace(LARGE, optimizer="sgd"))[1]
    assert both_ns(replace(LARGE, optimizer="sgd", weighted=True))[1] > 1.3 * plain
    assert part_ns(replace(LARGE, weighted=True), "sort") == 2 * part_ns(LARGE, "sort")  # weights are sorted like samples
    assert both_ns(replace(LARGE, optimizer="sgd", mean=True))[1] > plain
    assert (
        plain
        < both_ns(LARGE)[1]
        < both_ns(replace(LARGE, optimizer="adagrad"))[1]
        < both_ns(replace(LARGE, optimizer="adam"))[1]
    )


def test_a_part_of_a_device_takes_about_its_share_longer() -> None:
    whole, half = both_ns(LARGE), both_ns(LARGE, replace(V100, share=2))
    assert all(1.8 < part / all_of_it < 2.5 for part, all_of_it in zip(half, whole, strict=True))


def test_narrower_items_move_fewer_bytes() -> None:
    assert both_ns(replace(LARGE, dtype="float16"))[0] < 0.8 * both_ns(LARGE)[0]


# Real traces.


@pytest.mark.parametrize(
    ("folder", "lookups", "within"), [("meta_ranking_2xV100", 12, (0.5, 1.5)), ("dlrm_8xV100", 16, (0.3, 1.5))]
)
def test_lookups_of_real_traces_are_found_and_of_the_right_size(folder: str, lookups: int, within: tuple[float, float]) -> None:
    from steptime._program.load import load

    place = Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared")) / "data" / "traces" / folder
    if not place.exists():
        pytest.skip(f"{folder} is not here: set STEPTIME_SHARED to the folder that holds data/traces")
    calls = [call for each in load([place]).programs for call in calls_in(each)]
    assert len(calls) == lookups
    for call in calls:
        forward, backward = both_ns(call.lookup)
        assert within[0] < forward / total_ns(call.forward) < within[1]
        assert within[0] < backward / total_ns(call.backward) < within[1]
