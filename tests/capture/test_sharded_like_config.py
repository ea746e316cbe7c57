"""A captured step of DTensor and FSDP2 beside the program of a config: what ranks send each other, and what a layer keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.capture.recorded_ranks import RANKS  # noqa: E402
from tests.capture.test_sharded import ROOT, SMALL, workload  # noqa: E402
from tests.support.scripts import script  # noqa: E402

from steptime._build.transformer.build import build  # noqa: E402
from steptime._build.transformer.config import Transformer  # noqa: E402
from steptime._build.transformer.parallelism import Parallelism  # noqa: E402
from steptime._capture.ranks import capture_ranks  # noqa: E402
from steptime._hardware.device import reference_device  # noqa: E402
from steptime._models.memory.lifetimes import storages  # noqa: E402
from steptime._program.program import Phase, Program, Tensor  # noqa: E402

TENSOR = 2
CONFIG = Transformer(
    layers=SMALL["layers"], width=SMALL["width"], heads=SMALL["heads"], kv_heads=SMALL["kv_heads"],
    feed_forward=SMALL["feed_forward"], vocabulary=SMALL["vocabulary"], sequence=SMALL["length"],
    batch=SMALL["batch"] * RANKS // TENSOR, norm="rms_norm", activation="swiglu", positions="rotary", tied_head=False,
    precision="bf16", optimizer="adamw_fused", parallel=Parallelism(fsdp=RANKS // TENSOR, tensor=TENSOR, sequence=True),
)  # fmt: skip
TOKENS_BYTES = SMALL["batch"] * SMALL["length"] * SMALL["width"] * 2


def sent(program: Program) -> Counter[tuple[str, int, int]]:
    found = ((each.kind, len(each.ranks), max(each.bytes_in, each.bytes_out)) for each in program.collectives)
    return Counter(found)


def test_a_config_sends_what_distributed_tensors_and_fsdp_send() -> None:
    captured, built = sent(workload(TENSOR).programs[0]), sent(build(CONFIG).programs[0])
    # Megatron-LM gathers what goes into split layers once more in backward, and does not gather the head's scores.
    built["all_gather", TENSOR, TOKENS_BYTES] -= 2 * CONFIG.layers + 1
    captured["all_gather", TENSOR, SMALL["batch"] * SMALL["length"] * SMALL["vocabulary"] * 2] -= 1
    loss = {key for key in built if key[0] == "all_reduce" and key[2] == 4 * SMALL["batch"] * SMALL["length"]}
    assert {key: count for key, count in built.items() if count and key not in loss} == {
        key: count for key, count in captured.items() if count
    }


def autocast_step() -> Callable[[], None]:
    """The same model in fp32 under autocast, sharded without a policy of precisions."""
    llama = script(ROOT / "examples" / "llama70b_capture.py")
    model = llama.Llama(**SMALL, tensor_parallel=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (RANKS,))
    with torch.device("meta"):
        network = llama.Transformer(model)
    for each in (*network.blocks, network):
        torch.distributed.fsdp.fully_shard(each, mesh=mesh)
    network.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tokens = torch.randint(model.vocabulary, (model.batch, model.length), device="cuda")
    angles = torch.randn(model.length, model.head_width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = network(tokens, angles.cos(), angles.sin())
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()

    return step


def test_under_autocast_fsdp_sends_fp32_and_products_are_cast() -> None:
    captured = capture_ranks(autocast_step, ranks=RANKS, name="autocast").programs[0]
    built = build(replace(CONFIG, precision="bf16-autocast", batch=8, parallel=Parallelism(fsdp=RANKS))).programs[0]
    assert sent(built) == sent(captured)
    assert products(built) == products(captured)


def products(program: Program) -> Counter[tuple[str, ...]]:
    """Dtypes of what is multiplied."""
    found: Counter[tuple[str, ...]] = Counter()
    for row, number in enumerate(program.ops.name.tolist()):
        if program.names[number] == "aten::mm":
            inputs = program.signatures[program.ops.signature[row]].inputs
            found[tuple(each.dtype for each in inputs if isinstance(each, Tensor))] += 1
    return found


def hybrid_step() -> Callable[[], None]:
    """Shards that have copies, two micro-batches of which the first is not reduced, layers that stay after forward."""
    llama = script(ROOT / "examples" / "llama70b_capture.py")
    model, fsdp = llama.Llama(**SMALL, tensor_parallel=1), torch.distributed.fsdp
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("data", "shards"))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        network = llama.Transformer(model)
    for each in network.blocks:
        fsdp.fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fsdp.fully_shard(network, mesh=mesh, mp_policy=policy)
    network.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tokens = torch.randint(model.vocabulary, (model.batch, model.length), device="cuda")
    angles = torch.randn(model.length, model.head_width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        for last in (False, True):
            network.set_requires_gradient_sync(last)
            scores = network(tokens, angles.cos(), angles.sin())
            torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    return step


def test_shards_with_copies_are_reduced_once_and_in_order() -> None:
    captured = capture_ranks(hybrid_step, ranks=RANKS, name="hybrid").programs[0]
    parallel = Parallelism(fsdp=RANKS // 2, data=2, reshard_after_forward=False, no_sync=True)
    built = build(replace(CONFIG, batch=16, gradient_accumulation=2, parallel=parallel)).programs[0]
    both = [
        [(each.kind, each.ranks, each.bytes_in, each.bytes_out, each.dtype) for each in program.collectives]
        for program in (built, captured)
    ]
    assert both[0] == both[1]
    assert sharding_ops(built) == sharding_ops(captured)


def sharding_ops(program: Program) -> Counter[tuple[str, str]]:
    """What FSDP copies, casts and adds, by the frame it is in."""
    names = [program.names[number] for number in program.ops.name]
    found: Counter[tuple[str, str]] = Counter()
    for name, parent in zip(names, program.ops.parent.tolist(), strict=True):
        frame = names[parent].partition(" ")[0] if parent >= 0 else ""
        if frame.startswith("FSDP::") and name in ("aten::add_", "aten::to", "fsdp::chunk_cat", "fsdp::split_with_sizes_copy"):
            found[frame, name] += 1
    return found


def kept_per_layer(programs: tuple[Program, Program]) -> int:
    """Bytes that forward makes in a layer and backward takes, of programs of which the second has a layer more."""
    kept = []
    for program in programs:
        phases = program.ops.phase.tolist()
        found = [each for each in storages(program, reference_device()) if not each.stays and each.dies < len(phases)]
        spans = [each for each in found if (phases[each.born], phases[each.dies]) == (Phase.FORWARD, Phase.BACKWARD)]
        kept.append(sum(each.nbytes for each in spans))
    return kept[1] - kept[0]


def test_a_layer_of_distributed_tensors_keeps_this_ranks_parts() -> None:
    kept = kept_per_layer((workload(TENSOR).programs[0], workload(TENSOR, layers=4).programs[0]))
    whole, part = TOKENS_BYTES, TOKENS_BYTES / TENSOR
    inner, keys = part * SMALL["feed_forward"] / SMALL["width"], part * SMALL["kv_heads"] / SMALL["heads"]
    # Gathered inputs of both halves; inputs of norms, queries and attention's result; keys and values; the gate before and
    # after its function, what it multiplies and the product.
    expected = 2 * whole + 4 * part + 2 * keys + 4 * inner
    assert kept == pytest.approx(expected, rel=0.03)
