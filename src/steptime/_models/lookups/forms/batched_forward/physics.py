"""What a table-batched forward launch takes by physics: step latencies of its programs, and what caches and memory deliver.

Programs run side by side until work runs out; then the longest one is waited for. Times are in nanoseconds.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.forms.batched_forward.tables import ForwardTables

# Programs that an SM runs at once, of four-byte and two-byte rows. Fit rows with one table of equal bags: 8,192 programs of
# four-byte rows take three times as long as 2,048 (six waves, two), and of two-byte rows 2,048 programs are one wave.
_RESIDENT = (12.0, 16.0)
# A miss of one of four rows delays a step as a whole.
_ROWS_OF_STEP = 4.0


@dataclass(frozen=True)
class Constants:
    """All positive, fitted."""

    launch: float
    program: float  # until its first step
    step: float  # of one bag, all rows in the first-level cache
    step_cold: float  # more where indices come from memory
    step_memory: float  # more where rows do
    step_l2: float  # more where rows come from the second-level cache
    bags: float  # a step more for each doubling of the running bags; likewise below
    bags_cold: float
    bags_memory: float
    bags_l2: float
    bags_unaligned: float  # for each sector of indices beyond one
    bag_unaligned: float  # the same for each running bag
    bag_unaligned_cold: float
    missing: float  # how fast misses come to delay every step
    l1_rate: float  # bytes per ns
    l2_rate: float
    memory_rate: float
    line_rate: float  # cache lines per ns that are asked for
    index_lines: float  # lines that an index's sector counts as
    row_least: float  # bytes of memory traffic that even a short row costs, the root of squares with its own
    kept: float  # bytes of a warm launch that the second-level cache still holds half of
    kept_slope: float
    weights: float  # share that per-sample weights add to steps
    half_step: float  # factors of two-byte elements
    half_bags: float
    half_rate: float  # of what the same number of four-byte elements takes from the first-level cache
    overlap: float  # part of the work that runs while the longest program does
    softness: float
    wave: float  # part of a wave of equal programs that its last one wastes
    uneven: float  # how fast unequal programs fill that waste
    late: float  # of the work, when the last of many longest programs begins
    early: float  # waves that begin at once

    @classmethod
    def of(cls, values: Floats) -> Constants:
        """From values in order."""
        return cls(*(float(value) for value in values))

    def values(self) -> Floats:
        """In order."""
        return np.array(astuple(self))


@dataclass(frozen=True)
class SharePowers:
    """Powers of the number of equal shares that a GPU is divided into, by what the other shares do. Not negative, fitted."""

    memory: Floats  # [others] on the time of memory traffic
    l2: Floats  # [others] on the time of second-level traffic
    steps: Floats  # [others] on step latencies
    kept: Floats  # [others] on what a warm launch needs of the second-level cache

    @classmethod
    def of(cls, values: Floats) -> SharePowers:
        """From values, what belongs to one power after the other; a whole GPU has none."""
        return cls(*np.concatenate([np.zeros((len(fields(cls)), 1)), values.reshape(len(fields(cls)), -1)], axis=1))

    def values(self) -> Floats:
        """The inverse of `of`."""
        return np.concatenate([getattr(self, field.name)[1:] for field in fields(self)])


@dataclass(frozen=True)
class Costs:
    """Of each table, warm and what is added where nothing is in the caches; times of a whole GPU."""

    longest: tuple[Floats, Floats]  # the longest program
    work: tuple[Floats, Floats]  # all programs one after the other
    own: Floats  # cube of the time that SMs take to read all rows from their own caches
    l2: Floats  # cube of the time that the second-level cache takes
    memory: tuple[Floats, Floats]  # time of memory traffic

    @classmethod
    def of(cls, constants: Constants, tables: ForwardTables) -> Costs:
        """Of all tables of a pool."""
        known, programs = constants, tables.programs
        by_first = -np.expm1(-_ROWS_OF_STEP * tables.l1_missed)
        all_rows = tables.lookups * tables.sector_bytes
        elements = 4 * tables.lookups * tables.dim * np.where(tables.half > 0, known.half_rate, 1.0)
        lines = tables.lookups * (np.maximum(tables.sector_bytes / 128, 1.0) + known.index_lines * tables.index_sectors)
        traffic = tables.lookups * np.hypot(tables.row_bytes, known.row_least) * tables.l2_missed + tables.index_bytes
        return cls(
            # The longest bag goes on when others have ended: fewer of its rows were fetched before.
            longest=_steps(
                known, tables, by_first, (tables.single + tables.l2_missed) / 2,
                (programs.longest, programs.longest_log, programs.longest_bags, np.ones_like(all_rows)),
            ),
            work=_steps(
                known, tables, by_first, tables.l2_missed,
                (
                    programs.number * programs.steps, programs.number * programs.log_steps,
                    programs.number * programs.bag_steps, programs.number,
                ),
            ),
            own=(elements / known.l1_rate) ** 3 + (lines / known.line_rate) ** 3,
            l2=(all_rows * tables.l1_missed / known.l2_rate) ** 3,
            memory=(tables.out / known.memory_rate, traffic / known.memory_rate),
        )  # fmt: skip


def _steps(
    known: Constants, tables: ForwardTables, l2: Floats, missed: Floats, counts: tuple[Floats, Floats, Floats, Floats]
) -> tuple[Floats, Floats]:
    """Time of so many steps, log2 of bags, bags and programs: warm, and what is added where caches are cold."""
    steps, logs, bags, programs = counts
    memory = -np.expm1(-known.missing * missed)
    unaligned = tables.index_sectors - 1
    by_step = np.where(tables.half > 0, known.half_step, 1.0)
    by_bags = np.where(tables.half > 0, known.half_bags, 1.0)
    warm = (
        steps * by_step * (known.step + known.step_l2 * l2)
        + logs * by_bags * (known.bags + known.bags_l2 * l2 + known.bags_unaligned * unaligned)
        + bags * by_bags * known.bag_unaligned * unaligned
        + programs * known.program
    )
    cold = (
        steps * by_step * (known.step_cold + known.step_memory * memory)
        + logs * by_bags * (known.bags_cold + known.bags_memory * memory)
        + bags * by_bags * known.bag_unaligned_cold * unaligned
    )
    return warm, cold


@dataclass(frozen=True)
class Launch:
    """A launch by physics. [lookups], but for those of members."""

    time: Floats
    longest: Floats  # time of the longest program
    long: Floats  # tables with about as long programs
    work: Floats  # of all programs, on all places for programs
    flow: Floats  # the same, or longer where caches or memory limit it
    waited: Floats  # beyond the flow
    partial: Floats  # of it, what a last wave wastes
    waves: Floats
    uneven: Floats  # squared variation of programs
    cold: Floats  # share of what a warm launch would find that is not there
    member_longest: Floats  # [members]
    member_flow: Floats  # [members]


def launched(
    constants: Constants, powers: SharePowers, tables: ForwardTables, lookups: Lookups, costs: Costs | None = None
) -> Launch:
    """Launches of tables of the pool; `costs` are those of the tables, where they are known already."""
    costs = costs or Costs.of(constants, tables)
    member, at = lookups.member, lookups.lookup
    share, others = lookups.share, lookups.others
    places = tables.device.sms * np.where(lookups.dtype > 0, _RESIDENT[1], _RESIDENT[0]) / share
    needed = lookups.sums(tables.footprint) * share ** powers.kept[others]
    cold = 1 - lookups.warm / (1 + (needed / constants.kept) ** constants.kept_slope)
    slower = np.where(lookups.weighted, 1 + constants.weights, 1.0) * share ** powers.steps[others]
    here = cold[at]
    longest = (costs.longest[0][member] + here * costs.longest[1][member]) * slower[at]
    work = (costs.work[0][member] + here * costs.work[1][member]) * (slower / places)[at]
    memory = (costs.memory[0][member] + here * costs.memory[1][member]) * (share ** powers.memory[others])[at]
    own, l2 = costs.own[member] * (share**3)[at], costs.l2[member] * (share ** (3 * powers.l2[others]))[at]
    flow = np.cbrt(own + l2 + memory * memory * memory + work * work * work)
    most, all_work, all_flow = lookups.member_maxima(longest), lookups.member_sums(work), lookups.member_sums(flow)
    number = tables.programs.number
    programs = np.maximum(lookups.sums(number), 1.0)
    waves = programs / places
    mean = all_work / waves
    square = (1 + (tables.programs.spread / np.maximum(tables.programs.steps, 1.0)) ** 2) / np.maximum(number, 1.0)
    uneven = np.maximum(lookups.member_sums(square[member] * work * work) * programs / all_work**2 - 1, 0.0)
    partial = constants.wave * np.exp(-constants.uneven * uneven) * (np.ceil(waves - 1e-9) - waves) * mean
    # Where in the launch the longest programs are is not known. Of n places the last is at n / (n + 1), on average.
    long = lookups.member_sums(_eighth(longest / most[at]))
    late = constants.late * all_work * np.maximum(1 - constants.early / waves, 0.0) ** 2 * long / (long + 1)
    alone = most + late - constants.overlap * all_work
    waited = np.where(waves > 1, np.maximum(alone, partial), alone)
    soft = constants.softness * np.minimum(most, all_flow)
    time = constants.launch + all_flow + (waited + np.sqrt(waited * waited + soft * soft)) / 2
    return Launch(time, most, long, all_work, all_flow, waited, partial, waves, uneven, cold, longest, flow)


def _eighth(values: Floats) -> Floats:
    square = values * values
    fourth = square * square
    return fourth * fourth
