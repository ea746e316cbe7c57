"""Laws of what ops take for themselves, and sizes that were seen on an H200."""

from __future__ import annotations

import pytest
from tests.models.test_issued import SPARSE, Trace, gpu

from steptime._hardware.device import read_device, reference_device
from steptime._models.memory.lifetimes import storages
from steptime._models.memory.scratch import column_sum_bytes
from steptime._program.program import Tensor

MIB = 1 << 20


def scratch(trace: Trace) -> list[tuple[int, int, int]]:
    """Bytes, begin and end of what comes after the storages that arguments name, counted from the first op that was added."""
    program = trace.program()
    sides = [side for one in program.signatures for side in (one.inputs, one.outputs)]
    named = {value.storage for side in sides for value in side if isinstance(value, Tensor) and value.device}
    return [(each.nbytes, each.born - 1, each.dies - 1) for each in storages(program, reference_device())[len(named) :]]


def test_a_sort_takes_positions_and_a_second_copy_while_it_runs() -> None:
    trace = Trace()
    trace.op("aten::sort", gpu([100], 3, "int"), outputs=(gpu([100], 5, "int"), gpu([100], 6, "long int")))
    assert scratch(trace) == [(100 * (8 + 8 + 4), 0, 0)]


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (8192, 768, 48 * MIB),  # seen: the bias of a BERT on 16 sentences
        (16, 768, 0),  # one block adds it all
    ],
)
def test_a_sum_over_rows_takes_what_its_blocks_hand_to_one_another(rows: int, columns: int, nbytes: int) -> None:
    assert column_sum_bytes(rows, columns, reference_device()) == nbytes
    trace = Trace()
    trace.op("aten::sum", gpu([rows, columns], 3), [0], True, outputs=(gpu([1, columns], 4),))
    assert [found[0] for found in scratch(trace)] == [nbytes] * (nbytes > 0)


def test_a_sum_along_rows_takes_next_to_nothing() -> None:
    trace = Trace()
    trace.op("aten::sum", gpu([8192, 768], 3), [1], True, outputs=(gpu([8192, 1], 4),))
    trace.op("aten::sum", gpu([8192, 768], 3), [-1], True, outputs=(gpu([8192, 1], 5),))
    assert scratch(trace) == []


def test_a_wide_filter_works_on_copies_with_channels_last() -> None:
    trace = Trace()
    image, filters, result = gpu([64, 64, 56, 56], 3), gpu([64, 64, 3, 3], 4), gpu([64, 64, 56, 56], 5)
    trace.op("aten::cudnn_convolution", image, filters, outputs=(result,))
    assert scratch(trace) == [(4 * (2 * 64 * 64 * 56 * 56 + 64 * 64 * 9), 0, 0)]


def test_a_filter_of_one_pixel_that_skips_none_needs_no_copy() -> None:
    trace = Trace()
    trace.op("aten::cudnn_convolution", gpu([64, 64, 56, 56], 3), gpu([256, 64, 1, 1], 4), outputs=(gpu([64, 256, 56, 56], 5),))
    assert scratch(trace) == []


def test_backward_of_a_convolution_makes_one_gradient_after_the_other() -> None:
    trace = Trace()
    given = gpu([8, 4, 7, 7], 3), gpu([8, 2, 7, 7], 4), gpu([4, 2, 3, 3], 5)
    trace.op("aten::convolution_backward", *given, outputs=(gpu([8, 2, 7, 7], 6), gpu([4, 2, 3, 3], 7)))
    both = 4 * (8 * 4 * 49 + 8 * 2 * 49)
    assert scratch(trace) == [(both + 8 * 72, 0, 0)]  # of one op that stands for both
    apart = Trace()
    outer = apart.op("aten::convolution_backward", *given, outputs=(gpu([8, 2, 7, 7], 6), gpu([4, 2, 3, 3], 7)))
    apart.op("aten::empty", outputs=(gpu([8, 2, 7, 7], 6),), inside=outer)
    assert scratch(apart) == [(both + 4 * 72, 0, 0), (both + 8 * 72, 1, 1)]


def test_backward_of_a_filter_of_one_pixel_and_few_channels_needs_no_copies() -> None:
    trace = Trace()
    given = gpu([8, 1, 7, 7], 3), gpu([8, 128, 7, 7], 4), gpu([1, 128, 1, 1], 5)
    trace.op("aten::convolution_backward", *given, outputs=(gpu([8, 128, 7, 7], 6), gpu([1, 128, 1, 1], 7)))
    assert scratch(trace) == [(8 * 128, 0, 0)]


def test_summing_a_sparse_gradient_sorts_its_rows_and_is_done_before_the_sums_are_made() -> None:
    trace = Trace()
    outer = trace.op("aten::_coalesce", SPARSE, outputs=(SPARSE,))
    trace.op("aten::_nnz", outputs=(1000,), inside=outer)
    trace.op("aten::empty", outputs=(gpu([1000], 3, "long int"),), inside=outer)
    trace.op("aten::resize_", gpu([1000], 3, "long int"), outputs=(gpu([10], 3, "long int"),), inside=outer)
    trace.op("aten::empty", outputs=(gpu([10, 16], 4),), inside=outer)
    assert scratch(trace) == [(16 * 1000, 0, 2)]


def test_sums_take_less_on_a_device_with_fewer_sms_and_nothing_of_no_rows() -> None:
    assert 0 < column_sum_bytes(8192, 4096, read_device("a100")) < column_sum_bytes(8192, 4096, reference_device())
    assert column_sum_bytes(0, 768, reference_device()) == 0


def test_what_a_derivative_makes_on_the_way_to_a_result_is_dropped_when_that_is_made() -> None:
    """As in that of a division: -gradient * ((a / b) / b), then gradient / b."""
    trace = Trace()
    node = trace.op("DivBackward0")
    a, b, gradient, first, second, negated, of_b, of_a = (gpu([256], storage) for storage in range(3, 11))
    trace.op("aten::div", a, b, outputs=(first,), inside=node)
    trace.op("aten::div", first, b, outputs=(second,), inside=node)
    trace.op("aten::neg", gradient, outputs=(negated,), inside=node)
    result = trace.op("aten::mul", negated, second, outputs=(of_b,), inside=node) - node
    trace.op("aten::div", gradient, b, outputs=(of_a,), inside=node)
    program = trace.program()
    begin = next(row for row in range(len(program.ops.name)) if program.names[int(program.ops.name[row])] == "DivBackward0")
    made = [life.dies - begin for life in storages(program, reference_device()) if life.born > begin]
    assert made[:3] == [result] * 3
