"""Changes that have a name and need models: TF32, bf16 autocast, another optimiser's step, another batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from steptime._platforms.platform import Platform
from steptime._program.program import Program, Signature
from steptime._sim.core.timing import Cohort
from steptime._whatif import optimizers
from steptime._whatif.apply import Cohorts, applied, selections
from steptime._whatif.autocast import Autocast
from steptime._whatif.batch import SampleDimensions
from steptime._whatif.draws import has_draws, with_draws
from steptime._whatif.grammar import BATCH, BF16, COMPILE, OPTIMIZER, ROOFLINE, SET, TF32, Change, error, samples_after
from steptime._whatif.models import Models, rewritten, with_op_times
from steptime._whatif.roofline import at_peak

# Share of the time of matrix products that a batch must have to do with.
_MOST = 0.5


@dataclass(frozen=True)
class Changer:
    """Makes any change; models come from a platform, or from the device that a recording names."""

    platform: Platform | None = None
    batch: int | None = None  # of all ranks together, where the workload says
    rebuilt: Callable[[int], Cohorts] | None = None  # the job with another batch; None: only its times can be changed
    compiled: Callable[[], Cohorts] | None = None  # the job compiled; None: it cannot be, or is
    error: float = 0.0  # of the logarithm of pieces of what is built again

    def __call__(self, change: Change, cohorts: Cohorts) -> Cohorts:
        """The cohorts with a change."""
        if change.action not in (TF32, BF16, OPTIMIZER, BATCH, ROOFLINE, COMPILE):
            return applied(change, cohorts)
        if change.action == COMPILE:
            if self.compiled is None:
                raise error(change.text, "goes with --platform, and with a step that is not compiled already")
            return self._drawn(cohorts, self.compiled())
        if change.action == BATCH and self.rebuilt is not None:
            return self._drawn(cohorts, self.rebuilt(samples_after(change, self.batch or 1)))
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
        if change.action == BATCH:
            return tuple(self._with_batch(change, cohort, models) for cohort in cohorts)
        return _with_tf32(change, cohorts, models)

    def _with_batch(self, change: Change, cohort: Cohort, models: Models) -> Cohort:
        program = cohort.program
        samples = SampleDimensions.of(change, program)
        factor = samples.factor(change, self.batch)
        changed = rewritten(program, samples.rewrite(factor))
        before, after = (models.op_times(each) for each in (program, changed))
        untouched = samples.untouched(program, changed, before.time_ns)
        if factor != 1.0 and not before.time_ns[changed.ops.signature != program.ops.signature].any():
            why = "ops do not say their shapes (a CUDA graph, or recorded without record_shapes=True): the batch is not known"
            raise error(change.text, f"{why}; predict a config or the training script with the other batch instead")
        if factor != 1.0 and untouched > _MOST:
            raise error(
                change.text,
                f"{samples.size:,} seems to be the batch of a rank, but the shapes of {100 * untouched:.0f} % of the matrix "
                "products do not follow it; predict a config or the training script with the other batch instead",
            )
        return samples.beside_kernels(with_op_times(cohort, before, after.time_ns), factor)

    def notes(self, changes: Sequence[Change], cohorts: Cohorts) -> Iterator[str]:
        """What was taken for the batch where it is found from shapes, and of how many ranks it is."""
        for change in changes:
            if change.action != BATCH or self.rebuilt is not None:
                continue
            samples, ranks = SampleDimensions.of(change, cohorts[0].program), sum(len(each.ranks) for each in cohorts)
            factor = samples.factor(change, self.batch)
            text = (
                f"{change.text}: the shapes say that a rank has {samples.size:,} samples, {factor * samples.size:,.0f} after it"
            )
            if change.choice == SET and ranks > 1:
                text += "; N is the batch of all ranks" if self.batch else f"; N is the batch of one rank, not of all {ranks}"
            yield text + "; if that is not the batch, do not use this answer"

    def _drawn(self, before: Cohorts, after: Cohorts) -> Cohorts:
        """What was built again, with draws where these have some."""
        return tuple(with_draws(each, self.error) for each in after) if has_draws(before[0]) else after


def _with_tf32(change: Change, cohorts: Cohorts, models: Models) -> Cohorts:
    results, changed = [], False
    for cohort in cohorts:
        before, after = (models.op_times(each) for each in (cohort.program, rewritten(cohort.program, _tf32)))
        changed = changed or bool((before.time_ns != after.time_ns).any())
        results.append(with_op_times(cohort, before, after.time_ns))
    _check_changed(change, changed)
    return tuple(results)


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
