"""Several mixtures of one group together: their mean, and trees that have learned what mixtures get wrong about rows unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.features import SMS, Inputs
from steptime._models.kernels.forms.matmul.mixture import MOST_CORRECTION, Mixed, Mixture
from steptime._models.kernels.forms.matmul.product import Column
from steptime._models.kernels.forms.trees import Trees

FOLDS = 5
# The networks of a group: each has not seen one fifth of the rows but the last, which has seen all and answers alone when asked
# for very many.
NETWORKS = (*(f"fold{place}" for place in range(FOLDS)), "whole")
# Chosen on validation rows.
TREES: dict[str, Any] = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.4,
}


def _own(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def tree_features(inputs: Inputs, mixed: Mixed) -> Column:
    """What the trees read: all that the mixture's networks do, what they predict, and how they score what is launched."""
    return np.concatenate([inputs.choice, inputs.waves, mixed.log_ns[None], mixed.launched]).T


class Ensemble:
    """One group's mixtures."""

    def __init__(self, group: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._members = [Mixture(group, _own(arrays, f"{name}.")) for name in NETWORKS]
        self._trees = Trees.load(_own(arrays, "trees."))
        self.sizes_low, self.sizes_high = arrays["sizes_low"][:, None], arrays["sizes_high"][:, None]

    def ask(self, inputs: Inputs) -> Mixed:
        """The best answer: all networks, and on a whole GPU the trees, which have seen no parts."""
        asked = [member.ask(inputs) for member in self._members]
        mean = Mixed(np.mean([one.log_ns for one in asked], axis=0), np.mean([one.launched for one in asked], axis=0))
        if inputs.sms.size > 1 and (inputs.sms != SMS).all():
            return mean
        learned = np.clip(self._trees.values(tree_features(inputs, mean)), -MOST_CORRECTION, MOST_CORRECTION)
        return Mixed(mean.log_ns + np.where(inputs.sms == SMS, learned, 0.0), mean.launched)

    def quick(self, inputs: Inputs) -> Mixed:
        """The answer of the network that has seen all rows."""
        return self._members[-1].ask(inputs)
