"""What is said of a model of which no layout fits: by how much, and what would help."""

from __future__ import annotations

from typing import Any

from steptime._build.transformer.config import Transformer
from steptime._models.memory.fit import Fit
from steptime._plan.space import ModelLayout
from steptime._platforms.platform import Platform
from steptime._remedies import OversizedJob, sentence
from steptime._shard.configs import BuildConfig
from steptime._sim.modelled.prediction import limited, memory_of
from steptime.errors import InputError

# Keys of a config that `plan` has options for; another batch has one too.
_OPTIONS = {"recompute": "--recompute {}", "parallel.fsdp": "--fsdp {}"}


def shortage(model: Transformer, platform: Platform, limit_bytes: int, least: tuple[ModelLayout, float]) -> InputError:
    """Return an error about the layout that needs least."""
    layout, peak_bytes = least
    trained = layout.of(model)
    workload = BuildConfig(trained.to_dict())()

    def option(key: str, value: Any) -> str:
        if key == "gradient_accumulation":
            return f"--micro-batch {trained.batch // (layout.parallel.replicas * value)}"
        return _OPTIONS.get(key, "").format(value)

    job = OversizedJob(workload, platform, limited(memory_of(workload, platform), limit_bytes), option)
    # Closed forms may say more than the allocator's play does.
    fit = Fit(None, round(peak_bytes), limit_bytes) if job.fit.fits else job.fit
    return InputError(
        f"{model.title} does not fit on {layout.parallel.ranks} GPUs: the layout that needs least ({layout}) {fit.filled}, "
        f"{fit.short} are short. {sentence(job.candidates())}"
    )
