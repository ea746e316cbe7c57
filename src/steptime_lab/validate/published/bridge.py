"""`steptime validate bridge`: tokens per second that NVIDIA publishes for Megatron-Bridge, by model, precision and layout.

The file is a CSV with a row for each run: `model`, `System`, `#-GPUs`, `Precision`, `Sequence Length`, `GBS` and `MBS` (global
and micro-batch), `TP`, `PP`, `VP`, `CP`, `EP`, `FSDP` and `Tokens / sec / GPU`. Models are those of
`data/published_models.toml` as Megatron-core runs them: Transformer Engine's layers, a distributed optimiser, sequence
parallelism beside tensor parallelism. What recipes say and the table does not (NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs, Apache-2.0): nothing is recomputed, but for parts of DeepSeek-V3's and gpt-oss's layers that are
small; CUDA graphs and exchanges of tokens beside products are left out. The layer that predicts a second token counts as one
more, at the end.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steptime._build.transformer.config import Transformer
from steptime._platforms.platform import PlatformParts, usual_host
from steptime.errors import InputError, SteptimeError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation
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
_PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
# Name of a system -> the device, the fabric of one NVLink domain and its GPUs, and the fabric of several.
_SYSTEMS = {
    "dgx-h100": ("h100", "h100-nvlink", 8, "h100-ib400"),
    "dgx-b200": ("b200", "b200-nvlink", 8, "b200-ib400"),
    "dgx-b300": ("b300", "b200-nvlink", 8, "b200-ib400"),
    "dgx-gb200": ("gb200", "gb200-nvlink", 72, "gb200-ib400"),
    "dgx-gb300": ("gb300", "gb200-nvlink", 72, "gb200-ib400"),
}
# Of runs that train adapters: Megatron-Bridge's rank, beside the fused projection of queries, keys and values.
_ADAPTERS = {"lora": {"rank": 16, "targets": ["query", "key", "value"]}}
_MOST, _MOST_ROWS, _SHOWN = 1 << 24, 100_000, 20
_NONE = ("", "n/a")
_LEAST_RANKED = 3


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
            models[each.model].append(case)
    if not compared:
        raise InputError(f"{file}: no row can be predicted; the first: {refused[0]}")
    more = len(refused) - _SHOWN
    return Validation.of(
        "bridge",
        "large models that NVIDIA trained with Megatron-Bridge, defaults only",
        compared,
        facts={"rows": float(count), "expressible": len(compared) / count} | _ranked(models),
        warnings=[*refused[:_SHOWN], *([f"{more} more rows cannot be predicted"] if more > 0 else [])],
    )


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
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not readable as a table of runs ({error})") from error
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise InputError(f"{file}: no column {missing[0]!r}; a table of runs has {', '.join(COLUMNS)}")
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{file}: {len(rows):,} rows; expected at most {_MOST_ROWS:,}")
    known, refused = [], []
    for number, row in enumerate(rows, 2):
        found = _row(row, f"line {number}")
        if isinstance(found, str):
            refused.append(f"{file.name}, {found}")
        else:
            known.append(found)
    return known, refused


def _row(row: Mapping[str, str | None], where: str) -> BridgeRow | str:
    texts = {name: " ".join((row[name] or "").split()) for name in COLUMNS}
    where = f"{where} ({texts['model'][:40]}, {texts['System'][:40]}, {texts['Precision'][:20]})"
    known, system = _MODELS.get(texts["model"].lower()), _SYSTEMS.get(texts["System"].lower())
    if known is None:
        return f"{where}: nobody says what the layers of this model are"
    if system is None or texts["Precision"].lower() not in _PRECISIONS:
        return f"{where}: no such system or precision is known"
    adapters = "lora" in (row.get("kind") or "").lower()
    try:
        sizes = {name: _whole(texts[name]) for name in COLUMNS[2:13] if name != "Precision"}
        tokens = float(texts["Tokens / sec / GPU"])
    except ValueError:
        return f"{where}: expected whole numbers, and tokens per second"
    if not all(0 < size <= _MOST for size in sizes.values()) or not 0 < tokens < _MOST:
        return f"{where}: expected numbers of 1 to {_MOST:,}"
    return _built(sizes, tokens, (known, system, texts), where, _ADAPTERS if adapters else {})


def _whole(text: str) -> int:
    return 1 if text.lower() in _NONE or text == "0" else int(text)


def _built(
    sizes: Mapping[str, int],
    tokens: float,
    what: tuple[str, tuple[str, str, int, str], Mapping[str, str]],
    where: str,
    adapters: Mapping[str, Any],
) -> BridgeRow | str:
    known, (device, one, most, several), texts = what
    ranks = sizes["#-GPUs"]
    replicas, left = divmod(ranks, sizes["TP"] * sizes["PP"] * sizes["CP"])
    parts, more = divmod(sizes["GBS"], max(replicas, 1) * sizes["MBS"])
    if left or more or not replicas or not parts:
        return f"{where}: GPUs or batch do not divide by the layout"
    try:
        values = _config(known, sizes, _PRECISIONS[texts["Precision"].lower()], (replicas, parts))
        config = Transformer.from_dict({**values, **adapters}, where)
        fabric = None if ranks == 1 else one if ranks <= most else several
        platform = PlatformParts(f"{ranks}x{device}", ranks, device, usual_host(device), fabric)
        platform.check()
    except SteptimeError as error:
        return str(error)
    measured_ms = 1e3 * sizes["GBS"] * sizes["Sequence Length"] / (tokens * ranks)
    row = LayoutRow(f"{where[where.find('(') :]}, batch {sizes['GBS']} on {ranks}", config, measured_ms, platform)
    return BridgeRow(row, known, texts["Precision"].upper(), texts["System"])


def _config(known: str, sizes: Mapping[str, int], precision: str, shared: tuple[int, int]) -> dict[str, Any]:
    replicas, parts = shared
    values = model(known)
    more = _MORE_LAYERS.get(known, 0)
    staged = pipeline(values["layers"], sizes["PP"], sizes["VP"])
    if staged.get("stages"):
        staged["stages"] = [*staged["stages"][:-1], staged["stages"][-1] + more]
    optimiser = {"zero": 1} if replicas * sizes["CP"] > 1 else {}
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
