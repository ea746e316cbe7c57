from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steptime._models.kernels.call import Call, TensorArg
from steptime_lab.measure.host.issued import KEPT, shrink

SIZES = st.integers(1, 5000)


@st.composite
def tensors(draw: st.DrawFn) -> TensorArg:
    shape = tuple(draw(st.lists(SIZES, min_size=0, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    strides, reached = [0] * len(shape), 1
    for axis in order:
        reached *= draw(st.sampled_from((1, 1, 1, 3)))
        strides[axis] = draw(st.sampled_from((reached, reached, 0)))
        reached *= shape[axis]
    return TensorArg(shape, draw(st.sampled_from(("float32", "int64"))), draw(st.sampled_from((None, tuple(strides)))))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    every = draw(st.lists(tensors(), min_size=1, max_size=4))
    numbers = tuple(draw(st.lists(st.sampled_from([size for one in every for size in one.shape] or [1]), max_size=3)))
    return Call("aten::any.default", (*every[:2], tuple(every[2:]), numbers, 0.5), written=(1,))


@given(calls())
def test_shrinking_twice_changes_nothing(call: Call) -> None:
    assert shrink(shrink(call)) == shrink(call)


@given(calls())
def test_sizes_stay_equal_and_aligned_and_dtypes_and_ranks_stay(call: Call) -> None:
    became: dict[int, int] = {}
    for before, after in zip(call.tensors(), shrink(call).tensors(), strict=True):
        assert (before.dtype, len(before.shape)) == (after.dtype, len(after.shape))
        for old, new in zip(before.shape, after.shape, strict=True):
            assert new <= 34
            assert became.setdefault(old, new) == new
            assert old <= KEPT or (old % 8 == 0, old % 2) == (new % 8 == 0, new % 2)


@given(tensors())
def test_broadcast_dimensions_and_the_order_of_strides_stay(tensor: TensorArg) -> None:
    (after,) = shrink(Call("aten::any.default", (tensor,))).tensors()
    if tensor.strides is None:
        assert after.strides is None
        return
    assert after.strides is not None
    assert [stride == 0 for stride in tensor.strides] == [stride == 0 for stride in after.strides]
    moving = [axis for axis, size in enumerate(tensor.shape) if size > 1 and tensor.strides[axis]]
    assert sorted(moving, key=lambda axis: tensor.strides[axis]) == sorted(moving, key=lambda axis: after.strides[axis])  # type: ignore[index]


def test_a_number_that_is_a_size_shrinks_with_it_and_others_do_not() -> None:
    call = Call("aten::view.default", (TensorArg((64, 100)), (100, 64), 3, 0.5, True))
    assert shrink(call).args == (TensorArg((32, 34)), (34, 32), 3, 0.5, True)


def test_calls_that_differ_in_size_alone_are_one_question() -> None:
    small, large = (Call("aten::mm.default", (TensorArg((n, n)), TensorArg((n, 2 * n))), written=(n % 3,)) for n in (64, 512))
    assert shrink(small) == shrink(large)
    odd = Call("aten::mm.default", (TensorArg((63, 64)), TensorArg((64, 128))))
    assert shrink(odd) != shrink(small)
