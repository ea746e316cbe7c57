"""Sequence parallelism: what tensor-parallel ranks exchange, and what stays as it is without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from steptime._api.predict import predict
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._hardware.device import reference_device
from steptime._models.memory.lifetimes import storages
from steptime._program.program import Phase, Program, Tensor
from steptime.errors import InputError

LLAMA = Transformer(
    layers=2, width=512, heads=8, kv_heads=4, sequence=256, vocabulary=8192, batch=2, norm="rms_norm", activation="swiglu",
    positions="rotary", tied_head=False, precision="bf16", parallel=Parallelism(tensor=4, sequence=True),
)  # fmt: skip
GPT = replace(LLAMA, norm="layer_norm", activation="gelu", positions="learned", kv_heads=0)
TOKENS_BYTES = 2 * 256 * 512 * 2  # a micro-batch's activations


def program(config: Transformer) -> Program:
    (result,) = build(config).programs
    return result


def whole(config: Transformer) -> Transformer:
    return replace(config, parallel=replace(config.parallel, sequence=False))


def sizes(program: Program, least: int = TOKENS_BYTES) -> Counter[tuple[str, int]]:
    found = ((each.kind, max(each.bytes_in, each.bytes_out)) for each in program.collectives)
    return Counter((kind, nbytes) for kind, nbytes in found if nbytes >= least)


def multiplications(program: Program) -> int:
    """Of all matrix products."""
    total = 0
    for row, name in enumerate(program.names[number] for number in program.ops.name):
        if name in ("aten::mm", "aten::addmm"):
            left, right = [each for each in program.signatures[program.ops.signature[row]].inputs if isinstance(each, Tensor)][
                -2:
            ]
            total += left.numel * right.shape[1]
    return total


@pytest.mark.parametrize("config", [LLAMA, GPT, replace(GPT, attention="unfused"), replace(LLAMA, precision="fp32")])
def test_products_are_the_same_as_without(config: Transformer) -> None:
    assert multiplications(program(config)) == multiplications(program(whole(config)))


def test_an_all_reduce_becomes_a_reduce_scatter_and_an_all_gather() -> None:
    layers = LLAMA.layers
    assert sizes(program(whole(LLAMA))) == {("all_reduce", TOKENS_BYTES): 4 * layers + 2}
    # Per layer forward two of each; backward the gradients' own two of each, and both inputs once more. The embedding's output
    # is scattered and its gradient gathered; the head's input is gathered twice and its gradient scattered.
    expected = {("reduce_scatter", TOKENS_BYTES): 4 * layers + 2, ("all_gather", TOKENS_BYTES): 6 * layers + 3}
    assert sizes(program(LLAMA)) == expected


def test_learned_positions_are_added_before_ranks_take_their_tokens() -> None:
    found = sizes(program(GPT))
    assert found == {
        ("all_reduce", TOKENS_BYTES): 1, ("reduce_scatter", TOKENS_BYTES): 4 * GPT.layers + 1,
        ("all_gather", TOKENS_BYTES): 6 * GPT.layers + 3,
    }  # fmt: skip


def test_norms_and_biases_of_rows_are_summed_over_ranks_once() -> None:
    last = program(GPT).collectives[-1]
    norms, biases = 2 * (2 * GPT.layers + 1), 2 * GPT.layers
    assert (last.kind, last.bytes_in) == ("all_reduce", (norms + biases) * GPT.width * 4)  # in fp32
    accumulated = replace(GPT, batch=4, gradient_accumulation=2)
    assert [each.bytes_in for each in program(accumulated).collectives].count(last.bytes_in) == 1


def test_under_fsdp_a_unit_sums_its_norms_before_it_is_reduced() -> None:
    sharded = replace(LLAMA, parallel=replace(LLAMA.parallel, fsdp=2), batch=4)
    kinds = [(each.kind, each.group, each.bytes_in) for each in program(sharded).collectives]
    norm = ("all_reduce", "tensor", LLAMA.width * 2)
    assert kinds.count(norm) == 2 * LLAMA.layers + 1
    for at, each in enumerate(kinds):
        if each[:2] == ("reduce_scatter", "fsdp"):
            assert kinds[at - 1] == norm


def test_the_input_is_gathered_again_beside_the_product_of_its_gradient() -> None:
    built = program(LLAMA)
    names = [built.names[number] for number in built.ops.name]
    at = names.index("LinearWithGradAccumulationAndAsyncCommunicationBackward")
    end = next(row for row in range(at + 1, len(names)) if names[row].startswith("autograd::engine"))
    order = [name for name in names[at:end] if name.startswith("c10d::") or name in ("aten::mm", "record_param_comms")]
    waits = [name for name in order if name != "record_param_comms"]
    assert waits == ["c10d::_allgather_base_", "aten::mm", "c10d::_reduce_scatter_base_", "aten::mm"]


def kept_per_layer(config: Transformer) -> int:
    """Bytes that forward makes in a layer and backward takes."""
    kept = []
    for layers in (2, 4):
        built = program(replace(config, layers=layers))
        phases = built.ops.phase.tolist()
        found = [each for each in storages(built, reference_device()) if not each.stays and each.dies < len(phases)]
        spans = (each for each in found if (phases[each.born], phases[each.dies]) == (Phase.FORWARD, Phase.BACKWARD))
        kept.append(sum(each.nbytes for each in spans))
    return (kept[1] - kept[0]) // 2


def test_of_all_that_a_layer_keeps_a_rank_has_its_part() -> None:
    alone = replace(LLAMA, kv_heads=8, parallel=Parallelism())
    assert kept_per_layer(replace(LLAMA, kv_heads=8)) * 4 == pytest.approx(kept_per_layer(alone), rel=0.01)


def test_tokens_have_to_divide() -> None:
    with pytest.raises(InputError, match="sequence 250 does not divide by"):
        replace(LLAMA, sequence=250)


def test_under_autocast_inputs_are_gathered_in_fp32_and_outputs_scattered_in_bf16() -> None:
    cast = replace(LLAMA, precision="bf16-autocast")
    found = Counter((each.kind, each.dtype) for each in program(cast).collectives if each.bytes_in >= TOKENS_BYTES // 4)
    layers = LLAMA.layers
    # Forward inputs of both halves and of the head; backward the gradients of outputs, and of the embedding.
    assert found["all_gather", "float32"] == 2 * layers + 2
    assert found["all_gather", "bfloat16"] == found["reduce_scatter", "bfloat16"] == 2 * layers
    assert found["reduce_scatter", "float32"] == 2 * layers + 2
    assert multiplications(program(cast)) == multiplications(program(LLAMA))


@pytest.mark.parametrize("config", [LLAMA, GPT])
def test_exchanges_inside_products_multiply_and_carry_the_same(config: Transformer) -> None:
    inside = replace(config, parallel=replace(config.parallel, tp_comm_overlap=True))
    assert multiplications(program(inside)) == multiplications(program(config))

    def carried(config: Transformer) -> int:
        """Bytes that a rank receives of its group's tokens; a gather or scatter leaves out its own part."""
        ways, total = config.parallel.tensor, 0
        for each in program(config).collectives:
            size = max(each.bytes_in, each.bytes_out)
            total += size if each.kind == "send_recv" else size * (ways - 1) // ways * (each.kind != "all_reduce")
        return total

    assert carried(inside) == carried(config)
    assert {each.kind for each in program(inside).collectives} > {"send_recv"}


def test_exchanges_inside_products_are_hidden_on_fast_links() -> None:
    layer = replace(
        LLAMA, width=4096, heads=32, kv_heads=8, sequence=4096, batch=8, parallel=Parallelism(tensor=8, sequence=True)
    )
    inside = replace(layer, parallel=replace(layer.parallel, tp_comm_overlap=True))
    exposed = [predict(build(each), "8xh200-nvlink").ranks[0].exposed_communication_ms for each in (layer, inside)]
    assert exposed[1] < exposed[0] / 2


def test_exchanges_inside_products_need_shared_tokens() -> None:
    with pytest.raises(InputError, match="sequence = true"):
        replace(LLAMA, parallel=Parallelism(tensor=4, tp_comm_overlap=True))
