"""Fits the weights of some kernels anew, where the rules that launch them have changed, and leaves all else as it is.

    python scripts/refit_kernels.py out/h200.npz cunn_SoftMaxForward tensor_kernel_scan_outer_dim

Weights of a kernel depend on its own rows alone; trees and scales of shares of a GPU stay until the next `steptime fit`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from steptime._hardware.device import FOLDER, reference_device
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms.launched import LaunchedForm
from steptime_lab.fit.kernels import launched
from steptime_lab.fit.kernels.fitting import fit_kernels, with_forms
from steptime_lab.measurements.shipped import shipped


def main(file: Path, kernels: list[str]) -> None:
    """Writes the shipped models with these kernels' weights fitted to the shipped rows."""
    limits = reference_device()
    models = KernelModels.load(FOLDER / f"{limits.name}.npz")
    form = models.forms["launched"]
    assert isinstance(form, LaunchedForm) and form.shared is not None
    shared = form.shared

    def fit(rows, _seed, _limits):  # type: ignore[no-untyped-def]
        whole = [row for row in rows if row.question.share == 1]
        parts = launched.with_kernels(shared, rows, kernels)
        return replace(form, whole=launched.with_kernels(form.whole, whole, kernels), shared=parts)

    launched.fit = fit
    with_forms(models, fit_kernels(shipped("kernels"), limits, forms=["launched"])).save(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
