"""Laws of what embeddings and their gradients launch."""

from __future__ import annotations

import pytest
from tests.models.launching import rules_of

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import STRIDED, VECTORIZED
from steptime.errors import InputError

launches = rules_of("embedding")

ATOMIC = "compute_grad_weight_atomic_accumulate"


def gradient(tokens: int, rows: int, dtype: str = "float32", strides: tuple[int, int] | None = None) -> list[str]:
    index = TensorArg((4, tokens // 4), "int64", strides, high=rows)
    args = (TensorArg((4, tokens // 4, 128), dtype), index, rows, -1, False)
    return [launch.kernel for launch in launches(Call("aten::embedding_dense_backward.default", args))]


def bag(bags: int, asked: int, values: str = "offsets") -> float:
    offsets = TensorArg((bags,), "int64", high=asked, values=values)
    args = (TensorArg((1000, 64)), TensorArg((asked,), "int64", high=1000), offsets, False, 0, False, None, False, -1)
    (launch,) = launches(Call("aten::_embedding_bag.default", args))
    return launch.grids[0][1]


def test_tokens_are_sorted_from_3073_on() -> None:
    assert gradient(3072, 30_000) == [VECTORIZED, "embedding_backward_feature_kernel"]
    assert gradient(3076, 30_000)[-1] == "sum_and_scatter"
    assert len(gradient(3076, 30_000)) > 10


def test_long_segments_are_added_atomically_and_halves_by_way_of_floats() -> None:
    assert gradient(20_480, 512)[-1] == ATOMIC
    assert gradient(3456, 512)[-1] == "sum_and_scatter"
    assert gradient(20_480, 512, "bfloat16")[-3:] == [VECTORIZED, ATOMIC, VECTORIZED]


def test_tokens_that_are_repeated_by_a_stride_are_packed_first() -> None:
    assert gradient(4096, 2, strides=(0, 1)) == [STRIDED, *gradient(4096, 2)]


def test_the_longest_bag_has_what_even_ones_leave_over() -> None:
    assert bag(64, 640) == 10
    assert bag(64, 640 + 63) == 73
    assert bag(64, 640 + 63, values="normal") == pytest.approx(703 / 64)


def test_a_gradient_of_a_table_without_rows_is_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"aten::embedding_dense_backward\.default"):
        gradient(4096, 0)
