"""A Transformer as data: what is read, what is refused, and what another batch or rank count changes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import steptime
from steptime._build.config import read_config
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts, LatentAttention, Lora, Mamba
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
SMALL: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "sequence": 16, "vocabulary": 128, "batch": 8}
WHOLE = "\n".join(f"{key} = {value}" for key, value in SMALL.items())


def small(**changes: Any) -> Transformer:
    return Transformer(**{**SMALL, **changes})


def test_a_config_comes_back_whole() -> None:
    model = small(name="x", kv_heads=2, norm="rms_norm", activation="swiglu", parallel=Parallelism(fsdp=2, tensor=2))
    assert Transformer.from_dict(model.to_dict()) == model


def test_what_is_left_out_goes_by_the_model() -> None:
    assert (small().inner, small().key_heads, small().position_rows) == (256, 4, 16)
    assert small().biased and small().fused_projections
    llama = small(norm="rms_norm", kv_heads=2)
    assert not llama.biased and not llama.fused_projections
    assert (small().kernels, small(precision="bf16").kernels) == ("efficient", "cudnn")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 5}, "width 64 does not divide by heads 5"),
        ({"kv_heads": 3}, "heads 4 does not divide by kv_heads 3"),
        ({"batch": 7, "parallel": Parallelism(data=2)}, "batch 7 does not divide into 2 parts"),
        ({"batch": 8, "gradient_accumulation": 3}, "batch 8 does not divide into 3 parts"),
        ({"parallel": Parallelism(tensor=8)}, "heads 4 does not divide by parallel.tensor 8"),
        (
            {"kv_heads": 1, "norm": "rms_norm", "parallel": Parallelism(tensor=2)},
            "kv_heads 1 does not divide by parallel.tensor 2",
        ),
        ({"feed_forward": 99, "parallel": Parallelism(tensor=2)}, "feed_forward 99 does not divide by parallel.tensor 2"),
        ({"layers": 0}, "layers is 0; expected a whole number of 1 or more"),
        ({"layers": True}, "layers is True"),
        ({"layers": 2.0}, "layers is 2.0"),
        ({"vocabulary": 2**31}, "vocabulary is 2147483648"),
        ({"layers": 2000, "gradient_accumulation": 5}, "2000 layers in 5 accumulated parts; at most 8192 layers in all"),
        ({"parallel": Parallelism(data=2**20), "batch": 2**20}, "1048576 ranks; at most 262144 can be built"),
        ({"parallel": Parallelism(data=0)}, "parallel.data is 0"),
        ({"dropout": 1.0}, "dropout is 1.0; expected a number from 0 to below 1"),
        ({"dropout": "much"}, "dropout is 'much'"),
        ({"causal": "yes"}, "causal is 'yes'; expected true or false"),
        ({"bias": 1}, "bias is 1; expected true or false"),
        ({"precision": "fp6"}, "precision is 'fp6'; expected fp32, tf32, bf16-autocast, bf16, fp16, fp8, mxfp8 or nvfp4"),
        ({"precision": "fp8", "fp8_recipe": "nvfp4"}, "with precision = 'fp8' it is one of delayed, current, blockwise"),
        ({"fp8_recipe": "current"}, "fp8_recipe is 'current'; with precision = 'fp8'"),
        ({"precision": "mxfp8", "weights": "in_out"}, "precision = 'mxfp8' needs weights = 'out_in'"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"fused": True, "norm_place": "after"}, "fused layers go with weights = 'out_in'"),
        ({"recompute": "some"}, "recompute is 'some'; expected none, full, selective, ops or a list of attention"),
        ({"recompute": ("mlp",)}, "recompute has 'mlp'; expected parts of a layer: attention"),
        ({"recompute": "ops", "recompute_keeps": ("mm/x",)}, "recompute_keeps is ('mm/x',); expected names of ops"),
        ({"recompute_keeps": ("mm",)}, "recompute_keeps goes with recompute = 'ops'"),
        ({"recompute": "ops", "checkpointing": True}, "leave checkpointing out"),
        ({"recompute_every": 2}, "recompute_every says which layers"),
        ({"activation": ["gelu"]}, "activation is ['gelu']"),
        ({"max_positions": 8}, "max_positions 8 is below sequence 16"),
        ({"width": 60, "positions": "rotary"}, "heads are 15 wide"),
        ({"kv_heads": 2, "projections": "fused"}, "give projections = 'separate'"),
        ({"attention": "flash"}, "flash attention computes in 16 bits"),
        ({"precision": "bf16", "attention": "flash", "mask": "padding"}, "flash attention takes no mask"),
        ({"head": "tokens", "parallel": Parallelism(tensor=2)}, "head = 'language_model'"),
        ({"weights": "in_out", "bias": False}, "give weights = 'out_in'"),
        ({"attention": "unfused", "head": "sequence"}, "unfused attention, as in Megatron-LM, needs"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        small(**changes)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = ", "cannot be read as TOML"),
        ("kind = 'dlrn'", 'kind is \'dlrn\'; expected "dlrm" or "transformer"'),
        ("kind = 'transformer'\nlayers = 2", "'width' is missing"),
        ("kind = 'transformer'\nlaiers = 2", "unknown key 'laiers'; did you mean 'layers'?"),
        (f"{WHOLE}\n[parallel]\ntensors = 2", "parallel: unknown key 'tensors'; did you mean 'tensor'?"),
        (f"{WHOLE}\nparallel = 4", "parallel is 4; expected a table"),
        (f"{WHOLE}\nranks = 8\n[parallel]\ndata = 4", "ranks is 8 but data 4 x fsdp 1 x tensor 1 is 4"),
        (f"{WHOLE}\nkv_heads = 3", "model.toml: heads 4 does not divide by kv_heads 3"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "model.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_config(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml: no such file"):
        read_config(tmp_path / "none.toml")


def test_another_batch_changes_nothing_else() -> None:
    assert small().with_batch(64).with_batch(8) == small()
    with pytest.raises(InputError, match="batch 9 does not divide"):
        small(parallel=Parallelism(data=2)).with_batch(9)


def test_other_ranks_keep_tensor_parallelism() -> None:
    model = small(parallel=Parallelism(data=2, tensor=2))
    assert model.with_ranks(8).parallel == Parallelism(data=4, tensor=2)
    assert small(parallel=Parallelism(fsdp=2, tensor=2)).with_ranks(8).parallel == Parallelism(fsdp=4, tensor=2)
    both = small(parallel=Parallelism(data=2, fsdp=2))
    assert both.with_ranks(8).parallel == Parallelism(data=4, fsdp=2)
    with pytest.raises(InputError, match=r"3 ranks with parallel\.tensor = 2; give a multiple of 2"):
        model.with_ranks(3)
    with pytest.raises(InputError, match="give a multiple of 2"):
        both.with_ranks(3)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("[gbl]*.toml")), ids=lambda file: file.stem)
def test_the_examples_are_read_and_named_after_their_files(file: Path) -> None:
    found = read_config(file)
    assert isinstance(found, Transformer)
    assert found.name == file.stem


@pytest.mark.parametrize("table", [Transformer, Parallelism, Experts, LatentAttention, Lora, Mamba])
def test_every_key_is_documented(table: type[Any]) -> None:
    text = (Path(steptime.__file__).parent / "data" / "config_keys.toml").read_text(encoding="utf-8")
    keys = [each.name for each in fields(table)]
    assert [key for key in keys if not re.search(rf"^{key} = ", text, re.MULTILINE)] == []
