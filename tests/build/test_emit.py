"""Laws of written ops: what a reader of traces would make of them."""

from __future__ import annotations

import pytest
from tests.support.op_names import names_of

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.gradients import BUCKET_BYTES, FIRST_BUCKET_BYTES, Reducer, buckets_of
from steptime._build.emit.layers import activation, cat, linear
from steptime._build.emit.losses import mse_loss
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import contiguous_strides, is_contiguous
from steptime._program.program import CallKind, Phase, Tensor


def test_ops_nest_as_they_are_opened() -> None:
    emit = Emitter()
    with emit.op("outer"):
        emit.op("inner")
    emit.op("after")
    assert emit.program().ops.parent.tolist() == [-1, 0, -1]


def test_every_tensor_has_memory_of_its_own_and_a_view_that_of_another() -> None:
    emit = Emitter()
    one, other = emit.tensor((4, 2)), emit.tensor((4, 2))
    view = emit.view(one, (2, 4), (1, 2), offset=3)
    assert len({one.id, other.id, view.id}) == 3
    assert one.storage != other.storage
    assert (view.storage, view.offset, view.strides) == (one.storage, 3, (1, 2))
    assert emit.is_view(view)
    assert not emit.is_view(one)


def test_all_empty_tensors_lie_nowhere_together() -> None:
    emit = Emitter()
    assert emit.tensor((0,)).storage == emit.tensor((5, 0)).storage


@pytest.mark.parametrize(("shape", "strides"), [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1))])
def test_strides_are_row_major_and_an_empty_axis_counts_as_one(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == strides


def test_columns_of_a_matrix_are_row_major_only_where_there_is_one_row() -> None:
    emit = Emitter()
    assert is_contiguous(emit.tensor((4, 6)))
    assert not is_contiguous(emit.view(emit.tensor((4, 6)), (4, 2), (6, 1)))
    assert is_contiguous(emit.view(emit.tensor((1, 6)), (1, 2), (6, 1)))
    assert is_contiguous(emit.view(emit.tensor((4, 6)), (4, 0), (6, 1)))


def test_what_is_written_on_autograds_thread_is_the_backward_pass() -> None:
    emit = Emitter()
    with emit.op("relu"):
        emit.op("clamp_min")
        with emit.backward_thread():
            emit.write("autograd::engine::evaluate_function: ReluBackward0")
    program = emit.program()
    assert program.ops.phase.tolist() == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    assert program.ops.parent.tolist() == [-1, 0, -1]
    assert [thread.role for thread in program.threads] == ["main", "backward"]


def test_a_wait_names_the_collective_it_waits_for() -> None:
    emit = Emitter(rank=1, world_size=2)
    emit.all_reduce((emit.tensor((8,)),))
    second = emit.all_to_all(emit.tensor((6,)), emit.tensor((4,)), (3, 3), (1, 3))
    emit.wait(second)
    program = emit.program()
    waits = program.calls.awaits[program.calls.kind == CallKind.STREAM_WAIT].tolist()
    assert waits == [1]
    exchange = program.collectives[1]
    assert (exchange.kind, exchange.ranks, exchange.sequence) == ("all_to_all", (0, 1), 1)
    assert (exchange.bytes_in, exchange.bytes_out, exchange.in_splits, exchange.out_splits) == (16, 24, (1, 3), (3, 3))


def node(tape: Tape, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    """A node that gives every input a gradient of its own."""
    made = tape.emit.tensor((2, 2))

    def backward(_: Gradients) -> Gradients:
        return tuple(tape.emit.tensor(each.shape) for each in inputs)

    tape.record(name, inputs, (made,), backward)
    return made


def engine_order(emit: Emitter) -> list[str]:
    return [name.partition(": ")[2] for name in names_of(emit.program()) if name.startswith("autograd::engine")]


def test_the_engine_runs_what_was_recorded_last_first_and_parameters_at_once() -> None:
    emit = Emitter()
    tape = Tape(emit)
    first, second = tape.parameter(emit.tensor((2, 2))), tape.parameter(emit.tensor((2, 2)))
    early = node(tape, "Early", (first,))
    late = node(tape, "Late", (second,))
    loss = emit.tensor(())
    tape.record("Loss", (early, late), (loss,), lambda _: (emit.tensor((2, 2)), emit.tensor((2, 2))))
    tape.backward(loss)
    accumulate = "torch::autograd::AccumulateGrad"
    assert engine_order(emit) == ["Loss", "Late", accumulate, "Early", accumulate]
    assert set(tape.gradients) == {first.id, second.id}


def test_a_node_waits_for_all_its_gradients_and_they_are_added() -> None:
    emit = Emitter()
    tape = Tape(emit)
    shared = node(tape, "Shared", (tape.parameter(emit.tensor((2, 2))),))
    loss = emit.tensor(())
    tape.record("Loss", (shared, shared), (loss,), lambda _: (emit.tensor((2, 2)), emit.tensor((2, 2))))
    tape.backward(loss)
    assert engine_order(emit)[:2] == ["Loss", "Shared"]
    assert names_of(emit.program()).count("aten::add_") == 1


def test_a_view_is_never_added_to_in_place() -> None:
    emit = Emitter()
    tape = Tape(emit)
    shared = node(tape, "Shared", (tape.parameter(emit.tensor((2, 2))),))
    loss = emit.tensor(())
    tape.record("Loss", (shared, shared), (loss,), lambda _: (emit.view(emit.tensor((2, 2))), emit.tensor((2, 2))))
    tape.backward(loss)
    assert "aten::add_" not in names_of(emit.program())
    assert names_of(emit.program()).count("aten::add") == 1


def test_the_gradient_of_a_bias_is_summed_over_samples() -> None:
    emit = Emitter()
    tape = Tape(emit)
    weight, bias = tape.parameter(emit.tensor((3, 5))), tape.parameter(emit.tensor((3,)))
    y = linear(tape, emit.tensor((7, 5)), weight, bias)
    tape.backward(mse_loss(tape, y, emit.tensor((7, 3))))
    assert tape.gradients[bias.id or 0].shape == (3,)
    assert tape.gradients[weight.id or 0].shape == (3, 5)
    assert names_of(emit.program()).count("aten::sum") == 1


def test_inputs_that_want_no_gradient_cost_no_product() -> None:
    def products(*, wanted: bool) -> int:
        emit = Emitter()
        tape = Tape(emit)
        x = emit.tensor((7, 5))
        if wanted:
            tape.parameter(x)
        y = linear(tape, x, tape.parameter(emit.tensor((3, 5))), tape.parameter(emit.tensor((3,))))
        tape.backward(mse_loss(tape, activation(tape, "relu", y), emit.tensor((7, 3))))
        return names_of(emit.program()).count("aten::mm")

    assert products(wanted=True) == products(wanted=False) + 1


def test_each_part_of_a_cat_gets_its_columns_of_the_gradient() -> None:
    emit = Emitter()
    tape = Tape(emit)
    parts = [tape.parameter(emit.tensor((4, width))) for width in (2, 3)]
    tape.backward(mse_loss(tape, cat(tape, parts), emit.tensor((4, 5))))
    kept = [tape.gradients[part.id or 0] for part in parts]
    assert [(gradient.shape, gradient.offset) for gradient in kept] == [((4, 2), 0), ((4, 3), 2)]


def test_buckets_close_with_the_tensor_that_goes_over() -> None:
    emit = Emitter()
    quarter = emit.tensor((FIRST_BUCKET_BYTES // 16,))
    large = emit.tensor((BUCKET_BYTES // 8,))
    found = buckets_of([quarter, quarter, large, large, quarter, large, quarter])
    assert [len(bucket) for bucket in found] == [3, 3, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_reduced_once_and_copied_back_where_there_are_several_ranks(ranks: int) -> None:
    emit = Emitter(world_size=ranks)
    tape = Tape(emit)
    parameters = [tape.parameter(emit.tensor((3, 5))), tape.parameter(emit.tensor((3,)))]
    reducer = Reducer(tape, parameters)
    with reducer.forward():
        y = linear(tape, emit.tensor((7, 5)), *parameters)
    tape.backward(mse_loss(tape, y, emit.tensor((7, 3))))
    program = emit.program()
    assert [one.bytes_in for one in program.collectives] == ([4 * 18] if ranks > 1 else [])
    copies = names_of(program).count("torch.distributed.ddp.reducer::copy_bucket_to_grad")
    assert copies == (2 if ranks > 1 else 0)
