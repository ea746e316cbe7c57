"""Are calls that are measured alone what they are inside a training step? Their sums beside a recorded step, op by op.

The calls of a step were recorded with how often it makes them; each was measured alone, cold and with its input just written.
The profile of the same step says what its kernels took in it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from steptime._calibrate.ops.calls import FILE_NAME, read_calls
from steptime_lab.measurements.shipped import FOLDER, shipped

# Workload whose calls were recorded -> the full trace of the same case.
STEPS = {"bert-fp32": "bert-b8-r1.rank0.kineto.json.gz"}
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# One dispatcher op may show as another one inside it.
SHOWN_AS = {
    "aten::_scaled_dot_product_efficient_attention": "aten::_efficient_attention_forward",
    "aten::_scaled_dot_product_efficient_attention_backward": "aten::_efficient_attention_backward",
}


def alone_us(workload: str) -> dict[str, tuple[float, float]]:
    """Per op, the sum over its calls in a step: cold and producer-warm."""
    columns = ["call", "cache", "tf32", "share", "time_ns"]
    rows = [row for row in shipped("kernels").select(columns).to_pylist() if row["share"] == 1 and not row["tf32"]]
    measured: dict[str, dict[str, float]] = {}
    for row in rows:
        measured.setdefault(row["call"], {})[row["cache"]] = row["time_ns"] / 1e3
    sums: dict[str, tuple[float, float]] = {}
    for call, count in read_calls(FOLDER / FILE_NAME)[workload].items():
        found = measured.get(call.to_json())
        if found is None:
            print(f"not measured: {count} x {call.to_json()[:100]}")
            continue
        name = call.op.rpartition(".")[0]
        cold, warm = sums.get(name, (0.0, 0.0))
        only = next(iter(found.values()))
        sums[name] = (cold + count * found.get("cold", only), warm + count * found.get("warm", only))
    return sums


def in_step_us(trace: Path) -> tuple[dict[str, float], float]:
    """Per op, what its kernels take in a recorded step (mean over steps), and what no op of the recording launched."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = sum(event.get("name", "").startswith("ProfilerStep#") and event.get("cat") == "user_annotation" for event in events)
    ops = {event["args"].get("External id"): event["name"] for event in events if event.get("cat") == "cpu_op"}
    sums: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            sums[ops.get(event["args"].get("External id"), "")] += event["dur"] / steps
    unlinked = sums.pop("", 0.0)
    return dict(sums), unlinked


def main() -> None:
    for workload, trace in STEPS.items():
        alone, (step, unlinked) = alone_us(workload), in_step_us(FOLDER / "traces" / trace)
        print(f"{workload}: us per step; enqueued before the recording began, by no op in it: {unlinked:.0f}")
        print(f"{'op':52s} {'in step':>9s} {'cold':>9s} {'warm':>9s}")
        for name, (cold, warm) in sorted(alone.items(), key=lambda entry: -entry[1][0])[:20]:
            print(f"{name:52s} {step.get(SHOWN_AS.get(name, name), 0.0):9.0f} {cold:9.0f} {warm:9.0f}")
        total, cold, warm = sum(step.values()), sum(pair[0] for pair in alone.values()), sum(pair[1] for pair in alone.values())
        print(
            f"{'all ops':52s} {total:9.0f} {cold:9.0f} {warm:9.0f}   cold {cold / total - 1:+.1%}, warm {warm / total - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
