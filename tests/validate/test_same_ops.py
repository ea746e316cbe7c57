"""When two programs have the same ops."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.same_ops import same_device_ops, same_ops

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.layers import activation, linear
from steptime._build.emit.losses import mse_loss
from steptime._build.emit.tape import Tape
from steptime._program.program import Program, Tensor


def step(
    *,
    width: int = 16,
    shift: int = 0,
    reuse: bool = False,
    more: Callable[[Emitter, Tensor], None] | None = None,
    ranks: int = 1,
) -> Program:
    """A layer forward and backward; `shift` draws ids before, `reuse` gives the memory of the input to the loss's target."""
    emit = Emitter(world_size=ranks)
    for _ in range(shift):
        emit.tensor((1,))
    tape = Tape(emit)
    x = emit.tensor((32, 8))
    y = linear(tape, x, tape.parameter(emit.tensor((width, 8))), tape.parameter(emit.tensor((width,))))
    if more is not None:
        more(emit, y)
    target = emit.view(x, (32, width)) if reuse else emit.tensor((32, width))
    tape.backward(mse_loss(tape, activation(tape, "relu", y), target))
    if ranks > 1:
        emit.all_reduce((y,))
    return emit.program()


def test_a_program_is_the_same_as_itself_whatever_numbers_tensors_go_by() -> None:
    for same in (same_ops, same_device_ops):
        found = same(step(), step(shift=7))
        assert found.differences == ()
        assert found.equal == found.total > 0
        assert found.fraction == 1.0


def test_another_shape_is_a_difference_of_every_op_that_has_it() -> None:
    found = same_ops(step(), step(width=8))
    assert found.equal < found.total
    assert any("recorded float32[32, 8]" in difference.what for difference in found.differences)
    assert same_device_ops(step(), step(width=8)).equal < same_device_ops(step(), step()).equal


def test_an_op_too_many_is_one_difference() -> None:
    def extra(emit: Emitter, y: Tensor) -> None:
        emit.op("exp", (y,), (emit.tensor(y.shape),))

    (difference,) = same_ops(step(more=extra), step()).differences
    assert (difference.name, difference.recorded, difference.what) == ("aten::exp", -1, "not in the recorded program")
    (missing,) = same_ops(step(), step(more=extra)).differences
    assert (missing.captured, missing.what) == (-1, "only in the recorded program")
    assert len(same_device_ops(step(more=extra), step()).differences) == 1
    assert "op" in str(difference)


def test_other_memory_is_a_difference_though_all_shapes_agree() -> None:
    found = same_ops(step(width=8), step(width=8, reuse=True))
    assert found.differences
    assert all("memory" in difference.what for difference in found.differences)


def test_memory_that_a_recording_uses_again_is_none() -> None:
    def twice(*, again: bool) -> Program:
        emit = Emitter()
        first = emit.tensor((4,))
        emit.op("exp", (emit.tensor((4,)),), (first,))
        emit.op("exp", (first,), (emit.tensor((4,)),))
        second = emit.view(first) if again else emit.tensor((4,))  # the first is not looked at any more
        emit.op("exp", (emit.tensor((4,)),), (second,))
        emit.op("exp", (second,), (emit.tensor((4,)),))
        return emit.program()

    assert same_ops(twice(again=False), twice(again=True)).differences == ()


def test_collectives_are_compared_by_what_they_move() -> None:
    assert same_device_ops(step(ranks=2), step(ranks=2)).differences == ()
    assert any("record_param_comms" in one.name for one in same_device_ops(step(ranks=2), step(ranks=2, width=8)).differences)


def test_what_is_in_cache_can_be_left_out() -> None:
    def late(emit: Emitter, y: Tensor) -> None:
        del y
        emit.op("exp", (emit.tensor((1 << 26,)),), (emit.tensor((1 << 26,)),))

    def early(emit: Emitter, y: Tensor) -> None:
        emit.op("exp", (emit.tensor((1 << 26,)),), (emit.view(y, (1 << 26,), (0,)),))

    assert same_device_ops(step(more=late), step(more=early)).differences
    assert same_device_ops(step(more=late), step(more=early), caches=False).differences == ()
