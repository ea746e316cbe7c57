"""Other forms of kernel models, fitted to the same rows: what the models are compared with."""

from __future__ import annotations

from steptime._models.engine.archive import Archive, StoredParts
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.forms import KernelForm
from steptime_lab.baselines.kernels import published, roofline

BASELINES = {"roofline": roofline, "published": published}


def load_baselines(archive: Archive) -> dict[str, KernelForm]:
    """The baselines of a file, by name."""

    def load(name: str, arrays: Arrays) -> KernelForm:
        form: KernelForm = BASELINES[name].load(arrays)
        return form

    return dict(StoredParts(archive, {name: name for name in sorted(archive.parts)}, load))
