"""Everything around ops, in the order it is asked."""

from __future__ import annotations

from steptime._calibrate.host.probe import Probe
from steptime_lab.measure.host.autograd import autograd_probes
from steptime_lab.measure.host.forms import form_probes
from steptime_lab.measure.host.launches import launch_probes
from steptime_lab.measure.host.modules import module_probes
from steptime_lab.measure.host.optimizers import optimizer_probes

# Forms and optimisers of the short lists.
SHORT = ("neg", "relu", "add", "linear", "layer_norm", "softmax", "dropout", "conv2d", "embedding_bag", "take",
         "sgd_foreach", "adam_foreach", "adamw_fused", "sgd_for_loop")  # fmt: skip
THINNED = ("op_autograd", "op_no_grad", "backward_node", "accumulate_grad", "optimizer_step")


def mechanisms(*, short: bool = False) -> list[Probe]:
    """All that one rank does alone, or what of it is on the short lists."""
    every = [*launch_probes(), *module_probes(), *optimizer_probes(), *form_probes(), *autograd_probes()]
    return [probe for probe in every if not short or probe.kinds[0] not in THINNED or probe.op in SHORT]
