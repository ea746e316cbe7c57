"""`steptime validate bridge`: tokens per second that NVIDIA publishes for Megatron-Bridge, by model, precision and layout.

The file is a CSV with a row for each run: `model`, `System`, `#-GPUs`, `Precision`, `Sequence Length`, `GBS` and `MBS` (global
and micro-batch), `TP`, `PP`, `VP`, `CP`, `EP`, `FSDP` and `Tokens / sec / GPU`. Models are those of
`data/published_models.toml` as Megatron-core runs them: Transformer Engine's layers, a distributed optimiser, sequence
parallelism beside tensor parallelism. What recipes say and the table does not (NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs, Apache-2.0: deepseek 04264182, kimi 013180a7, qwen 01b2977e, gpt_oss 07eea52d, nemotronh 06e8da4e,
llama 0013c9a8): gradients are summed in bf16, experts get as many tokens each, most of them by HybridEP or DeepEP, receives
of interleaved pipelines are overlapped, and in some runs exchanges of tokens are beside another pass. Left out: CUDA graphs,
exchanges of tensor parallelism inside products (`tp_comm_overlap`), attention in eight bits, and what little is recomputed but
on H100s. The layer that predicts a second token counts as one more, at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from steptime._build.transformer.config import Transformer
from steptime._platforms.platform import PlatformParts, usual_host
from steptime.errors import InputError, SteptimeError
from steptime_lab.measurements.published_rows import TableRow, made_of, rows_of_csv
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, said_of_refused
from steptime_lab.validate.layouts.layouts import answers, case_of
from steptime_lab.validate.layouts.rows import LayoutRow
from steptime_lab.validate.published.models import MEGATRON, model, pipeline
from steptime_lab.validate.recommenders import rank_agreement

COLUMNS: tuple[str, ...] = (
    "model", "System", "#-GPUs", "Precision", "Sequence Length", "GBS", "MBS", "TP", "PP", "VP", "CP", "EP", "FSDP",
    "Tokens / sec / GPU",
)  # fmt: skip
_MODELS = {
    "llama3_70b": "llama3-70b",
    "llama3.1_405b": "llama3-405b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "deepseekv3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "gpt oss 120b": "gpt-oss-120b",
    "nemotron_3_nano": "nemotron-3-nano",
    "nemotron_3_5_lightning": "nemotron-3-nano",  # the same sizes
}
_MORE_LAYERS = {"deepseek-v3": 1}  # that predict a second token
# Models whose tokens go to a rank once, and the systems where they do: `moe_flex_dispatcher_backend` of their recipes.
_RACKS, _NODES = ("gb200", "gb300"), ("b200", "b300")
_ONCE = {
    "deepseek-v3": (*_RACKS, *_NODES),
    "kimi-k2": _RACKS,
    "qwen3-30b-a3b": (*_RACKS, *_NODES),
    "qwen3-235b-a22b": _RACKS,
    "nemotron-3-nano": (*_RACKS, *_NODES, "h100"),
}
# Runs whose exchanges of tokens are beside another pass (`moe_a2a_overlap`): by the oldest container in which they are.
_BESIDE = {
    ("qwen3-235b-a22b", "h100"): "",
    ("deepseek-v3", "b200"): "",
    ("deepseek-v3", "gb200"): "26.06",
    ("deepseek-v3", "gb300"): "26.06",
}
# What recipes compute again, where it is more than a projection or the dense half of a few layers.
_AGAIN = {("nemotron-3-nano", "h100"): ["feed_forward", "norm", "attention"]}
_PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
# Name of a system -> the device, the fabric of one NVLink domain and its GPUs, and the fabric of several.
_SYSTEMS = {
    "dgx-h100": ("h100", "h100-nvlink", 8, "h100-ib400"),
    "dgx-b200": ("b200", "b200-nvlink", 8, "b200-ib400"),
    "dgx-b300": ("b300", "b200-nvlink", 8, "b300-ib800"),
    "dgx-gb200": ("gb200", "gb200-nvlink", 72, "gb200-ib400"),
    "dgx-gb300": ("gb300", "gb200-nvlink", 72, "gb300-ib800"),
}
# Of runs that train adapters: Megatron-Bridge's rank, beside the fused projection of queries, keys and values.
_ADAPTERS = {"lora": {"rank": 16, "targets": ["query", "key", "value"]}}
_SIZES = [name for name in COLUMNS[2:13] if name != "Precision"]
_NONE = ("", "n/a", "0")
_LEAST_RANKED = 3
_Known = TypeVar("_Known")


@dataclass(frozen=True)
class BridgeRow:
    """One run: the row that is predicted, and what it is grouped by."""

    row: LayoutRow
    model: str
    precision: str
    system: str


def validate_bridge(
    file: Path, *, executor: Executor | None = None, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> Validation:
    """All rows of a table that can be predicted, by precision, system and parallelism, and how well each model's are ranked."""
    rows, refused = read_bridge(file)
    count = len(rows) + len(refused)
    known, wrong = answers([each.row for each in rows], executor=executor, progress=progress)
    refused += wrong
    compared, models = [], defaultdict(list)
    for each in rows:
        if each.row in known:
            case = case_of(each.row, known[each.row])
            compared.append(Compared(case, _groups(each)))
            models[each.model].append(_by_token(case, each.row))
    if not compared:
        raise InputError(f"{file}: no row can be predicted; the first: {refused[0]}")
    return Validation.of(
        "bridge",
        "large models that NVIDIA trained with Megatron-Bridge, defaults only",
        compared,
        facts={"rows": float(count), "expressible": len(compared) / count} | _ranked(models),
        warnings=said_of_refused(refused),
    )


def _by_token(case: MeasuredCase, row: LayoutRow) -> MeasuredCase:
    """What a GPU takes for a token: batches and GPUs differ within a model, and longer steps are not slower."""
    times = row.config.ranks / (row.config.batch * row.config.sequence)
    return MeasuredCase(case.name, case.predicted * times, case.measured * times)


def _ranked(models: Mapping[str, Sequence[MeasuredCase]]) -> dict[str, float]:
    """Kendall's tau of tokens per second and GPU within each model that has rows enough, and their mean."""
    found = {name: rank_agreement(cases) for name, cases in sorted(models.items()) if len(cases) >= _LEAST_RANKED}
    taus = {f"kendall_tau_{name}": tau for name, tau in found.items() if tau is not None}
    return taus | ({"kendall_tau_mean": float(np.mean(list(taus.values())))} if taus else {})


def _groups(each: BridgeRow) -> tuple[str | None, ...]:
    parallel = each.row.config.parallel
    return (
        each.precision,
        each.system,
        each.model,
        "pipelines" if parallel.pipeline > 1 else "no pipelines",
        "expert parallelism" if parallel.expert > 1 else None,
        "tensor parallelism" if parallel.tensor > 1 else None,
        "context parallelism" if parallel.context > 1 else None,
        "FSDP" if parallel.fsdp > 1 else None,
    )


def read_bridge(file: Path) -> tuple[list[BridgeRow], list[str]]:
    """The rows that configs can say, and a line for each other."""
    return made_of(rows_of_csv(file, "runs", COLUMNS), _run)


def _run(row: TableRow) -> BridgeRow:
    what = f"({row.text('model')[:40]}, {row.text('System')[:40]}, {row.text('Precision')[:20]})"
    try:
        return _made(row, what)
    except SteptimeError as error:
        raise InputError(f"{what}: {error}") from None


def _made(row: TableRow, what: str) -> BridgeRow:
    known = _known(row, "model", _MODELS)
    device, one, most, several = _known(row, "System", _SYSTEMS)
    precision = _known(row, "Precision", _PRECISIONS)
    sizes = {name: 1 if row.text(name).lower() in _NONE else row.whole(name) for name in _SIZES}
    tokens = row.number("Tokens / sec / GPU")
    ranks = sizes["#-GPUs"]
    replicas, left = divmod(ranks, sizes["TP"] * sizes["PP"] * sizes["CP"])
    parts, more = divmod(sizes["GBS"], max(replicas, 1) * sizes["MBS"])
    if left or more or not replicas or not parts:
        raise InputError(
            f"{ranks} GPUs or a batch of {sizes['GBS']} do not divide by the layout; "
            "expected multiples of TP x PP x CP and of replicas x MBS"
        )
    adapters = _ADAPTERS if "lora" in row.text("kind").lower() else {}
    values = _config(known, sizes, precision, (replicas, parts), device)
    since = _BESIDE.get((known, device))
    if since is not None and sizes["VP"] > 1 and row.text("container") >= since:
        values["parallel"]["overlap_moe_expert_parallel_comm"] = True
    config = Transformer.from_dict({**values, **adapters})
    fabric = None if ranks == 1 else one if ranks <= most else several
    platform = PlatformParts(f"{ranks}x{device}", ranks, device, usual_host(device), fabric)
    platform.check()
    measured_ms = 1e3 * sizes["GBS"] * sizes["Sequence Length"] / (tokens * ranks)
    layout = LayoutRow(f"{what}, batch {sizes['GBS']} on {ranks}", config, measured_ms, platform)
    return BridgeRow(layout, known, row.text("Precision").upper(), row.text("System"))


def _known(row: TableRow, column: str, known: Mapping[str, _Known]) -> _Known:
    found = known.get(row.text(column).lower())
    if found is None:
        raise row.wrong(column, f"one of {', '.join(known)}")
    return found


def _config(known: str, sizes: Mapping[str, int], precision: str, shared: tuple[int, int], device: str) -> dict[str, Any]:
    replicas, parts = shared
    values = model(known)
    if sizes["EP"] > 1 and device in _ONCE.get(known, ()):
        values["experts"] = {**values["experts"], "exchange": "fused"}
    if (known, device) in _AGAIN:
        values["recompute"] = _AGAIN[known, device]
    if "latent_attention" in values:
        values["latent_attention"] = {**values["latent_attention"], "fused_rope": True}
    more = _MORE_LAYERS.get(known, 0)
    staged = pipeline(values["layers"], sizes["PP"], sizes["VP"])
    if staged.get("stages"):
        staged["stages"] = [*staged["stages"][:-1], staged["stages"][-1] + more]
    optimiser = {"zero": 1, "grad_reduce_in_fp32": False} if replicas * sizes["CP"] > 1 else {}
    replicated = {"fsdp": replicas} if sizes["FSDP"] > 1 else {"data": replicas, **optimiser}
    return {
        **values,
        **MEGATRON,
        "layers": values["layers"] + more,
        "sequence": sizes["Sequence Length"],
        "batch": sizes["GBS"],
        "gradient_accumulation": parts,
        "precision": precision,
        "parallel": {
            **replicated,
            "tensor": sizes["TP"],
            "sequence": sizes["TP"] > 1,
            "context": sizes["CP"],
            "expert": sizes["EP"],
            **staged,
        },
    }
