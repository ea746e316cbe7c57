"""Fitting one group's mixture with torch: the same formulas as `mixture`, with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul import PATTERNS
from steptime._models.kernels.forms.matmul.mixture import LEAST_K_PER_SPLIT, MOST_CORRECTION, Floats, ProductInputs
from steptime._models.kernels.forms.matmul.products import HALF_16, TILES, VECTOR, Column
from steptime_lab.fit.engine import fitting_library

# Sizes of the two networks and how they are trained: chosen on validation rows.
HIDDEN, CORRECTION = 32, 64
LEARNING_RATE, CORRECTION_RATE = 0.01, 0.003
CORRECTION_DECAY = 0.01
GENTLE = 0.3  # of those rates, for a network that is trained on
PULL = 1e-4  # how strongly parameters are held to where they start
HUBER = 0.05  # of ln(time): errors above count by their size, as in the mean of |e|
_CORRECTIONS = ("first", "second", "last")  # layers of the network that corrects
CHOSEN_WEIGHT, KERNEL_WEIGHT, LAUNCHED_WEIGHT = 0.02, 0.1, 0.02


@dataclass(frozen=True)
class UsualRates:
    """Where a fit starts: what memory, cache and each kind of kernel reach on the whole GPU, in the largest measured rows."""

    sms: float
    memory_bytes_per_ns: float
    cache_bytes_per_ns: float
    half_cache_bytes_per_ns: float
    copied_bytes_per_ns: float
    ffma_flop_per_s: float
    simt_flop_per_s: float
    large_k_flop_per_s: float
    small_n_flop_per_s: float
    other_flop_per_s: float
    gemv_flop_per_s: float
    tensor80_flop_per_s: float
    tensor75_flop_per_s: float
    sm90_flop_per_s: float
    xmma_tf32_flop_per_s: float
    wmma_flop_per_s: float
    nvjet_flop_per_s: float

    def flop_per_s(self, kind: str) -> float:
        """Of a kind of kernel."""
        rate: float = getattr(self, f"{kind}_flop_per_s")
        return rate


@dataclass(frozen=True)
class Schedule:
    """How long networks are trained, with how many rows at once, how long one is trained on, and how many trees follow."""

    epochs: int = 55
    batch: int = 128
    further: int = 30  # epochs on all rows of a network that has seen four fifths of them
    trees: int = 300


@dataclass(frozen=True)
class Targets:
    """What a group's rows measured: ln(ns) without copies, which candidate ran and what was launched (-1: not known)."""

    log_ns: Floats
    candidate: Column
    pattern: Column

    def take(self, places: Column) -> Targets:
        """Some of them."""
        return Targets(self.log_ns[places], self.candidate[places], self.pattern[places])


def starts(group: int, inputs: ProductInputs, seed: int, usual: UsualRates) -> dict[str, Floats]:
    """Where a fit starts: kernels at their kind's usual rate, no preference among them."""
    rng = np.random.default_rng(seed)
    tiles = TILES[group]
    along_n, along_m = (np.array([getattr(tile, name) for tile in tiles], dtype=float) for name in ("along_n", "along_m"))
    harmonic = along_n * along_m / (along_n + along_m)
    per_sm = np.array([usual.flop_per_s(tile.kind) for tile in tiles]) / usual.sms / 1e9
    # Small tiles read more for each product they make; tensor cores feel it more. Offsets fitted on the first rows.
    efficiency = harmonic / (harmonic + np.where(per_sm > 1e3, 20.0, 6.0))
    count, features = len(tiles), len(inputs.choice)
    result: dict[str, npt.NDArray[Any]] = {
        "rate": np.log(2 * along_n * along_m / (per_sm * efficiency)),
        "rate_layout": np.zeros((count, 4)),
        "latency": np.full(count, 0.4),
        "overhead": np.full(count, np.log(500.0)),
        "rounding": np.zeros(count),
        "start": np.full(count, np.log(1900.0)),
        "reduce": np.array([np.log(1500.0)]),
        "memory": np.array([np.log(usual.memory_bytes_per_ns)]),
        "cache": np.array([np.log(usual.half_cache_bytes_per_ns if group == HALF_16 else usual.cache_bytes_per_ns)]),
        "sharpness": np.array([1.3]),
        "hot": np.array([-1.0]),
        "flags": np.zeros(len(inputs.flags)),
        "choice_bias": np.concatenate([np.zeros(count), np.full(count, -1.0)]),
        "choice_linear": np.zeros((2 * count, features)),
        "hidden": rng.normal(0, 0.3, (HIDDEN, features)),
        "hidden_bias": rng.normal(0, 0.3, HIDDEN),
        "choice_hidden": np.zeros((2 * count, HIDDEN)),
    }
    width = features + len(inputs.waves) + 2
    for layer, (rows, columns) in (("first", (CORRECTION, width)), ("second", (CORRECTION, CORRECTION))):
        bound = columns**-0.5
        result[f"{layer}_weight"] = rng.uniform(-bound, bound, (rows, columns))
        result[f"{layer}_bias"] = rng.uniform(-bound, bound, rows)
    bound = 0.1 * CORRECTION**-0.5
    result["last_weight"] = rng.uniform(-bound, bound, (1 + len(PATTERNS), CORRECTION))
    result["last_bias"] = np.zeros(1 + len(PATTERNS))
    return {name: np.asarray(values, dtype=np.float32) for name, values in result.items()}


def ranges(inputs: ProductInputs, log_ns: Floats) -> dict[str, Floats]:
    """Where the fitted rows lie: beyond it the networks are held."""
    result = {
        "choice_low": inputs.choice.min(axis=1),
        "choice_high": inputs.choice.max(axis=1),
        "waves_low": inputs.waves.min(axis=1),
        "waves_high": inputs.waves.max(axis=1),
        "mean_low": log_ns.min(keepdims=True),
        "mean_high": log_ns.max(keepdims=True),
    }
    return {name: np.asarray(values, dtype=np.float32) for name, values in result.items()}


def _tensors(torch: Any, inputs: ProductInputs) -> dict[str, Any]:
    """Inputs with one product per row."""
    result = {
        name: torch.tensor(np.asarray(getattr(inputs, name), dtype=np.float32))[:, None]
        for name in ("m", "n", "k", "batch", "element_bytes", "cold_bytes", "hot_bytes")
    }
    result["sms"] = torch.tensor(np.broadcast_to(inputs.sms, len(inputs)).copy())[:, None]
    result |= {name: torch.tensor(np.ascontiguousarray(getattr(inputs, name).T)) for name in ("choice", "flags", "waves")}
    return result | {"layout": torch.tensor(np.asarray(inputs.layout, dtype=np.int64))}


def _times(torch: Any, own: dict[str, Any], rows: dict[str, Any], along_n: Any, along_m: Any) -> Any:
    """ns of every candidate: `KernelMixture._times`, products along the first axis."""
    m, n, k, batch, size, sms = (rows[name] for name in ("m", "n", "k", "batch", "element_bytes", "sms"))
    tiles = torch.ceil(n / along_n) * torch.ceil(m / along_m) * batch
    rate = torch.exp(own["rate"][None] + own["rate_layout"].T[rows["layout"]])
    latency, overhead, rounding = torch.exp(own["latency"]), torch.exp(own["overhead"]), torch.sigmoid(own["rounding"])
    cache = torch.exp(own["cache"])
    memory = (rows["cold_bytes"] + rows["hot_bytes"] * torch.sigmoid(own["hot"])) / torch.exp(own["memory"])
    memory = memory.square().square()
    read = tiles * k * (torch.minimum(along_n, n) + torch.minimum(along_m, m)) * size
    result = m * n * batch

    def one(split: Any, inner: Any) -> Any:
        waves = tiles * split / sms
        rounded = waves + rounding * (torch.ceil(waves) - waves)
        compute = torch.maximum(inner * rate * latency + overhead, rounded * (inner * rate + overhead * 0.5))
        cached = (read + result * size * split) / cache
        return torch.exp(own["start"]) + torch.sqrt(torch.sqrt(compute.square().square() + memory + cached.square().square()))

    split = torch.minimum(torch.floor(sms / tiles), torch.floor(k / LEAST_K_PER_SPLIT)).clamp(min=2.0)
    parts = one(split, k / split) + torch.exp(own["reduce"]) + result * split * 8 / cache
    return torch.cat([one(1.0, k), parts], 1)


def _forward(torch: Any, own: dict[str, Any], rows: dict[str, Any], along_n: Any, along_m: Any) -> tuple[Any, Any, Any, Any]:
    """ln(ns), ln of the choice, ln(ns) of every candidate, scores of what is launched."""
    logs = torch.log(_times(torch, own, rows, along_n, along_m))
    read = rows["choice"]
    hidden = torch.tanh(read @ own["hidden"].T + own["hidden_bias"])
    score = read @ own["choice_linear"].T + hidden @ own["choice_hidden"].T + own["choice_bias"]
    log_choice = torch.log_softmax(score - torch.exp(own["sharpness"]) * logs, 1)
    choice = torch.exp(log_choice)
    mean = (choice * logs).sum(1, keepdim=True)
    spread = (choice * (logs - mean).square()).sum(1, keepdim=True).sqrt()
    flags = (rows["flags"] * own["flags"]).sum(1, keepdim=True)
    # The correction reads the mixture without steering it.
    read = torch.cat([read, rows["waves"], (mean.detach() - 9) / 3, spread.detach()], 1)
    for layer in ("first", "second"):
        read = torch.relu(read @ own[f"{layer}_weight"].T + own[f"{layer}_bias"])
    out = read @ own["last_weight"].T + own["last_bias"]
    total = mean[:, 0] + flags[:, 0] + MOST_CORRECTION * torch.tanh(out[:, 0])
    return total, log_choice, logs + flags, out[:, 1:]


def _batches(count: int, epochs: int, size: int, seed: int) -> Iterator[Column]:
    rng = np.random.default_rng(seed)
    many = max(1, count // size)
    for _ in range(epochs):
        order = rng.permutation(count)
        for start in range(many):
            yield order[start::many]


def _pacing(torch: Any, own: Mapping[str, Any], physical: list[str], steps: int, gentle: float) -> tuple[Any, Any]:
    """An optimizer whose rates rise and fall once."""
    corrections = [value for name, value in own.items() if name not in physical]
    optimizer = torch.optim.AdamW(
        [
            {"params": [own[name] for name in physical], "weight_decay": 0.0},
            {"params": corrections, "weight_decay": CORRECTION_DECAY},
        ],
        fused=True,
    )
    rates = [gentle * LEARNING_RATE, gentle * CORRECTION_RATE]
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.25)


def train(
    group: int,
    inputs: ProductInputs,
    targets: Targets,
    seed: int,
    schedule: Schedule,
    usual: UsualRates,
    network: Mapping[str, Floats] | None = None,
) -> dict[str, Floats]:
    """The fitted networks of one group; given a network, it is trained on, more gently."""
    torch = fitting_library("torch")
    torch.set_num_threads(1)
    first = starts(group, inputs, seed, usual)
    epochs, gentle = (schedule.epochs, 1.0) if network is None else (schedule.further, GENTLE)
    own = {name: torch.tensor((network or first)[name], requires_grad=True) for name in first}
    anchors = {name: torch.tensor(values) for name, values in first.items()}
    physical = [name for name in own if name.split("_")[0] not in _CORRECTIONS]
    optimizer, pace = _pacing(torch, own, physical, epochs * max(1, len(inputs) // schedule.batch), gentle)
    along = [torch.tensor([float(getattr(tile, name)) for tile in TILES[group]]) for name in ("along_n", "along_m")]
    rows = _tensors(torch, inputs)
    measured = torch.tensor(np.asarray(targets.log_ns, dtype=np.float32))
    # Names of kernels that multiply by a vector say no tile.
    ran = torch.tensor(targets.candidate if group != VECTOR else np.full(len(inputs), -1))
    launched = torch.tensor(targets.pattern)
    for index in map(torch.tensor, _batches(len(inputs), epochs, schedule.batch, seed)):
        result = _forward(torch, own, {name: column[index] for name, column in rows.items()}, *along)
        loss = _loss(torch, result, measured[index], ran[index], launched[index])
        optimizer.zero_grad()
        loss.backward()
        for name in physical:  # towards where they start
            own[name].grad.add_(own[name].detach() - anchors[name], alpha=2 * PULL * (5 if name == "rate_layout" else 1))
        torch.nn.utils.clip_grad_norm_(own.values(), 5.0)
        optimizer.step()
        pace.step()
    fitted: dict[str, Floats] = {name: value.detach().numpy().copy() for name, value in own.items()}
    return fitted | ranges(inputs, targets.log_ns)


def _loss(torch: Any, found: tuple[Any, Any, Any, Any], measured: Any, ran: Any, launched: Any) -> Any:
    total, log_choice, logs, scores = found

    def huber(error: Any) -> Any:
        return torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=HUBER) / HUBER

    loss = huber(total - measured)
    named = ran >= 0
    if named.any():
        loss = loss + KERNEL_WEIGHT * huber(logs[named, ran[named]] - measured[named])
        loss = loss + CHOSEN_WEIGHT * torch.nn.functional.nll_loss(log_choice[named].clamp(min=-14.0), ran[named])
    listed = launched >= 0
    if listed.any():
        loss = loss + LAUNCHED_WEIGHT * torch.nn.functional.cross_entropy(scores[listed], launched[listed])
    return loss
