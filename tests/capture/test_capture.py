"""What a captured step holds, and what cannot be captured."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from steptime._capture.capture import OUTSIDE, PARAMETERS, capture  # noqa: E402
from steptime._capture.cuda_choices import CUDNN, EFFICIENT, FLASH, MATH, attention_backend  # noqa: E402
from steptime._hardware.device import reference_device  # noqa: E402
from steptime._models.kernels.from_ops import questions_of  # noqa: E402
from steptime._models.memory.lifetimes import MemoryKind, storages  # noqa: E402
from steptime._models.memory.peak import PeakMemory, peak_memory  # noqa: E402
from steptime._ops.families import WorkFamily, op_families  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime._program.program import Phase, Program, Tensor, Value  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402
from steptime._sim.prediction import Operations, operations_of  # noqa: E402
from steptime.errors import InputError  # noqa: E402

Step = Callable[[], object]


def stepping(model: nn.Module, optimizer: Any, *inputs: Any) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        for each in inputs:
            model(each).sum().backward()
        optimizer.step()

    return step


def names(program: Program, phase: Phase | None = None) -> Counter[str]:
    rows = zip(program.ops.name.tolist(), program.ops.phase.tolist(), strict=True)
    return Counter(program.names[name] for name, found in rows if phase is None or found == phase)


def peak_of(program: Program) -> PeakMemory:
    return peak_memory(program, outside_bytes=program.meta.get(OUTSIDE, ()))


def tensors(program: Program) -> Iterator[Tensor]:
    def inside(value: Value) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            for each in value:
                yield from inside(each)

    for signature in program.signatures:
        yield from inside((*signature.inputs, *signature.outputs))


def perceptron(width: int = 64, batch: int = 8, batches: int = 1, **options: Any) -> Program:
    def make() -> Step:
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)).to("cuda")
        inputs = [torch.randn(batch, width).cuda() for _ in range(batches)]
        return stepping(model, torch.optim.AdamW(model.parameters(), **options), *inputs)

    return capture(make)


def test_a_step_has_its_three_phases_and_backward_its_own_thread() -> None:
    program = perceptron()
    assert {thread.role for thread in program.threads} == {"main", "backward"}
    assert names(program, Phase.FORWARD)["aten::addmm"] == 2
    assert names(program, Phase.BACKWARD)["torch::autograd::AccumulateGrad"] == 4
    assert names(program, Phase.OPTIMIZER)["aten::_foreach_addcdiv_"] == 1


def test_all_tensors_of_the_device_are_on_cuda_and_none_is_meta() -> None:
    assert {tensor.device for tensor in tensors(perceptron())} == {"cuda:0", "cpu"}


def test_a_model_larger_than_any_memory_is_captured() -> None:
    width = 1 << 18  # 256 GiB a layer
    memory = peak_of(perceptron(width))
    assert memory.parts[MemoryKind.PARAMETERS] == 4 * (width * width + width + 8 * width + 8)


def test_the_recorded_step_finds_the_optimisers_state() -> None:
    memory = peak_of(perceptron())
    assert memory.parts[MemoryKind.OPTIMIZER_STATE] == 2 * memory.parts[MemoryKind.PARAMETERS]


def test_what_no_op_of_the_step_names_is_counted_all_the_same() -> None:
    def make() -> Step:
        model = nn.Linear(16, 4).cuda()
        batches = [torch.randn(32, 16, device="cuda") for _ in range(3)]
        order = iter([0, 0, 0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            stepping(model, optimizer, batches[next(order)])()

        return step

    assert sorted(capture(make).meta[OUTSIDE]) == [32 * 16 * 4] * 2


def test_gradients_of_later_micro_batches_are_added_to_the_first() -> None:
    one, three = (names(perceptron(batches=count), Phase.BACKWARD) for count in (1, 3))
    assert three["aten::mm"] == 3 * one["aten::mm"]
    assert three["aten::add_"] - one["aten::add_"] == 2 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_its_forward_again_in_backward(reentrant: bool) -> None:
    def make() -> Step:
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        run = lambda given: checkpoint(model, given, use_reentrant=reentrant)  # noqa: E731
        return stepping(run, torch.optim.SGD(model.parameters(), lr=0.1), x)  # type: ignore[arg-type]

    program = capture(make)
    assert names(program, Phase.FORWARD)["aten::native_dropout"] == 1
    assert names(program, Phase.BACKWARD)["aten::native_dropout"] == 1


def products_kept() -> Any:
    def policy(_: Any, func: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if func is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "all of it": {"use_reentrant": False, "early_stop": False},
    "selective": {"use_reentrant": False, "context_fn": products_kept},
}


def test_what_a_checkpoint_computes_again_is_not_asked_for_by_the_model() -> None:
    layers, product = 3, 2 * 8 * 64 * 64

    def operations(**options: Any) -> Operations:
        early_stop = options.pop("early_stop", True)

        def make() -> Step:
            blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(layers)).cuda()
            x = torch.randn(8, 64, device="cuda", requires_grad=True)

            def run(x: Any) -> Any:
                with set_checkpoint_early_stop(early_stop):
                    for block in blocks:
                        x = checkpoint(block, x, **options) if options else block(x)
                return x

            return stepping(run, torch.optim.SGD(blocks.parameters(), lr=0.1), x)  # type: ignore[arg-type]

        return operations_of(Workload((capture(make),), 1))

    plain = operations()
    assert plain.model == plain.hardware == 3 * layers * 2 * product
    again = {name: operations(**options) for name, options in CHECKPOINTS.items()}
    assert {each.model for each in again.values()} == {plain.model}
    # What is made last is needed by no gradient: a checkpoint stops before it where it may.
    products = {"reentrant": 2, "not reentrant": 1, "all of it": 2, "selective": 0}
    assert {name: (each.hardware - plain.hardware) / (layers * product) for name, each in again.items()} == products


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_the_closure_of_an_optimiser_is_no_part_of_its_step(kind: Any) -> None:
    def program(*, closed: bool) -> Program:
        def make() -> Step:
            model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
            optimizer = kind(model.parameters(), **({"max_iter": 1} if kind is torch.optim.LBFGS else {}))

            def closure() -> Any:
                optimizer.zero_grad()
                loss = model(torch.randn(64, 256, device="cuda")).sum()
                loss.backward()
                return loss

            def step() -> None:
                if closed:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step(lambda: torch.ones([], device="cuda"))

            return step

        return capture(make)

    closed, apart = program(closed=True), program(closed=False)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for name in ("aten::addmm", "aten::mm", "aten::gelu", "aten::gelu_backward"):
            assert names(closed, phase)[name] == names(apart, phase)[name]
    made = [
        sum(each.nbytes for each in storages(program, reference_device()) if each.kind is MemoryKind.ACTIVATIONS)
        for program in (closed, apart)
    ]
    assert made[0] == made[1] > 0
    for each in (closed, apart):
        assert operations_of(Workload((each,), 1)).model == 5 * 2 * 64 * 256 * 256  # the input needs no gradient
        of_products = {op_families(each)[row] for row, name in enumerate(op_table(each).names) if name == "aten::addmm"}
        assert of_products == {WorkFamily.MATMUL}


def test_frozen_weights_are_parameters_and_copies_of_layers_are_counted() -> None:
    width, copies = 64, 3

    def make() -> Step:
        frozen, layer = (nn.Linear(width, width, bias=False) for _ in range(2))
        model = nn.Sequential(frozen.requires_grad_(False), *(copy.deepcopy(layer) for _ in range(copies))).cuda()
        trained = [each for each in model.parameters() if each.requires_grad]
        return stepping(model, torch.optim.SGD(trained, lr=0.1), torch.randn(4, width, device="cuda"))

    program = capture(make)
    weights = (1 + copies) * width * width
    assert peak_of(program).parts[MemoryKind.PARAMETERS] == 4 * weights
    assert program.meta[PARAMETERS] == weights


def test_what_comes_after_a_checkpoint_that_stopped_inside_an_op_is_not_taken_for_being_inside() -> None:
    def make() -> Step:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
        gated = lambda given: given + model[0](given) * model[1](given)  # noqa: E731
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        run = lambda given: checkpoint(gated, checkpoint(gated, given, use_reentrant=False), use_reentrant=False)  # noqa: E731
        return stepping(run, torch.optim.SGD(model.parameters(), lr=0.1), x)  # type: ignore[arg-type]

    table = op_table(capture(make))
    nodes = [row for row, name in enumerate(table.names) if name.startswith("autograd::engine::evaluate_function")]
    assert {table.parents[row] for row in nodes} == {-1}
    products = [row for row, name in enumerate(table.names) if name == "aten::mul" and table.phases[row] == Phase.BACKWARD]
    assert {table.names[table.parents[row]] for row in products} == {"MulBackward0"}


def test_autocast_casts_weights_once_and_computes_losses_in_single_precision() -> None:
    def make() -> Step:
        layer, x = nn.Linear(16, 16).cuda(), torch.randn(4, 16, device="cuda")

        def run(given: Any) -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return torch.softmax(layer(layer(given)), -1)

        return stepping(run, torch.optim.SGD(layer.parameters(), lr=0.1), x)  # type: ignore[arg-type]

    program = capture(make)
    dtypes = {
        program.names[name]: program.signatures[row] for name, row in zip(program.ops.name, program.ops.signature, strict=True)
    }
    product, softmax = dtypes["aten::addmm"].inputs[1], dtypes["aten::_softmax"].outputs[0]
    assert isinstance(product, Tensor) and product.dtype == "bfloat16"
    assert isinstance(softmax, Tensor) and softmax.dtype == "float32"
    # The input, weight and bias of the first call, nothing of the second, and back for the softmax.
    assert names(program, Phase.FORWARD)["aten::_to_copy"] == 4


def test_a_view_shares_the_storage_of_what_it_shows() -> None:
    program = perceptron()
    rows = [program.signatures[row] for name, row in zip(program.ops.name, program.ops.signature, strict=True)
            if program.names[name] == "aten::t"]  # fmt: skip
    for signature in rows:
        (given,), (made,) = signature.inputs, signature.outputs
        assert isinstance(given, Tensor) and isinstance(made, Tensor)
        assert given.storage == made.storage and given.id != made.id


def test_convolutions_and_norms_are_those_of_cudnn() -> None:
    def make() -> Step:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.BatchNorm1d(288)).cuda()
        return stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 8, 8, device="cuda"))

    found = names(capture(make))
    assert found["aten::cudnn_batch_norm"] == found["aten::cudnn_batch_norm_backward"] == 1
    assert found["aten::native_batch_norm"] == found["aten::native_batch_norm_backward"] == 1  # of rows
    assert found["aten::convolution"] == found["aten::convolution_backward"] == 1


def test_gradients_that_cuda_has_one_kernel_for_are_made_of_no_others() -> None:
    def make() -> Step:
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        layers = nn.Sequential(nn.SiLU(), nn.Mish())
        return lambda: layers(x).sum().backward()

    found = names(capture(make), Phase.BACKWARD)
    assert found["aten::silu_backward"] == found["aten::mish_backward"] == 1
    assert not {"aten::sigmoid", "aten::mul", "aten::tanh"} & set(found)


def test_numbers_are_put_in_place_without_a_copy_and_where_a_mask_is_true_without_a_look_at_it() -> None:
    def make() -> Step:
        x = torch.zeros(4, 8, device="cuda")

        def step() -> None:
            x[1:, 2:4] = 3
            x[x > 1] = 0.5
            torch.relu(x[x > 2])

        return step

    found = names(capture(make))
    assert (found["aten::fill_"], found["aten::copy_"], found["aten::index_put_"], found["aten::nonzero"]) == (1, 0, 1, 1)


def test_attention_takes_the_kernel_that_cuda_takes() -> None:
    def chosen(dtype: Any, width: int = 64, mask: Any = None, causal: bool = False) -> str:
        query = torch.empty(2, 4, 16, width, dtype=dtype, device="meta")
        return attention_backend(query, query, query, mask, causal)

    assert chosen(torch.bfloat16) == chosen(torch.float16, causal=True) == CUDNN
    assert chosen(torch.float32) == EFFICIENT
    assert chosen(torch.bfloat16, width=160) == CUDNN
    assert chosen(torch.bfloat16, width=100) == FLASH
    mask = torch.empty(2, 1, 16, 16, dtype=torch.bool, device="meta")
    assert chosen(torch.bfloat16, width=52, mask=mask) == chosen(torch.float32, width=50) == MATH  # rows are not aligned
    assert chosen(torch.float32, width=52, mask=mask) == EFFICIENT
    assert chosen(torch.float64) == MATH


def test_gradients_are_clipped_as_lists_and_a_scaler_finds_nothing_infinite() -> None:
    def make() -> Step:
        model, x = nn.Linear(16, 4).cuda(), torch.randn(4, 16).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    found = names(capture(make))
    assert found["aten::_foreach_norm"] == 1
    assert found["aten::_amp_update_scale_"] == 1
    assert found["aten::_foreach_add_"] == 1  # the optimiser's step took place


def test_a_function_that_returns_nothing_is_the_step_itself() -> None:
    made: list[nn.Module] = []

    def step() -> None:
        made.extend([] if made else [nn.Linear(4, 4).cuda()])
        made[0](torch.randn(2, 4, device="cuda")).sum().backward()

    assert names(capture(step))["aten::addmm"] == 1


def repeats(x: Any) -> Any:
    return x.repeat_interleave(x[:, 0].int(), dim=0)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (repeats, "aten::repeat_interleave at .*test_capture.py:[0-9]+: the shape of its result depends on data"),
        (lambda x: x + torch.ones(4, 16), "aten::add at .*: takes a tensor of the CPU"),
        (lambda x: x @ torch.ones(4, 4, device="cuda"), "RuntimeError at .*test_capture.py:[0-9]+"),
    ],
)
def test_what_cannot_be_captured_is_said_with_its_line(layer: Any, said: str) -> None:
    def make() -> Step:
        weight = torch.ones(16, device="cuda", requires_grad=True)
        x = torch.randn(4, 16, device="cuda")
        return lambda: layer(x * weight).sum().backward()

    with pytest.raises(InputError, match=said) as raised:
        capture(make)
    assert "\n" not in str(raised.value)


def test_nothing_is_pretended_afterwards() -> None:
    perceptron()
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended GPU"
    assert torch.randn(2, 2).device.type == "cpu"
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_gradients_of_selected_values_are_written_into_zeros() -> None:
    """Where a mode is active PyTorch copies the zeros first, which it does not on a device."""

    def make() -> Step:
        x = torch.randn(64, 32, device="cuda", requires_grad=True)
        places = torch.zeros(64, 4, dtype=torch.int64, device="cuda")

        def step() -> None:
            selected = x.max(1).values.sum() + x.topk(3).values.sum()
            (selected + torch.zeros(64, 4, device="cuda").scatter(1, places, x[:, :4]).sum()).backward()

        return step

    names = op_table(capture(make)).names
    assert names.count("aten::scatter_") == 2
    assert names.count("aten::scatter") == 1  # the script's own


def test_the_gradient_of_a_running_product_asks_for_zeros_and_finds_none() -> None:
    def make() -> Step:
        x = torch.rand(64, 32, device="cuda", requires_grad=True)
        return lambda: torch.cumprod(x, -1).sum().backward()

    program = capture(make)
    names = op_table(program).names
    assert [names.count(f"aten::{name}") for name in ("item", "cumsum", "masked_fill")] == [1, 1, 0]
    assert sum(work.name == "aten::cumprod" for work in questions_of(program)) == 1
    assert names.count("aten::flip") == 2
