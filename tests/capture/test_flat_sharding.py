"""`FullyShardedDataParallel` as captured: its collectives by strategy, gathers that go ahead, and the memory of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402

from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._models.memory.lifetimes import MemoryKind  # noqa: E402
from steptime._models.memory.peak import peak_memory  # noqa: E402
from steptime._ops.catalogue import FLAT_GATHER  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime._program.program import Program  # noqa: E402

WIDTH, LAYERS, RANKS = 256, 3, 4


def wrapped(**options: Any) -> Program:
    def make() -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        given = {name: value() if callable(value) else value for name, value in options.items()}
        policy, device = ModuleWrapPolicy({nn.Linear}), torch.cuda.current_device()
        sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **given)
        optimizer, x = torch.optim.AdamW(sharded.parameters()), torch.randn(8, WIDTH, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            sharded(x).float().sum().backward()
            optimizer.step()

        return step

    return capture_ranks(make, ranks=RANKS, alike=True).programs[0]


def mesh() -> Any:
    return init_device_mesh("cuda", (2, 2))


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"all_gather": LAYERS, "reduce_scatter": LAYERS}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
         {"all_gather": LAYERS, "reduce_scatter": LAYERS}),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, {"all_reduce": LAYERS}),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
         {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS, "all_reduce": LAYERS}),
    ],
)  # fmt: skip
def test_each_strategy_has_its_collectives(options: dict[str, Any], expected: dict[str, int]) -> None:
    assert Counter(each.kind for each in wrapped(**options).collectives) == expected


def test_mixed_precision_gathers_in_the_lower_and_reduces_in_the_other() -> None:
    program = wrapped(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32), use_orig_params=True)
    assert {(each.kind, each.dtype) for each in program.collectives} == {
        ("all_gather", "bfloat16"), ("reduce_scatter", "float32"),
    }  # fmt: skip


def test_a_rank_holds_its_part_and_gathered_parameters_go() -> None:
    program = wrapped(use_orig_params=True)
    assert op_table(program).names.count(FLAT_GATHER) == 2 * LAYERS
    parameters = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    parts = peak_memory(program).parts
    assert parts[MemoryKind.PARAMETERS] == pytest.approx(parameters / RANKS, rel=0.02)
    assert parts[MemoryKind.OPTIMIZER_STATE] == pytest.approx(2 * parameters / RANKS, rel=0.02)
    assert parts.get(MemoryKind.INPUTS, 0) < parameters  # what is gathered is not among what stays
