"""Compiled regions: what PyTorch's compiler would launch on a GPU, without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steptime._api.compiling import as_compiled
from steptime._capture import script
from steptime._capture.capture import captured_step
from steptime._capture.compiled import modes
from steptime._capture.ranks import capture_ranks
from steptime._ops.generated import GeneratedKernel
from steptime._ops.table import op_table
from steptime._program.program import Program, tensors_in
from steptime._program.workload import Workload
from steptime.errors import InputError

WIDTH = 64


def mlp() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers).to("cuda")


class Two(nn.Module):
    """Two parts, between which Python may have something to do."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.first, self.second, self.broken = mlp(), mlp(), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        result: torch.Tensor = self.second(x)
        return result


def stepping(forward: Callable[[torch.Tensor], torch.Tensor], precision: torch.dtype | None = None) -> Callable[[], None]:
    x = torch.randn(32, WIDTH, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
            loss = forward(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def generated(program: Program) -> list[str]:
    return [name for name in op_table(program).names if name.startswith("triton_")]


def again(workload: Workload, mode: str) -> Program:
    rebuild = workload.rebuild
    assert isinstance(rebuild, script.CaptureAgain)
    return rebuild.compiled(mode).programs[0]


def captured(make: Callable[[], Any]) -> Program:
    program, said = captured_step(make)
    assert not any("eagerly" in each for each in said), said
    return program


def test_a_compiled_model_launches_what_its_compiler_fuses() -> None:
    eager = captured(lambda: stepping(mlp()))
    program = captured(lambda: stepping(torch.compile(mlp())))
    names = Counter(op_table(program).names)
    assert names["CompiledFunction"] == names["CompiledFunctionBackward"] == 1
    assert "aten::gelu" not in names
    assert "aten::native_layer_norm" not in names
    assert 0 < len(generated(program)) < len(eager.ops)
    assert names["aten::addmm"] == 2  # products stay with the library


def test_a_generated_kernel_says_what_it_reads_and_writes() -> None:
    program = captured(lambda: stepping(torch.compile(mlp())))
    names = [program.names[name] for name in program.ops.name]
    rows = [row for row, name in enumerate(names) if name.startswith("triton_")]
    for row in rows:
        reads, writes, text = program.signatures[program.ops.signature[row]].inputs
        assert GeneratedKernel.read(text).name == names[row]
        assert writes
        assert all(each.storage is not None for each in tensors_in((reads, writes)))


def test_autocast_is_fused_as_well() -> None:
    table = op_table(captured(lambda: stepping(torch.compile(mlp()), torch.bfloat16)))
    products = [table.arguments[row].inputs[0].dtype for row, name in enumerate(table.names) if name == "aten::mm"]
    assert set(products) == {"bfloat16"}
    assert any("_to_copy" in name for name in table.names if name.startswith("triton_"))


def test_a_graph_is_replayed_in_a_range_of_its_own() -> None:
    table = op_table(captured(lambda: stepping(torch.compile(mlp(), mode="reduce-overhead"))))
    graphs = [row for row, name in enumerate(table.names) if name.startswith("cudagraph:")]
    assert len(graphs) == 2  # forward and backward
    inside = {row for row, parent in enumerate(table.parents) if parent in graphs}
    assert all(table.parents[row] in graphs for row, name in enumerate(table.names) if name.startswith("triton_"))
    assert inside


def test_gradients_that_a_graph_made_are_not_copied_for_another_and_graphs_that_draw_are_seeded() -> None:
    def make(drop: float) -> Any:
        model = nn.Sequential(mlp(), nn.Dropout(drop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(32, WIDTH, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return torch.compile(step, mode="reduce-overhead")

    counts = []
    for drop in (0.0, 0.1):
        table = op_table(captured(partial(make, drop)))
        graphs = [row for row, name in enumerate(table.names) if name.startswith("cudagraph:")]
        assert len(graphs) == 3
        copied = [row for row, name in enumerate(table.names) if name == "aten::_foreach_copy_"]
        # The batch before the first graph, the loss's gradient before the second.
        assert [sum(row < graph for row in copied) for graph in graphs] == [1, 2, 2]
        counts.append(Counter(table.names)["aten::fill_"])
    assert counts[1] == counts[0] + 2


def test_what_python_does_between_graphs_splits_the_region() -> None:
    names = Counter(op_table(captured(lambda: stepping(torch.compile(Two(broken=True))))).names)
    assert names["CompiledFunction"] == 2


def test_functions_and_modules_in_place_are_compiled_too() -> None:
    def in_place() -> Callable[[], None]:
        model = Two(broken=False)
        model.compile()
        return stepping(model)

    def function() -> Callable[[], None]:
        model = mlp()
        return stepping(torch.compile(lambda x: model(x) * 2))

    for make in (in_place, function):
        assert generated(captured(make))


@pytest.mark.parametrize("asked", [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}])
def test_what_is_chosen_by_timing_is_said_and_taken_as_run_eagerly(asked: dict[str, Any]) -> None:
    program, said = captured_step(lambda: stepping(torch.compile(mlp(), **asked)))
    assert not generated(program)
    (line,) = said
    assert "timing" in line
    assert 'mode="default"' in line


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudagraphs"])
def test_backends_without_kernels_of_their_own_are_captured(backend: str) -> None:
    class Placed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(WIDTH, device=x.device)

    names = op_table(captured(lambda: stepping(torch.compile(nn.Sequential(mlp(), Placed()), backend=backend)))).names
    assert "aten::native_layer_norm" in names or "aten::layer_norm" in names
    assert any(name.startswith("cudagraph:") for name in names) == (backend == "cudagraphs")


class Plain(torch.optim.Optimizer):
    """As users write them: PyTorch puts no graph break around its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain])
def test_a_loop_is_followed_by_steps_that_are_compiled(kind: Any) -> None:
    def loop() -> None:
        model, x = mlp(), torch.randn(32, WIDTH, device="cuda")
        optimizer = kind(model.parameters())
        update: Any = torch.compile(optimizer.step)
        for _ in range(6):
            model(x).square().mean().backward()
            update()
            optimizer.zero_grad()

    program, said = captured_step(loop)
    assert generated(program)
    assert any("optimiser step 3" in each for each in said)


def test_a_step_that_compiles_nothing_can_be_asked_to() -> None:
    def make() -> Callable[[], None]:
        return stepping(Two(broken=False))

    workload = script.captured(make)
    assert not generated(workload.programs[0])
    assert generated(again(workload, "default"))


def test_without_triton_scripts_that_compile_and_the_option_are_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = script.captured(lambda: stepping(mlp()))
    monkeypatch.setattr(modes, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install triton") as of_script:
        script.captured(lambda: stepping(torch.compile(mlp())))
    with pytest.raises(InputError) as of_option:
        as_compiled(eager, "default", "1xh200")
    assert str(of_script.value).endswith(str(of_option.value))


def test_a_step_that_compiles_can_be_asked_not_to() -> None:
    def make() -> Callable[[], None]:
        return stepping(torch.compile(mlp()))

    workload = script.captured(make)
    assert generated(workload.programs[0])
    assert not generated(again(workload, "off"))


def test_checkpointed_layers_and_layers_that_drop_are_compiled() -> None:
    def make() -> Callable[[], None]:
        model = nn.Sequential(mlp(), nn.Dropout(0.1))
        return stepping(torch.compile(lambda x: checkpoint(model, x, use_reentrant=False)))

    assert generated(captured(make))


def test_the_step_of_an_optimiser_is_compiled_with_what_is_around_it() -> None:
    def make() -> Callable[[], None]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(32, WIDTH, device="cuda")

        @torch.compile
        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    program = captured(make)
    assert any(name.startswith("triton_for_") for name in generated(program))
    assert not any(name.startswith("aten::_foreach") for name in op_table(program).names)


def test_images_with_their_channels_last_are_convolved_as_they_are() -> None:
    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to("cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        compiled, x = torch.compile(model), torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
        return lambda: compiled(x).mean().backward()  # type: ignore[no-untyped-call]

    assert generated(captured(make))


def test_ranks_reduce_gradients_between_compiled_parts() -> None:
    def make() -> Callable[[], None]:
        model = Two(broken=False)
        model.first = nn.Sequential(nn.Linear(WIDTH, 8192), nn.Linear(8192, WIDTH)).to("cuda")  # 2 MiB each
        return stepping(torch.compile(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)))

    workload = capture_ranks(make, ranks=2, alike=True)
    assert not any("eagerly" in each for each in workload.warnings), workload.warnings
    (program,) = workload.programs
    assert len(program.collectives) > 1
    assert Counter(op_table(program).names)["CompiledFunction"] > 1
