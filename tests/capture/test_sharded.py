"""FSDP2 and tensor parallelism captured without processes: device work, collectives, waits, streams and groups."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.capture.recorded_ranks import RANKS, recorded  # noqa: E402
from tests.support.same_ops import same_device_ops  # noqa: E402
from tests.support.scripts import script  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: E402

from steptime._capture import sharded  # noqa: E402
from steptime._capture.ranks import OP_STREAM, capture_ranks  # noqa: E402
from steptime._capture.world import Partitions  # noqa: E402
from steptime._models.host.columns import HostColumns, Piece, host_columns  # noqa: E402
from steptime._ops.waits import WAIT, tensor_waits  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.load import load  # noqa: E402
from steptime._program.program import Program  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL = {
    "layers": 3, "width": 256, "heads": 8, "kv_heads": 4, "feed_forward": 704, "vocabulary": 1024, "length": 128, "batch": 2,
}  # fmt: skip


@cache
def workload(tensor_parallel: int, ranks: int = RANKS, layers: int = 3) -> Workload:
    llama = script(ROOT / "examples" / "llama70b_capture.py")
    model = llama.Llama(**{**SMALL, "layers": layers}, tensor_parallel=tensor_parallel)
    return capture_ranks(lambda: llama.training_step(model), ranks=ranks, name="llama")


def names(program: Program) -> list[str]:
    return [program.names[name] for name in program.ops.name.tolist()]


# How much of the device work is the same: PyTorch 2.13 puts a number on the device that 2.11 left on the CPU.
@pytest.mark.parametrize(("name", "tensor_parallel", "least"), [("fsdp", 1, 1.0), ("fsdp_tp", 2, 0.99)])
def test_device_ops_and_collectives_are_those_of_the_recorded_step(name: str, tensor_parallel: int, least: float) -> None:
    found, truth = workload(tensor_parallel).programs[0], recorded(name)
    same = same_device_ops(found, truth, caches=False)
    computed = [each for each in same.differences if "record_param_comms" not in each.name]
    assert 1 - len(computed) / same.total >= least, computed[:5]
    assert [(each.kind, each.group, each.bytes_in, each.bytes_out, each.ranks) for each in found.collectives] == [
        (each.kind, each.group, each.bytes_in, each.bytes_out, each.ranks) for each in truth.collectives
    ]


def test_parameters_are_those_of_the_whole_model_even_if_it_was_made_on_the_meta_device() -> None:
    width, layers = 64, 2

    def make() -> Any:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        for each in (*model, model):
            fully_shard(each)
        model.to_empty(device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.randn(4, width, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    program = capture_ranks(make, ranks=RANKS, alike=True).programs[0]
    assert program.meta["parameters"] == layers * width * width


def test_compute_waits_for_gathered_weights_where_they_are_copied_out_and_not_before() -> None:
    program = workload(1).programs[0]
    ops = names(program)
    for each in tensor_waits(program):
        if program.collectives[each.collective].kind == "all_gather":
            assert each.reason == WAIT
            assert ops[program.ops.parent[each.needed_by]].startswith("FSDP::all_gather_copy_out")


def test_what_fsdp_launches_on_streams_of_its_own_is_said_so() -> None:
    program = workload(1).programs[0]
    streams = program.meta[OP_STREAM]
    assert len(streams) == len(program.ops)
    by_name = {name: {int(stream) for stream in streams[[at for at, other in enumerate(names(program)) if other == name]]}
               for name in ("fsdp::all_gather_copy_in", "c10d::_allgather_base_", "aten::mm")}  # fmt: skip
    assert by_name["aten::mm"] == {0}
    assert 0 not in by_name["fsdp::all_gather_copy_in"] | by_name["c10d::_allgather_base_"]


def test_ranks_that_do_the_same_share_one_program_and_meet_in_their_own_groups() -> None:
    found = workload(2, ranks=8)
    assert found.owners == (0,) * 8
    assert found.groups == {
        "mesh_data": ((0, 2, 4, 6), (1, 3, 5, 7)), "mesh_tensor": ((0, 1), (2, 3), (4, 5), (6, 7)),
    }  # fmt: skip
    tensor = next(each for each in found.programs[0].collectives if each.group == "mesh_tensor")
    assert found.members(5, tensor) == (4, 5)
    assert any("rank 0 was taken for all 8 ranks" in warning for warning in found.warnings)


def test_a_captured_step_has_the_collectives_of_the_recorded_example() -> None:
    folder = ROOT / "examples" / "gpt_fsdp2_small"
    config = json.loads((folder / "measured.json").read_text())["config"]
    cases = script(ROOT / "benchmarks" / "h200" / "step_cases.py")
    found = capture_ranks(lambda: cases.gpt_fsdp(config, torch.device("cuda", 0)), ranks=2, alike=True).programs[0]
    truth = load([folder]).programs[0]
    works = zip(truth.works.collective.tolist(), truth.works.step.tolist(), strict=True)
    last = [truth.collectives[work] for work, step in works if work >= 0 and step == max(truth.steps)]
    # A trace with kernels has them stream by stream.
    for kind in ("all_gather", "reduce_scatter"):
        sizes = [[(each.bytes_in, each.bytes_out, each.dtype) for each in some if each.kind == kind]
                 for some in (found.collectives, last)]  # fmt: skip
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (5, 4), (3, 4), (1, 3), (0, 2)])
def test_parts_of_a_weight_are_those_that_fsdp_cuts(rows: int, ranks: int) -> None:
    weight = torch.arange(rows * 3).reshape(rows, 3)
    parts, truth = sharded._Parts(weight, ranks, dim=0), _fsdp_common._chunk_with_empty(weight, ranks, dim=0)
    assert [parts[rank].tolist() for rank in range(ranks)] == [each.tolist() for each in truth]


def test_groups_made_side_by_side_divide_the_ranks() -> None:
    partitions = Partitions(tuple(range(4)))
    for ranks, own in (((0, 1), "1"), ((2, 3), None), ((0, 2), "3"), ((1, 3), None)):
        partitions.made(ranks, "", own)
    assert partitions.sides() == {"group_0": ((0, 1), (2, 3)), "group_1": ((0, 2), (1, 3))}


def test_attention_of_a_divided_context_is_a_kernel_per_part() -> None:
    """`context_parallel` of two ranks: the second has parts of the keys that the first does not see."""
    from torch.distributed.tensor.experimental import context_parallel

    def make() -> Any:
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("context",))
        leaf = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            with context_parallel(mesh, buffers=[leaf], buffer_seq_dims=[2]):
                part = leaf.clone().requires_grad_()
                torch.nn.functional.scaled_dot_product_attention(part, part, part, is_causal=True).float().sum().backward()

        return step

    programs = capture_ranks(make, ranks=2).programs
    for program in programs:
        names = [program.names[name] for name in program.ops.name.tolist()]
        assert names.count("aten::_scaled_dot_product_cudnn_attention") > 2
        assert not any("softmax" in name for name in names)  # no mask is made, and no scores
        assert {each.kind for each in program.collectives} >= {"all_gather"}


def test_the_host_pays_for_python_around_sharded_ops_and_hooks() -> None:
    """FSDP2's hooks once a module each way, and DTensor's dispatch of every op of an optimiser that is not fused."""

    def make(*, shard: bool) -> Any:
        def function() -> Any:
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="cuda") for _ in range(3)))
            if shard:
                for part in (*model, model):
                    fully_shard(part, reshard_after_forward=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            x = torch.randn(8, 64, device="cuda")

            def step() -> None:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            return step

        return function

    host = Platform.load("2xh200-nvlink").host
    plain, sharded = (host_columns(capture_ranks(make(shard=shard), ranks=2).programs[0], host) for shard in (False, True))

    def spent_ns(columns: HostColumns, piece: Piece) -> float:
        return float(columns.cpu_ns[columns.piece == piece].sum())

    assert spent_ns(sharded, Piece.FUNCTION) > 6 * host.mechanism("between", "forward").cpu_ns
    dispatched = 6 * host.op("aten::add_")[0].cpu_ns * 7.0
    assert spent_ns(sharded, Piece.OPTIMIZER_STEP) >= spent_ns(plain, Piece.OPTIMIZER_STEP) + dispatched
