"""Device time of training steps on an adopted platform: predicted from its folder, then profiled on the GPU it was adopted on.

`python benchmarks/h200/adopted_steps.py predict DIR FILE` captures twelve steps without a GPU and predicts each on the platform
in DIR (`steptime adopt NAME -o DIR`); `... measure FILE` profiles them on a GPU; `... compare PREDICTED MEASURED` puts the two
side by side. An adoption measures no call of theirs on purpose. Their batches are large, so that the device decides.
`... rows DIR` stands in for the ten minutes: the shipped rows that they would give. DIR needs the `driver.json` of such a GPU.
`... known DIR` predicts the steps that were measured before and are committed (`large_steps.py`, `unseen_steps.py`).
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import host_bound_scripts as scripts
import unseen_steps as unseen

WARM_UP, PROFILED = 6, 3
STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "encoder_decoder": partial(unseen.encoder_decoder, 64),
    "decoder_bf16": partial(unseen.decoder_bf16, 8),
    "gated_decoder_fp32": partial(unseen.gated_decoder_fp32, 8),
    "vision_transformer": partial(unseen.vision_transformer, 128),
    "wide_network": partial(unseen.wide_network, 8192),
    "deep_mlp": partial(scripts.deep_mlp, 65_536),
    "residual_net": partial(scripts.residual_net, 512),
    "small_decoder": partial(scripts.small_decoder, 512),
    "autocast_decoder": partial(scripts.autocast_decoder, 2048),
    "separable_net": partial(scripts.separable_net, 2048),
    "adapters": partial(scripts.adapters, 16_384),
    "denoiser": partial(scripts.denoiser, 1024),
}


def rows(folder: str) -> None:
    """What ten minutes of adopting would have: shipped rows, a call for every call that is asked or another of its family."""
    import pyarrow.compute as pc

    from steptime._measurements.store import write_part
    from steptime_lab.measure.kernels.cases import FILE_NAME, whole_gpu_cases
    from steptime_lab.measurements.shipped import FOLDER, shipped

    def write(name: str, table: Any) -> None:
        file = Path(folder) / "measurements" / name / "20261115T000000-aaaa-p1-0000.parquet"
        write_part(file, table.unify_dictionaries().combine_chunks())

    table = shipped("kernels")
    table = table.filter(pc.and_(pc.equal(table["share"], 1), pc.invert(table["benchmark"])))
    families, sources = table["family"].to_pylist(), table["source"].to_pylist()
    places: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, asked in enumerate(zip(table["call"].to_pylist(), table["tf32"].to_pylist(), strict=True)):
        places[asked].append(index)
    cases = whole_gpu_cases(FOLDER / FILE_NAME, (), 0, small=False)
    spare: dict[str, list[list[int]]] = defaultdict(list)
    for each in sorted(set(places) - {(case.text, case.tf32) for case in cases}):
        if sources[places[each][0]] == "sweep":
            spare[families[places[each][0]]].append(places[each])
    for each in spare.values():
        random.Random(0).shuffle(each)
    chosen = [places.get((case.text, case.tf32)) or (spare[case.family] and spare[case.family].pop()) or [] for case in cases]
    write("kernels", table.take(sorted(index for item in chosen for index in item[:2])))
    for name, run in {"lookups": "20261115T065645-eaef", "host": "20261115T085050-6014"}.items():
        other = shipped(name)
        write(name, other.filter(pc.and_(pc.equal(other["run"], run), pc.equal(other["share"], 1))))
    write("power", shipped("power"))
    shutil.copyfile(FOLDER / "lookup_streams.parquet", Path(folder) / "measurements" / "lookup_streams.parquet")


def predict(platform: str, file: str) -> None:
    from steptime._capture.capture import capture
    from steptime._platforms.platform import Platform
    from steptime._program.workload import Workload
    from steptime._sim.modelled.prediction import predict_on

    machine, found = Platform.load(platform, ranks=1), {}
    for name, function in STEPS.items():
        said = predict_on(Workload((capture(function, name=name),), 1, name), machine)
        busy = said.ranks[0].device_busy_ms
        found[name] = {
            "device_ms": round(busy, 4),
            # Of the step, which the device bounds.
            "interval_ms": [round(busy * end / said.step_time_ms, 4) for end in said.interval_ms],
            "device_bound": round(busy / said.step_time_ms, 3),
            "fitted": round(said.coverage.get("fitted", 0.0), 4),
        }
        print(name, found[name], flush=True)
    Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(file: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, Any] = {"recipe": {"torch": torch.__version__, "device": torch.cuda.get_device_name()}}
    for name, function in STEPS.items():
        torch.cuda.empty_cache()
        step, times = function(), []
        for _ in range(WARM_UP):
            step()
        for _ in range(PROFILED):
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                step()
                torch.cuda.synchronize()
            times.append(sum(event.device_time_total for event in recorded.events() if _on_device(event)) / 1e3)
        found[name] = {"device_ms": times}
        print(name, statistics.median(times), flush=True)
        Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        del step


def _on_device(event: Any) -> bool:
    import torch

    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


def known(platform: str) -> None:
    """Whole steps that were measured and committed: large ones, of which the host bounds two, and those of `unseen_steps`."""
    import large_steps

    import steptime
    from steptime_lab.validate.held_out import DATA

    files = ("large_measured", "large_measured_again", "unseen_measured")
    large, again, other = (json.loads((DATA / "committed" / f"{file}.json").read_text(encoding="utf-8")) for file in files)
    measured = {name: case["step_ms"] for name, case in {**large["cases"], **again["cases"]}.items()}
    compared = [(name, build, measured[name]) for name, build in large_steps.CASES.items() if name in measured]
    compared += [(name, build, statistics.median(other[name]["step_ms"])) for name, build in unseen.STEPS.items()]
    rows = []
    for name, build, actual in compared:
        said = steptime.predict(steptime.capture(build), platform)
        rows.append((name, actual, said.step_time_ms, said.interval_ms))
        bound = said.ranks[0].device_busy_ms / said.step_time_ms
        print(f"{name:24s} device {bound:4.0%} of it", flush=True)
    _print(rows)


def compare(predicted: str, measured: str) -> None:
    said, seen = (json.loads(Path(file).read_text(encoding="utf-8")) for file in (predicted, measured))
    times = {name: statistics.median(seen[name]["device_ms"]) for name in STEPS}
    _print([(name, times[name], said[name]["device_ms"], said[name]["interval_ms"]) for name in STEPS])


def _print(rows: Sequence[tuple[str, float, float, Sequence[float]]]) -> None:
    import numpy as np

    errors, inside = [], 0
    for name, actual, said, (low, high) in rows:
        errors.append(said / actual - 1)
        inside += low <= actual <= high
        print(f"{name:24s} {actual:9.3f} ms, predicted {said:9.3f} ({low:.3f} to {high:.3f}) {errors[-1]:+7.1%}")
    off = np.abs(errors)
    gmae = np.exp(np.mean(np.log(off + 4e-4)))
    print(f"GMAE {gmae:.2%}, mean {off.mean():.2%}, worst {off.max():.1%}, inside {inside} of {len(off)}")


if __name__ == "__main__":
    {"rows": rows, "known": known, "predict": predict, "measure": measure, "compare": compare}[sys.argv[1]](*sys.argv[2:])
