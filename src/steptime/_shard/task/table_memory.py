"""What tables hold in the memory of the ranks they are on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm

_FLOAT_BYTES = 4


def table_bytes(model: Dlrm) -> npt.NDArray[np.float64]:
    """Weights and optimiser state of every table, [tables]; rowwise Adagrad keeps a number a row."""
    state = _FLOAT_BYTES if model.optimizer == "rowwise_adagrad" else 0
    return np.array([table.nbytes + state * table.rows for table in model.tables], dtype=np.float64)
