"""Two calls that run in every batch: when they drift, the device is not what it was, and the batch is run again."""

from __future__ import annotations

from statistics import median

from steptime._models.kernels.call import Call, TensorArg

_SQUARE, _HALVES = (4096, 4096), "bfloat16"
# One for the SM clock, one for memory; large enough that launching is no part of them.
CALLS = (
    Call("aten::mm.default", (TensorArg(_SQUARE, _HALVES), TensorArg(_SQUARE, _HALVES))),
    Call("aten::copy_.default", (TensorArg((1 << 26,)), TensorArg((1 << 26,))), written=()),
)
# Drift beyond these gets a batch run again. The product follows the power that its neighbours draw; the copy does not.
_LIMITS = (0.03, 0.01)
# Batches before there is something to compare with.
_FIRST = 3


class Sentinels:
    """Compares each batch's sentinels with the medians of all batches so far."""

    def __init__(self) -> None:
        self.repeated = 0
        self.worst = [0.0] * len(CALLS)
        self._times: list[list[float]] = [[] for _ in CALLS]

    def drifted(self, times_ns: list[list[float]]) -> bool:
        """Whether a batch with these times of its sentinels (one list per call) was measured on a device that had changed."""
        far = False
        for index, (item, limit) in enumerate(zip(times_ns, _LIMITS, strict=True)):
            if not item:
                continue
            known, now = self._times[index], median(item)
            if len(known) >= _FIRST:
                drift = now / median(known) - 1
                self.worst[index] = max(self.worst[index], drift, key=abs)
                far = far or abs(drift) > limit
            known.append(now)
        return far

    def said(self) -> str:
        """One line for the end of a run; empty where nothing was compared."""
        if not any(self.worst):
            return ""
        product, copy = (f"{100 * worst:+.1f} %" for worst in self.worst)
        return f"sentinels: product at most {product} off, copy {copy}; {self.repeated} batches run again"
