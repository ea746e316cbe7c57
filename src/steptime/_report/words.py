"""What answers say in words, once for text and for pages: numbers with their units, what was asked, what to doubt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from steptime._models.power.card import StepPower
from steptime._report.cost import cost_of
from steptime._sim.explain.bound import family_words
from steptime._sim.explain.critical_path import PathSummary
from steptime._sim.prediction import Iterations, PredictedStep

OUT_OF_RANGE = "out_of_range"
# From here on a step time is said in seconds.
MANY_MS = 10_000.0
INTERVAL, RECORDED_RANGE = "90 % interval", "range with the recorded steps"
_WORTH_SAYING = 0.005
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")

# --- numbers ---------------------------------------------------------------------------------------------------------------


def time_ms(value: float) -> str:
    """Milliseconds with as many digits as matter."""
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def between_ms(low: float, high: float, between: str = " to ") -> str:
    """A range of milliseconds."""
    return time_ms(low) if low == high else f"{time_ms(low)}{between}{time_ms(high)}"


def signed_percent(share: float) -> str:
    """An error with its sign, zero without."""
    text = f"{100 * share:+.2f} %"
    return "0.00 %" if text[1:] == "0.00 %" else text


def percent(share: float) -> str:
    """A share to the percent, as in the sentences of the explanation."""
    return f"{100 * share:.0f} %"


def quantity(value: float) -> str:
    """A count with three digits and the prefix that fits."""
    size, index = float(value), 0
    while size >= 999.5 and index < len(_PREFIXES) - 1:
        size, index = size / 1000, index + 1
    return f"{size:.3g} {_PREFIXES[index]}" if index else f"{size:.3g}"


def with_unit(value: float, unit: str) -> str:
    """A quantity in the multiple of its unit that fits."""
    number, _, prefix = quantity(value).partition(" ")
    return f"{number} {prefix}{unit}"


def step_words(step_ms: float) -> str:
    """A step time as people say it: milliseconds, or seconds where it is many."""
    return " ".join(in_unit(step_ms))


def in_unit(*times_ms: float) -> tuple[str, ...]:
    """Times in the unit that fits the largest, and the unit."""
    if max(times_ms) < MANY_MS:
        return (*map(time_ms, times_ms), "ms")
    return (*(f"{value / 1e3:,.0f}" if value >= 1e6 else f"{value / 1e3:.2f}" for value in times_ms), "s")


def rate(value: float) -> str:
    """So many per second, with as many digits as matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- a step ----------------------------------------------------------------------------------------------------------------


def interval_words(low_ms: float, high_ms: float) -> str:
    """The range that nine of ten measured steps are expected in."""
    low, high, unit = in_unit(low_ms, high_ms)
    return f"{INTERVAL} {low}-{high} {unit}"


NO_INTERVAL = "no interval is claimed"


def span_words(prediction: PredictedStep) -> str:
    """What the range beside a step time is, and from where to where."""
    if prediction.workload.cut_off:
        return NO_INTERVAL
    if prediction.platform is not None or not prediction.profiled:
        return interval_words(*prediction.interval_ms)
    return f"{RECORDED_RANGE} {between_ms(*prediction.interval_ms, '-')} ms"


class Fact(NamedTuple):
    """A name and a value, and both in a few words."""

    name: str
    value: str
    words: str


def asked_facts(prediction: PredictedStep) -> Iterator[Fact]:
    """What the step is of, as far as that is known."""
    known = prediction.workload.description
    if known.batch is not None:
        yield Fact("Batch", f"{known.batch:,}", f"batch {known.batch:,}")
    if known.sequence is not None:
        yield Fact("Sequence", f"{known.sequence:,}", f"sequence {known.sequence:,}")
    if prediction.precision is not None:
        yield Fact("Precision", prediction.precision, prediction.precision)
    if known.numerics is not None:
        yield Fact("Numerics", numerics_words(known.numerics), "")
    if known.parallelism:
        ways = ", ".join(f"{kind} {count}" for kind, count in known.parallelism.items())
        yield Fact("Parallelism", ways, ways)
    if known.parameters is not None:
        yield Fact("Parameters", quantity(known.parameters), f"{quantity(known.parameters)} parameters")
    if known.active_parameters not in (None, known.parameters):
        active = quantity(known.active_parameters or 0)
        yield Fact("Active parameters", active, f"{active} of them active")


def numerics_words(numerics: Mapping[str, str]) -> str:
    """What is in which precision, as `bf16 products, parameters; fp32 master weights, optimizer states`."""
    kinds: dict[str, list[str]] = {}
    for kind, precision in numerics.items():
        kinds.setdefault(precision, []).append(kind.replace("_", " "))
    kinds.pop("none", None)
    if len(kinds) == 1:
        return f"all in {next(iter(kinds))}"
    return "; ".join(f"{precision} {', '.join(names)}" for precision, names in kinds.items())


def speed_facts(prediction: PredictedStep) -> Iterator[Fact]:
    """What people compare: throughput, operations, and how much of the devices' peak they are."""
    if prediction.samples_per_s is not None:
        yield Fact("Samples/s", rate(prediction.samples_per_s), f"{rate(prediction.samples_per_s)} samples/s")
    if prediction.tokens_per_s is not None:
        yield Fact("Tokens/s", rate(prediction.tokens_per_s), f"{rate(prediction.tokens_per_s)} tokens/s")
    if prediction.flop is not None:
        flop = with_unit(prediction.flop, "FLOP")
        yield Fact("Model FLOPs", flop, f"{flop} per step")
    for name, share in (("MFU", prediction.mfu), ("HFU", prediction.hfu)):
        if share is not None:
            yield Fact(name, f"{100 * share:.1f} %", f"{name} {100 * share:.1f} %")


def fact_lines(prediction: PredictedStep) -> Iterator[tuple[str, str]]:
    """What was asked, where it runs, how fast that is, what it draws and costs: a title and words each."""
    yield "Workload", ", ".join(fact.words for fact in asked_facts(prediction) if fact.words)
    yield "Numerics", numerics_words(prediction.workload.description.numerics or {})
    yield "Machine", ", ".join(_machine(prediction))
    yield "Recorded", recorded_words(prediction)
    yield "Speed", ", ".join(fact.words for fact in speed_facts(prediction))
    yield "Power", "" if prediction.power is None else power_words(prediction.power)
    cost = cost_of(prediction)
    yield "Cost", "" if cost is None else cost.text


def _machine(prediction: PredictedStep) -> Iterator[str]:
    workload = prediction.workload
    if prediction.platform is not None:
        yield prediction.platform
    yield f"{workload.world_size} rank{'s' * (workload.world_size > 1)}"
    if any(program.recorded for program in workload.programs):
        yield "as recorded, with the profiler" if prediction.profiled else "without a profiler"


def recorded_words(prediction: PredictedStep) -> str:
    """What the run took when it was recorded, and what its profiler is taken to have cost of that."""
    recorded_ms = prediction.recorded_step_ms
    if recorded_ms is None:
        return ""
    words = f"{time_ms(recorded_ms)} ms per step with its profiler"
    less_ms = recorded_ms - prediction.step_time_ms
    if prediction.platform is not None or prediction.profiled or less_ms <= 0:
        return words
    return f"{words}, {time_ms(less_ms)} ms more than predicted without it"


def device_words(names: Sequence[str]) -> str:
    """The devices of programs, the first two by name."""
    devices = list(dict.fromkeys(filter(None, names)))
    return ", ".join(devices[:2]) + (", ..." if len(devices) > 2 else "")


def iteration_figures(iterations: Iterations) -> tuple[str, ...]:
    """Mean, standard deviation, smallest, quantiles of 10, 50 and 90 %, largest: milliseconds."""
    times, levels = iterations.step_ms, (iterations.quantile_ms(level) for level in (0.1, 0.5, 0.9))
    return tuple(map(time_ms, (iterations.mean_ms, iterations.std_ms, min(times), *levels, max(times))))


def busy_words(family: str) -> str:
    """What a device is busy with, as a breakdown counts it."""
    return "communication, exposed" if family == "communication" else family_words(family)


def path_ranks_words(path: PathSummary) -> str:
    """The ranks that a critical path of several lies on."""
    return ", ".join(f"{percent(r.share)} on rank {r.rank}" for r in path.ranks[:4] if r.share >= _WORTH_SAYING)


def source_words(coverage: Mapping[str, float]) -> str:
    """Where durations come from; what is beyond the fitted range is a part of these."""
    shares = ", ".join(
        f"{percent(share)} {source}" for source, share in coverage.items() if source != OUT_OF_RANGE and share >= _WORTH_SAYING
    )
    outside = coverage.get(OUT_OF_RANGE, 0.0)
    return f"{shares}; {percent(outside)} of it beyond the fitted range" if outside >= _WORTH_SAYING else shares


def power_words(power: StepPower) -> str:
    """What cards draw, at which clock, and whether their cap decides it."""
    drawn = f"{power.power_w:,.0f} W of {power.cap_w:,.0f} per GPU on average, {power.clock_hz / 1e6:,.0f} MHz"
    text = f"{drawn}, {with_unit(power.energy_j, 'J')} per step on all GPUs"
    return f"{text}; the cap holds the clock down" if power.capped else text
