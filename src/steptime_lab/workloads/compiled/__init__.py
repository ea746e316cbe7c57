"""Training steps measured eager and compiled: architectures of few layers, none of them the zoo's, as a script has them.

None of them has a part in any fit. `architectures()` has the functions that make them by name, `cases()` what is measured.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from steptime_lab.workloads.compiled.architecture import Make, Network, Site, registered
from steptime_lab.workloads.compiled.case import (
    CHECKPOINTED,
    DEFAULT,
    GRAPHS,
    INSIDE,
    LAYERS,
    LOSS,
    MODEL,
    OPTIMIZER,
    STEP,
    WATCHED,
    CompiledCase,
)  # fmt: skip
from steptime_lab.workloads.compiled.host_parts import PARTS

__all__ = ["DEFAULT", "GRAPHS", "HOST", "CompiledCase", "Make", "Network", "Site", "architectures", "cases", "host_cases"]

HOST = "host"
"""By which `host_cases` are asked for together."""

_MODULES = ("language", "vision", "others")
# architecture, precision, optimiser, mode, what is compiled; and where they differ from a plain step of one rank: more.
_CASES: tuple[tuple[str, str, str, str, str, dict[str, object]], ...] = (
    ("gpt_dropout", "bf16", "adamw_fused", DEFAULT, MODEL, {"times": 3.0}),
    ("gpt_dropout", "bf16", "adamw", DEFAULT, MODEL, {"layers": WATCHED}),
    ("gpt_dropout", "tf32", "adamw_capturable", GRAPHS, STEP, {"times": 0.25}),
    ("gpt_dropout", "bf16", "adamw", DEFAULT, MODEL, {"ranks": 2}),
    ("llama_gqa", "bf16", "adamw_fused", DEFAULT, LOSS, {}),
    ("llama_gqa", "pure_bf16", "adamw", DEFAULT, LAYERS, {}),
    ("llama_gqa", "bf16", "adamw_fused", DEFAULT, MODEL, {"layers": CHECKPOINTED, "times": 2.0}),
    ("llama_gqa", "bf16", "adamw_fused", DEFAULT, INSIDE, {"ranks": 4, "times": 0.5}),
    ("qwen_tied", "bf16", "adamw_fused", DEFAULT, LOSS, {"times": 2.0}),
    ("qwen_tied", "pure_bf16", "sgd", GRAPHS, LOSS, {"times": 0.5}),
    ("low_rank", "bf16", "adamw", DEFAULT, MODEL, {}),
    ("low_rank", "pure_bf16", "adamw", GRAPHS, MODEL, {"times": 0.5}),
    ("chunked_sums", "bf16", "adamw", DEFAULT, MODEL, {"times": 3.0}),
    ("chunked_sums", "tf32", "sgd", GRAPHS, LOSS, {"times": 0.25}),
    ("doubling_scan", "tf32", "adamw", DEFAULT, MODEL, {"times": 4.0}),
    ("fixed_experts", "bf16", "adamw", DEFAULT, MODEL, {"times": 2.0}),
    ("masked_encoder", "bf16", "adamw", DEFAULT, MODEL, {"times": 3.0}),
    ("masked_encoder", "fp32", "adamw_fused", DEFAULT, LAYERS, {"times": 0.25}),
    ("masked_encoder", "bf16", "sgd", DEFAULT, MODEL, {"ranks": 2, "times": 0.5}),
    ("relative_bias", "bf16", "adamw", DEFAULT, OPTIMIZER, {}),
    ("relative_bias", "tf32", "adamw_fused", GRAPHS, MODEL, {"times": 0.25}),
    ("text_classes", "bf16", "adamw", DEFAULT, MODEL, {}),
    ("text_classes", "tf32", "adamw_capturable", GRAPHS, STEP, {"times": 0.25}),
    ("vit_registers", "bf16", "adamw", DEFAULT, MODEL, {"times": 3.0}),
    ("vit_registers", "bf16", "adamw_fused", GRAPHS, MODEL, {"times": 0.5}),
    ("vit_registers", "tf32", "sgd", DEFAULT, INSIDE, {"ranks": 2, "times": 0.5}),
    ("shifted_windows", "bf16", "adamw", DEFAULT, MODEL, {"times": 2.0}),
    ("patch_mixer", "bf16", "adamw", DEFAULT, STEP, {"times": 3.0}),
    ("patch_mixer", "tf32", "sgd", GRAPHS, LOSS, {"times": 0.5}),
    ("depthwise_net", "bf16", "adamw", DEFAULT, MODEL, {"times": 4.0}),
    ("basic_residual", "fp32", "sgd", DEFAULT, MODEL, {"times": 4.0}),
    ("basic_residual", "bf16", "sgd", GRAPHS, MODEL, {"times": 0.5}),
    ("basic_residual", "bf16", "sgd", DEFAULT, MODEL, {"ranks": 4, "times": 0.5}),
    ("skipping_net", "bf16", "adamw", DEFAULT, MODEL, {"times": 4.0}),
    ("skipping_net", "fp32", "adamw_fused", GRAPHS, LOSS, {"times": 0.5}),
    ("squeeze_excite", "bf16", "sgd", DEFAULT, MODEL, {}),
    ("variational", "fp32", "adamw", DEFAULT, LOSS, {}),
    ("variational", "bf16", "adamw_capturable", GRAPHS, STEP, {"times": 0.5}),
    ("modulated_denoiser", "bf16", "adamw", DEFAULT, MODEL, {"layers": CHECKPOINTED, "times": 3.0}),
    ("modulated_denoiser", "bf16", "adamw", GRAPHS, MODEL, {"times": 0.5}),
    ("pixel_classes", "bf16", "sgd", DEFAULT, LOSS, {"times": 4.0}),
    ("embedding_bags", "fp32", "sgd", DEFAULT, MODEL, {}),
    ("field_factors", "tf32", "adamw", DEFAULT, LOSS, {}),
    ("field_factors", "fp32", "sgd", GRAPHS, LOSS, {"times": 0.25}),
    ("table_columns", "bf16", "adamw", DEFAULT, MODEL, {"times": 4.0}),
    ("table_columns", "tf32", "adamw_capturable", GRAPHS, STEP, {"times": 0.25}),
    ("contrasted_towers", "bf16", "adamw", DEFAULT, OPTIMIZER, {}),
    ("contrasted_towers", "tf32", "sgd", GRAPHS, LOSS, {"times": 0.5}),
    ("wide_perceptron", "bf16", "adamw_fused", DEFAULT, MODEL, {"times": 4.0}),
    ("wide_perceptron", "tf32", "sgd", DEFAULT, MODEL, {"ranks": 2, "times": 0.5}),
    ("graph_messages", "tf32", "adamw", DEFAULT, MODEL, {"times": 4.0}),
    ("dilated_waves", "bf16", "adamw", DEFAULT, MODEL, {}),
    ("gated_frames", "bf16", "adamw", DEFAULT, MODEL, {"layers": WATCHED}),
    ("gated_frames", "tf32", "adamw_fused", GRAPHS, MODEL, {"times": 0.25}),
    ("sine_layers", "tf32", "adamw", DEFAULT, STEP, {"times": 4.0}),
    ("latent_reader", "bf16", "adamw", DEFAULT, MODEL, {}),
    ("latent_reader", "bf16", "sgd", GRAPHS, LOSS, {"times": 0.5}),
)  # fmt: skip


@cache
def architectures() -> dict[str, Make]:
    """By name."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return registered()


@cache
def cases() -> dict[str, CompiledCase]:
    """By name: the architecture and what tells its cases apart."""
    found = {}
    for architecture, precision, optimizer, mode, what, more in _CASES:
        own = {key: value for key, value in more.items() if key not in ("times",)}
        words = [architecture, precision, optimizer, what, *(["graphs"] if mode == GRAPHS else [])]
        words += [str(value) if key == "layers" else f"r{value}" for key, value in own.items()]
        name = "-".join(words)
        assert name not in found
        found[name] = CompiledCase(name, architectures()[architecture], precision, optimizer, mode, what, **more)  # type: ignore[arg-type]
    return found


@cache
def host_cases() -> dict[str, CompiledCase]:
    """What costs of hosts are fitted on, by name; none of them is one of `cases`."""
    found = {}
    for part, precision, optimizer, what, modes in PARTS:
        for mode in modes:
            name = "-".join([part.__name__, *(["graphs"] if mode == GRAPHS else [])])
            found[name] = CompiledCase(name, part, precision, optimizer, mode, what, profiled=False)
    return found
