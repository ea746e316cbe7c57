"""Everything around ops, in the order it is asked."""

from __future__ import annotations

from steptime.measure.host.autograd import autograd_probes
from steptime.measure.host.data_parallel import together_probes
from steptime.measure.host.forms import form_probes
from steptime.measure.host.launches import launch_probes
from steptime.measure.host.lookups import lookup_probes
from steptime.measure.host.modules import module_probes
from steptime.measure.host.optimizers import optimizer_probes
from steptime.measure.host.probe import Probe

# Forms and optimisers of the short lists.
SHORT = ("neg", "relu", "add", "linear", "layer_norm", "softmax", "dropout", "conv2d", "embedding_bag", "take",
         "sgd_foreach", "adam_foreach", "adamw_fused", "sgd_for_loop")  # fmt: skip
THINNED = ("op_autograd", "op_no_grad", "backward_node", "accumulate_grad", "optimizer_step")


def mechanisms(*, short: bool = False) -> list[Probe]:
    """All of them, or those of a short list. What all ranks do together comes last: it may hang where one rank failed."""
    every = [
        *launch_probes(), *module_probes(), *optimizer_probes(), *form_probes(), *autograd_probes(), *lookup_probes(),
        *together_probes(),
    ]  # fmt: skip
    return [probe for probe in every if not short or probe.kinds[0] not in THINNED or probe.op in SHORT]
