"""Changes that have a name and need models: TF32, bf16 autocast, another optimiser's step, another batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptime._platforms.platform import Platform
from steptime._program.program import Program, Signature
from steptime._whatif import optimizers
from steptime._whatif.apply import Cohorts, applied, selections
from steptime._whatif.autocast import Autocast
from steptime._whatif.batch import SampleDimensions
from steptime._whatif.grammar import BATCH, BF16, OPTIMIZER, ROOFLINE, TF32, Change, error
from steptime._whatif.models import Models, Rewrite, rewritten, with_op_times
from steptime._whatif.roofline import at_peak


@dataclass(frozen=True)
class Changer:
    """Makes any change; models come from a platform, or from the device that a recording names."""

    platform: Platform | None = None
    batch: int | None = None  # of all ranks together, where the workload says

    def __call__(self, change: Change, cohorts: Cohorts) -> Cohorts:
        """The cohorts with a change."""
        if change.action not in (TF32, BF16, OPTIMIZER, BATCH, ROOFLINE):
            return applied(change, cohorts)
        models = Models.of(change, [cohort.program for cohort in cohorts], self.platform)
        if change.action == OPTIMIZER:
            optimizers.check(change, cohorts)
            return tuple(optimizers.made(change, cohort, models) for cohort in cohorts)
        if change.action == ROOFLINE:
            limits = models.device.limits
            return tuple(at_peak(cohort, each.works, limits) for cohort, each in selections(change, cohorts))
        if change.action == BF16:
            made = [Autocast(cohort.program, models).made(cohort) for cohort in cohorts]
            _check_changed(change, any(changed for _, changed in made))
            return tuple(cohort for cohort, _ in made)
        return self._with_other_ops(change, cohorts, models)

    def _with_other_ops(self, change: Change, cohorts: Cohorts, models: Models) -> Cohorts:
        results, changed = [], False
        for cohort in cohorts:
            before = models.op_times(cohort.program)
            after = models.op_times(rewritten(cohort.program, self._rewrite(change, cohort.program)))
            changed = changed or bool((before.time_ns != after.time_ns).any()) or change.action == BATCH
            results.append(with_op_times(cohort, before, after.time_ns))
        _check_changed(change, changed)
        return tuple(results)

    def _rewrite(self, change: Change, program: Program) -> Rewrite:
        if change.action == TF32:
            return _tf32
        batch = SampleDimensions.of(change, program)
        return batch.rewrite(batch.factor(change, self.batch))


def _check_changed(change: Change, changed: bool) -> None:
    if not changed:
        raise error(
            change.text, "changes no op of this step: it is so already, or shapes are not recorded (record_shapes=True)"
        )


def _tf32(program: Program, row: int, signature: Signature) -> Signature:
    del program, row
    if signature.switches.tf32:
        return signature
    return replace(signature, switches=replace(signature.switches, tf32=True))
