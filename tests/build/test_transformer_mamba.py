"""Hybrids: layers of one half each, Mamba-2 among them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.op_names import names_of

from steptime._build.transformer.build import _parameter_counts, build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts, Mamba
from steptime._hardware.device import reference_device
from steptime._models.memory.peak import peak_memory
from steptime._program.program import Tensor
from steptime.errors import InputError

WIDTH, LENGTH, BATCH = 64, 32, 2
MAMBA = Mamba(heads=8, head_width=16, state=8, groups=2, chunk=16)


def model(**changes: Any) -> Transformer:
    values: dict[str, Any] = {
        "layers": 4, "width": WIDTH, "heads": 4, "sequence": LENGTH, "vocabulary": 96, "batch": BATCH, "norm": "rms_norm",
        "positions": "rotary", "activation": "relu_squared", "tied_head": False, "precision": "bf16", "feed_forward": 128,
        "pattern": "M*-M", "mamba": MAMBA,
    }  # fmt: skip
    return Transformer(**{**values, **changes})


def test_every_layer_has_the_half_that_its_letter_says() -> None:
    found = Counter(names_of(build(model()).programs[0]))
    assert found["MambaChunkScanCombinedFn"] == found["CausalConv1dFn"] == 2
    assert found["aten::_scaled_dot_product_cudnn_attention"] == found["aten::square"] == 1
    assert found["aten::_fused_rms_norm"] == 4 + 1  # one before each, and the last


def test_the_scan_multiplies_within_chunks_and_by_their_states() -> None:
    program = build(model(layers=1, pattern="M")).programs[0]
    rows = [row for row, name in enumerate(names_of(program)) if name == "aten::bmm"]
    found = [program.signatures[program.ops.signature[row]].inputs for row in rows]
    shapes = Counter(tuple(each.shape for each in inputs if isinstance(each, Tensor)) for inputs in found)
    chunks = BATCH * LENGTH // MAMBA.chunk
    heads, groups = chunks * MAMBA.heads, chunks * MAMBA.groups
    forward = [((heads, 16, 16), (heads, 16, 8)), ((groups, 16, 8), (groups, 8, 16)), ((heads, 16, 16), (heads, 16, 16))]
    assert all(shapes[each] for each in forward)
    assert sum(shapes.values()) == 4 + 10
    found_bytes = peak_memory(program, device=reference_device()).parts
    activations = sum(size for kind, size in found_bytes.items() if kind.value in ("inputs", "activations"))
    assert activations < 64 * BATCH * LENGTH * 2 * MAMBA.inner  # nothing is there from nowhere


def test_nemotron_3_nano_has_as_many_parameters() -> None:
    # NVIDIA-Nemotron-3-Nano-30B-A3B, config.json; its card says 31.6 B and 3.2 B active without embeddings.
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    config = model(
        layers=52, pattern=pattern, width=2688, heads=32, kv_heads=2, head_width=128, vocabulary=131072, mamba=Mamba(heads=64),
        experts=Experts(count=128, top_k=6, width=1856, shared=3712, scores="sigmoid"),
    )  # fmt: skip
    total, active = (count / 1e9 for count in _parameter_counts(config))
    assert total == pytest.approx(31.6, rel=0.005) and active - 2 * 131072 * 2688 / 1e9 == pytest.approx(3.2, rel=0.15)


@pytest.mark.parametrize("parallel", [Parallelism(tensor=2), Parallelism(tensor=2, sequence=True), Parallelism(fsdp=2)])
def test_hybrids_are_divided_as_others_are(parallel: Parallelism) -> None:
    program = build(model(parallel=parallel)).programs[0]
    assert names_of(program).count("MambaChunkScanCombinedFn") == 2


def test_stages_of_a_pipeline_are_written_by_their_kinds() -> None:
    config = model(layers=32, pattern="MM*-" * 8, batch=16, gradient_accumulation=8, parallel=Parallelism(pipeline=2))
    assert len(build(config).programs) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": "M*-"}, "pattern has 3 letters for 4 layers"),
        ({"pattern": "M*-X"}, "expected letters of M"),
        ({"pattern": ""}, "give pattern with an M"),
        ({"pattern": "M*-E"}, r"pattern needs \[mamba\] for its M and \[experts\] for its E"),
        ({"mamba": Mamba(heads=8, chunk=0)}, "mamba.chunk is 0"),
        ({"norm": "layer_norm"}, "pattern needs norm = 'rms_norm'"),
        ({"parallel": Parallelism(context=2), "batch": 4}, "parallel.context with Mamba-2"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)


def test_a_config_comes_back_whole() -> None:
    assert Transformer.from_dict(model().to_dict()) == model()
