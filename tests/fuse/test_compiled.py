"""The fusion pass: what it may change of a program, and what not."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import steptime
from steptime._build.emit.emitter import Emitter
from steptime._fuse.compiled import MODES, compiled
from steptime._fuse.splits import Processors
from steptime._ops.catalogue import ADDS_TO_KEPT
from steptime._ops.generated import LOAD, GeneratedKernel
from steptime._ops.operations import PRODUCTS
from steptime._ops.table import op_table
from steptime._program.program import Phase, Program, Tensor, tensors_in
from steptime.errors import InputError

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
H200 = Processors(132, 2048)
BERT, DDP, FSDP, MOE = "bert.toml", "gpt2-ddp.toml", "llama-8b.toml", "mixtral-8x7b.toml"


@cache
def program_of(name: str) -> Program:
    return steptime.read(CONFIGS / name).programs[0]


def names_of(program: Program) -> list[str]:
    return op_table(program).names


def generated_in(program: Program) -> list[GeneratedKernel]:
    table = op_table(program)
    texts = (sig.inputs[2] for name, sig in zip(table.names, table.signatures, strict=True) if name.startswith("triton_"))
    return [GeneratedKernel.read(str(text)) for text in texts]


def chain(*steps: str, shape: tuple[int, ...] = (512, 1024)) -> Program:
    """Ops that each take what the one before made; a product takes what the last one did."""
    emit = Emitter(source="chain")
    x = emit.tensor(shape)
    for name in steps:
        y = emit.tensor(shape)
        emit.op(name, (x,), (y,), node=True)
        x = y
    emit.op("mm", (x, emit.tensor((shape[-1], 8))), (emit.tensor((shape[0], 8)),), node=True)
    return emit.program()


def test_a_chain_of_pointwise_ops_is_one_kernel_that_reads_and_writes_once() -> None:
    result = compiled(chain("relu", "exp", "neg", "sigmoid"), H200)
    (kernel,) = generated_in(result.program)
    assert [access.kind == LOAD for access in kernel.accesses] == [True, False]
    assert kernel.elements == 512 * 1024
    assert (result.eager_ops, result.kernels, result.calls) == (5, 1, 1)
    assert result.saved_bytes == 3 * 2 * 512 * 1024 * 4


def test_what_nothing_reads_is_not_computed() -> None:
    emit = Emitter(source="dead")
    x, unread = emit.tensor((64, 64)), emit.tensor((64, 64))
    emit.op("exp", (x,), (unread,), node=True)
    emit.op("mm", (x, x), (emit.tensor((64, 64)),), node=True)
    assert compiled(emit.program(), H200).kernels == 0


def test_a_norm_and_what_comes_before_it_are_one_kernel() -> None:
    emit = Emitter(source="norm")
    x, residual, weight, bias = (emit.tensor(shape) for shape in ((256, 768), (256, 768), (768,), (768,)))
    added, normed, mean, rstd = (emit.tensor(shape) for shape in ((256, 768), (256, 768), (256, 1), (256, 1)))
    emit.op("add", (x, residual, 1), (added,), node=True)
    emit.op("native_layer_norm", (added, (768,), weight, bias, 1e-5), (normed, mean, rstd), node=True)
    emit.op("mm", (normed, emit.tensor((768, 8))), (emit.tensor((256, 8)),), node=True)
    (kernel,) = generated_in(compiled(emit.program(), H200).program)
    assert kernel.kind == "persistent_reduction"
    assert (kernel.extent("x"), kernel.extent("r0")) == (256, 768)


@pytest.mark.parametrize("name", [BERT, DDP, FSDP, MOE])
def test_what_an_op_reads_was_there_before_or_was_written_before_it(name: str) -> None:
    eager = program_of(name)
    table = op_table(eager)
    made = {tensor.storage for arguments in table.arguments for tensor in arguments.outputs}
    before = {
        tensor.storage for arguments in table.arguments for tensor in arguments.inputs if tensor.storage not in made
    }  # what no op makes was there
    first: set[int | None] = set()
    for arguments in table.arguments:
        before |= {tensor.storage for tensor in arguments.inputs if tensor.storage not in first}
        first |= {tensor.storage for tensor in arguments.outputs}
    done = op_table(compiled(eager, H200).program)
    there: set[int | None] = set()
    for name_of_op, arguments, signature in zip(done.names, done.arguments, done.signatures, strict=True):
        generated = name_of_op.startswith("triton_")
        reads = tensors_in(signature.inputs[:1]) if generated else arguments.inputs
        if generated:
            missing = [tensor for tensor in reads if tensor.storage not in there and tensor.storage not in before]
            assert not missing, (name_of_op, missing)
        there |= {tensor.storage for tensor in arguments.outputs}


@pytest.mark.parametrize("name", [BERT, DDP, FSDP])
def test_products_collectives_and_the_optimizer_stay(name: str) -> None:
    eager = program_of(name)
    done = compiled(eager, H200).program

    def products(program: Program) -> Counter[object]:
        table, result = op_table(program), Counter[object]()
        counts = program.op_counts.tolist()
        for row, (op, signature) in enumerate(zip(table.names, table.signatures, strict=True)):
            if op in PRODUCTS and row not in table.same_inside:
                result[op, _shapes(signature.inputs)] += counts[row]
        return result

    def optimizer(program: Program) -> list[str]:
        table = op_table(program)
        return [op for op, phase in zip(table.names, table.phases, strict=True) if phase == Phase.OPTIMIZER]

    assert products(done) == products(eager)
    assert optimizer(done) == optimizer(eager)
    assert done.collectives == eager.collectives
    rows = [row for row, _ in op_table(done).launching_collectives()]
    assert {names_of(done)[row] for row in rows} <= {"record_param_comms"}
    assert len(rows) == len(op_table(eager).launching_collectives())


def _shapes(inputs: tuple[object, ...]) -> tuple[object, ...]:
    return tuple((each.shape, each.dtype) for each in inputs if isinstance(each, Tensor))


@pytest.mark.parametrize("name", [BERT, DDP, FSDP, MOE])
def test_fewer_kernels_and_fewer_bytes(name: str) -> None:
    result = compiled(program_of(name), H200)
    assert 0 < result.kernels + result.calls < result.eager_ops
    assert result.saved_bytes > 0
    assert all(kernel.elements > 0 and kernel.accesses for kernel in generated_in(result.program))


def test_a_graph_is_one_frame_in_forward_and_one_in_backward() -> None:
    names = names_of(compiled(program_of(BERT), H200).program)
    assert names.count("CompiledFunction") == names.count("CompiledFunctionBackward") == 1
    graphed = names_of(compiled(program_of(BERT), H200, "reduce-overhead").program)
    assert sum(name.startswith("cudagraph:") for name in graphed) == 2


def test_a_cuda_graph_reads_copies_of_what_comes_in_anew_and_of_nothing_else() -> None:
    eager = program_of(BERT)
    table = op_table(compiled(eager, H200, "reduce-overhead").program)
    copies = [row for row, name in enumerate(table.names) if name == "aten::copy_"]
    copied = [table.arguments[row].inputs[1] for row in copies]
    assert {tensor.dtype for tensor in copied} == {"int64"}
    assert (16, 512) in {tensor.shape for tensor in copied}
    assert all(table.names[table.parents[row]].startswith("## Call CompiledFxGraph") for row in copies)


def test_layers_that_repeat_are_compiled_one_by_one_and_counted_as_often_as_they_run() -> None:
    eager = program_of(FSDP)
    assert eager.repetition is not None
    result = compiled(eager, H200)
    assert result.program.repetition is not None
    assert result.program.repetition.order == eager.repetition.order
    assert result.kernels > sum(name.startswith("triton_") for name in names_of(result.program))


# The answer


def test_both_numbers_and_how_sure_their_ratio_is() -> None:
    answer = steptime.predict(CONFIGS / "gpt2.toml", "1xh200", compile="default")
    eager = steptime.predict(CONFIGS / "gpt2.toml", "1xh200")
    found = answer.to_dict()["compile"]
    assert found["eager"]["step_time_ms"] == pytest.approx(eager.step_time_ms)
    assert found["speedup"] == pytest.approx(eager.step_time_ms / answer.step_time_ms, rel=1e-4)
    low, high = found["speedup_interval"]
    assert low <= found["speedup"] <= high
    assert found["by"] == "fusion pass"
    assert any("not by PyTorch" in text for text in answer.basis)


def test_compiling_a_step_of_many_launches_makes_it_shorter() -> None:
    for mode in MODES:
        answer = steptime.predict(CONFIGS / "gpt2.toml", "1xh200", compile=mode)
        assert answer.to_dict()["compile"]["speedup"] > 1.2


def test_off_is_the_eager_step() -> None:
    eager = steptime.predict(CONFIGS / "gpt2.toml", "1xh200")
    assert steptime.predict(CONFIGS / "gpt2.toml", "1xh200", compile="off").step_time_ms == eager.step_time_ms


@pytest.mark.parametrize(
    ("mode", "source", "why"),
    [
        ("max-autotune", "gpt2.toml", "timing them on the GPU"),
        ("fast", "gpt2.toml", "expected default, reduce-overhead or off"),
        ("default", "../gpt_fsdp2_small", "a recording has the kernels that ran"),
        ("default", "../gpt_compiled", "compiled already"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(mode: str, source: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        steptime.predict(CONFIGS / source, "2xh200-nvlink" if "fsdp2" in source else "1xh200", compile=mode)


def test_what_the_reducer_of_ddp_copies_is_not_compiled() -> None:
    program = program_of("dlrm_heavy4.toml")
    before, after = (names_of(each).count("aten::copy_") for each in (program, compiled(program, H200).program))
    reducer = names_of(program).count("torch.distributed.ddp.reducer::copy_bucket_to_grad")
    assert reducer
    assert names_of(compiled(program, H200).program).count("torch.distributed.ddp.reducer::copy_bucket_to_grad") == reducer
    assert reducer <= after < before


def test_products_that_add_to_kept_gradients_say_so_still() -> None:
    program = program_of("mixtral-8x7b.toml")
    kept = [names_of(each).count(ADDS_TO_KEPT) for each in (program, compiled(program, H200).program)]
    assert kept[0] == kept[1] > 0


def test_no_kernel_is_said_to_save_less_than_nothing() -> None:
    result = compiled(program_of("dlrm_heavy4.toml"), H200)
    assert result.saved_bytes >= 0
    assert all(each.saved_bytes > 0 for each in result.largest)
