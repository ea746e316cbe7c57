"""Several mixtures of one group together: their mean, and trees that have learned what mixtures get wrong about rows unseen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from steptime._models.engine.stored import stored
from steptime._models.engine.trees import Trees
from steptime._models.kernels.forms.matmul.features import Floats, ProductInputs
from steptime._models.kernels.forms.matmul.mixture import MOST_CORRECTION, KernelMixture, Mixed
from steptime._models.kernels.forms.matmul.product import Column

FOLDS = 5
# The networks of a group: each has not seen one fifth of the rows but the last, which has seen all and answers alone when asked
# for very many.
NETWORKS = (*(f"fold{place}" for place in range(FOLDS)), "whole")


def tree_features(inputs: ProductInputs, mixed: Mixed) -> Column:
    """What the trees read: all that the mixture's networks do, what they predict, and how they score what is launched."""
    return np.concatenate([inputs.choice, inputs.waves, mixed.log_ns[None], mixed.launched]).T


@dataclass(frozen=True)
class FittedGroup:
    """What is fitted of one group."""

    sizes_low: Column
    sizes_high: Column
    trees: Trees
    networks: dict[str, dict[str, Floats]] = field(metadata=stored(prefix="", names=NETWORKS))


class Ensemble:
    """One group's mixtures, on a GPU of so many SMs."""

    def __init__(self, group: int, fitted: FittedGroup, sms: float) -> None:
        self._members = [KernelMixture(group, fitted.networks[name]) for name in NETWORKS]
        self._trees, self._sms = fitted.trees, sms
        self.sizes_low, self.sizes_high = fitted.sizes_low[:, None], fitted.sizes_high[:, None]

    def ask(self, inputs: ProductInputs) -> Mixed:
        """The best answer: all networks, and on a whole GPU the trees, which have seen no shares of one."""
        answers = [member.ask(inputs) for member in self._members]
        log_ns, launched = (np.mean([getattr(answer, name) for answer in answers], axis=0) for name in ("log_ns", "launched"))
        whole = inputs.sms == self._sms
        if inputs.sms.size > 1 and not whole.any():
            return Mixed(log_ns, launched)
        learned = self._trees.values(tree_features(inputs, Mixed(log_ns, launched)))
        return Mixed(log_ns + np.where(whole, np.clip(learned, -MOST_CORRECTION, MOST_CORRECTION), 0.0), launched)

    def quick(self, inputs: ProductInputs) -> Mixed:
        """The answer of the network that has seen all rows."""
        return self._members[-1].ask(inputs)
