"""Laws of the form of generated kernels: how they are cut into blocks, and what blocks touch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._models.kernels.forms.generated import queued_ns
from steptime._models.kernels.forms.generated.blocks import blocks_of
from steptime._models.kernels.forms.generated.numbers import AT
from steptime._models.kernels.forms.generated.tiles import touched_by
from steptime._models.kernels.forms.generated.traffic import SECTOR_BYTES
from steptime._ops.generated import (
    KINDS,
    LOAD,
    PERSISTENT,
    POINTWISE,
    REDUCTION,
    STORE,
    TEMPLATE,
    Access,
    AddressTerm,
    GeneratedKernel,
)

SMS = 100.0


def _rows(kind: str, hint: str, rows: int, width: int, stride: int = 1) -> GeneratedKernel:
    load = Access(
        LOAD,
        0,
        4,
        (AddressTerm("r0", 1, width, stride), AddressTerm("x", 1, rows, width * stride)),
        loop=int(kind == REDUCTION),
    )
    store = Access(STORE, 1, 4, (AddressTerm("x", 1, rows, 1),))
    arguments = (("in_ptr0", "float32"), ("out_ptr0", "float32"))
    return GeneratedKernel("triton_0", kind, (("x", rows), ("r0", width)), hint, arguments, (load, store), reductions=1)


def _shifted(*offsets: int) -> GeneratedKernel:
    loads = [Access(LOAD, 0, 4, (AddressTerm("x", 1, 1 << 16, 1),), offset=offset) for offset in offsets]
    return GeneratedKernel("triton_1", POINTWISE, (("x", 1 << 16),), "", (("in_ptr0", "float32"),), tuple(loads))


def test_a_long_row_is_a_block_that_takes_turns() -> None:
    (blocks,) = blocks_of(_rows(REDUCTION, "INNER", 78, 8004))
    assert (blocks.count, blocks.turns, dict(blocks.tile)) == (78, 4, {"x": 1, "r0": 2048})


def test_a_persistent_reduction_holds_its_row_at_once() -> None:
    (blocks,) = blocks_of(_rows(PERSISTENT, "INNER", 4096, 2048))
    assert (blocks.count, blocks.turns, dict(blocks.tile)) == (4096, 1, {"x": 1, "r0": 2048})


def test_contiguous_rows_are_fetched_once() -> None:
    touched = touched_by(_rows(PERSISTENT, "INNER", 4096, 2048), SMS)
    assert touched.fetched * SECTOR_BYTES == 4 * 4096 * 2048


def test_rows_with_gaps_fetch_a_sector_for_each_element() -> None:
    touched = touched_by(_rows(PERSISTENT, "INNER", 4096, 128, stride=16), SMS)
    assert touched.fetched == 4096 * 128


def test_shifted_loads_of_one_tensor_are_asked_for_each_and_fetched_once() -> None:
    one, three = touched_by(_shifted(0), SMS), touched_by(_shifted(0, 8, 16), SMS)
    assert three.loaded == pytest.approx(3 * one.loaded)
    assert three.fetched == pytest.approx(one.fetched, rel=0.1)


@given(
    st.sampled_from([kind for kind in KINDS if kind != TEMPLATE]),
    st.sampled_from(["", "INNER", "OUTER", "OUTER_TINY", "DEFAULT"]),
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 16),
)
def test_blocks_cover_every_kernel(kind: str, hint: str, rows: int, width: int) -> None:
    kernel = _rows(kind, hint, rows, width)
    for blocks in blocks_of(kernel):
        assert blocks.count * blocks.turns * blocks.elements >= kernel.elements
        assert blocks.warps >= 1
        assert all(size & (size - 1) == 0 for _, size in blocks.tile)


def test_a_kernel_without_accesses_touches_nothing() -> None:
    touched = touched_by(GeneratedKernel("triton_2"), SMS)
    assert np.isfinite([touched.loaded, touched.fetched, touched.instructions]).all()
    assert touched.loaded == 0


def test_a_reduction_of_few_columns_is_cut_into_many_blocks() -> None:
    load = Access(LOAD, 0, 4, (AddressTerm("x", 1, 768, 1), AddressTerm("r0", 1, 4096, 768)), loop=1)
    kernel = GeneratedKernel(
        "triton_3", REDUCTION, (("x", 768), ("r0", 4096)), "DEFAULT", (("in_ptr0", "float32"),), (load,), reductions=1
    )
    assert touched_by(kernel, SMS).blocks.count >= 0.9 * SMS


def test_an_index_of_a_row_is_looked_up_once_for_it() -> None:
    rows, index = 1 << 16, Access(LOAD, 0, 8, (AddressTerm("y", 1, 1 << 16, 1),))
    looked_up = Access(LOAD, 1, 4, indirect=True)
    arguments = (("in_ptr0", "int64"), ("in_ptr1", "float32"), ("in_ptr2", "float32"))
    kernel = GeneratedKernel("triton_4", POINTWISE, (("x", 64), ("y", rows)), "", arguments, (index, looked_up))
    assert touched_by(kernel, SMS).scattered <= 2 * rows


def test_additions_to_a_few_elements_wait_for_each_other_and_those_to_many_do_not() -> None:
    numbers = np.zeros((4, len(AT)))
    atomics = np.array([1e6, 1e6, 1e6, 1e3])
    numbers[:, AT["atomics"]] = atomics
    numbers[:, AT["contended"]] = atomics / np.array([256, 4096, 1e5, 256])
    least = queued_ns(numbers)
    assert least[0] > 1e6
    assert least[1:].tolist() == [0.0, 0.0, 0.0]
