"""The winner for torchtitan: fields that its repository has, layouts that it runs, refusals before the search."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from steptime._build.config import read_config
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._cli.app import run
from steptime._plan import search as searching
from steptime._plan.space import Choices, ModelLayout, layouts_of
from steptime._plan.torchtitan import runnable, torchtitan_text
from steptime.errors import InputError

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# Fields of torchtitan's configuration at b5bcd76c, 2026-08-21 (torchtitan/config/configs.py, torchtitan/trainer.py).
FIELDS = {
    "training": {
        "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length", "max_norm", "steps",
        "enable_cpu_offload", "disable_cuda_graphs", "dtype", "mixed_precision_param", "mixed_precision_reduce", "gc_freq",
        "gc_debug",
    },
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "enable_fsdp_symm_mem",
        "tensor_parallel_degree", "enable_sequence_parallel", "spmd_backend", "pipeline_parallel_degree",
        "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "num_pp_microbatches", "context_parallel_degree", "context_parallel_load_balancer", "context_parallel_ptrr_mask_key",
        "expert_parallel_degree",
    },
    "compile": {"enable", "enable_async_tensor_parallel", "components", "backend"},
    "activation_checkpoint": set[str](),
}  # fmt: skip


def model() -> Transformer:
    config = read_config(CONFIGS / "llama-8b.toml")
    assert isinstance(config, Transformer)
    return replace(config, parallel=Parallelism(), checkpointing=False, batch=64)


def fields_of(text: str) -> dict[str, object]:
    """What the written function sets."""
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    assigned = [node for node in function.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)]
    values = {ast.unparse(node.targets[0]): node.value for node in assigned}
    return {
        name.removeprefix("config."): ast.literal_eval(value) if isinstance(value, ast.Constant) else ast.unparse(value)
        for name, value in values.items()
    }


def test_every_field_is_one_that_torchtitan_has_and_says_the_layout() -> None:
    whole = model()
    layouts = layouts_of(whole, 16, runnable(whole, Choices())).layouts
    assert len({each.parallel.pipeline for each in layouts}) > 2 and len({each.recompute for each in layouts}) == 3
    for layout in layouts:
        found, parallel = fields_of(torchtitan_text(whole, layout, "a comment")), layout.parallel
        for name in found:
            section, _, field = name.partition(".")
            assert not field or field in FIELDS[section], name
        degrees = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")
        product = 1
        for degree in degrees:
            value = found[f"parallelism.{degree}_degree"]
            assert isinstance(value, int)
            product *= value
        assert product == parallel.ranks == 16
        tokens = found["training.num_tokens_per_microbatch_per_dp_rank"]
        parts = found.get("parallelism.num_pp_microbatches", 1)
        assert isinstance(tokens, int) and isinstance(parts, int)
        assert whole.batch * whole.sequence % (tokens * parts * parallel.replicas) == 0
        per_stage = found.get("parallelism.pipeline_parallel_layers_per_stage")
        if isinstance(per_stage, int):
            assert whole.layers == per_stage * parallel.pipeline * parallel.chunks
        assert parallel.zero == 0 and parallel.expert_tensor == 1


def test_states_and_computation_have_the_precisions_that_were_predicted() -> None:
    layout = ModelLayout(Parallelism(fsdp=8), 1)
    for states, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        found = fields_of(torchtitan_text(replace(model(), states=states), layout, ""))
        assert (found["training.dtype"], found["training.mixed_precision_param"]) == (dtype, "bfloat16")


def test_the_base_is_the_model_or_says_that_it_has_to_be_replaced() -> None:
    layout = ModelLayout(Parallelism(fsdp=8), 1)
    assert "import llama3_8b as base\n" in torchtitan_text(model(), layout, "")
    assert "replace it: your model has 30 layers" in torchtitan_text(replace(model(), layers=30), layout, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--zero", "1"], "torchtitan has no ZeRO 1; give --zero 0"),
        (["--recompute", "selective"], "torchtitan has no recomputation as 'selective'; give --recompute none,full,ops"),
        (["--set", "precision=fp8"], "torchtitan has no precision 'fp8' as a field"),
        (["--set", "fused=true"], "torchtitan has no layers of Transformer Engine"),
    ],
)
def test_what_torchtitan_cannot_do_is_refused_before_the_search(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(searching, "search", never)
    arguments = [
        "plan",
        str(CONFIGS / "llama-8b.toml"),
        "--platform",
        "8xh200-nvlink",
        "--torchtitan",
        str(tmp_path / "planned.py"),
    ]
    assert run([*arguments, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_framework_that_is_not_known_is_refused() -> None:
    import steptime

    with pytest.raises(InputError, match="framework is 'megatron'; expected 'torchtitan'"):
        steptime.plan(CONFIGS / "llama-8b.toml", "8xh200-nvlink", framework="megatron")
