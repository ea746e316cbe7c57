"""What is said of a model of which no layout fits: by how much, and what would help."""

from __future__ import annotations

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.recompute import FULL
from steptime._plan.space import ModelLayout
from steptime._units import GIB
from steptime.errors import InputError


def shortage(model: Transformer, gpus: int, limit_bytes: int, least: tuple[ModelLayout, float]) -> InputError:
    """An error about the layout that needs least."""
    layout, peak_bytes = least
    helps = "; ".join(f"({number}) {each}" for number, each in enumerate(_helps(model, gpus, layout, peak_bytes), 1))
    return InputError(
        f"{model.title} does not fit on {gpus} GPUs: the layout that needs least ({layout}) takes {peak_bytes / GIB:.1f} GiB "
        f"of {limit_bytes / GIB:.1f}, {(peak_bytes - limit_bytes) / GIB:.1f} are short. What would help: {helps}"
    )


def _helps(model: Transformer, gpus: int, layout: ModelLayout, peak_bytes: float) -> list[str]:
    """What the layout does not do yet, then more GPUs, then larger ones."""
    parallel, result = layout.parallel, []
    if layout.recompute != FULL:
        result.append("--recompute full")
    if layout.micro_batch > 1:
        result.append("--micro-batch 1")
    if parallel.fsdp == 1 and parallel.data > 1 and not parallel.zero:
        result.append("--fsdp without 1, which shares parameters and optimiser state among replicas")
    result.append(f"more GPUs than {gpus}, where parameters or activations are shared further")
    result.append(f"GPUs with {peak_bytes / GIB:.0f} GiB")
    if model.optimizer != "sgd":
        result.append("an optimiser with less state")
    return result[:3]
