"""`DlrmConfig`: a DLRM as a config has it, every value checked. docs/configs.md has all keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steptime._build.config_values import MOST_WHOLE, MOST_WIDTH, Overrides, Values
from steptime._build.dlrm.constraints import KEYS as CONSTRAINTS
from steptime._build.dlrm.constraints import Constraints, constraints_of
from steptime._build.dlrm.model import (
    DENSE_OPTIMIZERS,
    EXCHANGE_DTYPES,
    FUSED,
    FUSED_OPTIMIZERS,
    INTERACTIONS,
    KIND,
    LOOKUPS,
    LOSSES,
    MOST_BATCH,
    OPTIMIZERS,
    PRECISIONS,
    PREFETCHES,
    TABLE_DTYPES,
    Dlrm,
    Table,
)
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.plan_files import plans_of, read_plans
from steptime._build.dlrm.workload import check_batch, check_kinds, dlrm_workload, generator_like, of_reuse
from steptime._build.settings import ANY, applied
from steptime._lookups import saved
from steptime._lookups.generators import MOST_ROWS, Generator
from steptime._lookups.statistics import REUSE_BINS
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import TOGETHER
from steptime._program.program import MOST_RANKS
from steptime._program.workload import Workload
from steptime.errors import InputError

_REQUIRED = ("batch", "dense_features", "bottom", "top", "tables")
_KEYS = (
    "kind",
    "name",
    *_REQUIRED,
    "lookup",
    "optimizer",
    "table_precision",
    "interaction",
    "loss",
    "precision",
    "dense_optimizer",
    "cross_layers",
    "cross_rank",
    "exchange_precision",
    "prefetch",
    "cuda_graph",
    "fused",
    "presorted",
    "ranks",
    "plan",
    "rule",
    "constraints",
)
_TABLE_REQUIRED = ("name", "rows", "dim", "pooling_factor")
_TABLE_KEYS = (*_TABLE_REQUIRED, "statistics", "skew", "precision", "weighted", "pooled")
_TEXT, _WHOLE = ((str,), "a name"), ((int,), "a whole number")
_NUMBER, _SWITCH = ((int, float), "a number"), ((bool,), "true or false")
_SKEW_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "kind": _TEXT, "lengths": _TEXT, "alpha": _NUMBER, "shift": _NUMBER, "locality": _NUMBER, "window": _WHOLE,
    "scatter": _SWITCH, "seed": _WHOLE, "long_bag": _WHOLE, "long_bag_at": _NUMBER,
}  # fmt: skip
_MOST_CROSS_LAYERS = 1024
_HISTOGRAM_KEYS = ("reuse", "unique", "batch")
# Counted lookups per sample may differ so far from the factor that the config says: both are rounded by people.
_FACTOR_AGREES = 0.01


@dataclass(frozen=True, slots=True)
class Doubt:
    """A value that the input left open: what was taken, and the model if it were otherwise."""

    assumption: str
    otherwise: str
    model: Dlrm


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """What a file says of a DLRM; `predict` and `shard` read the same. A list of tables says little more than `constraints`.

    `ranks` None: neither `ranks` nor a plan says how many. `plan` None: there is none, and `rule` may name one of the sharding
    rules that makes it.
    """

    model: Dlrm
    ranks: int | None = None
    plan: Plan | None = None
    rule: str | None = None
    constraints: Constraints | None = None  # None: the file has none
    notes: tuple[str, ...] = ()  # what was taken for granted
    doubts: tuple[Doubt, ...] = ()

    def workload(self, plan: Plan | Mapping[str, Any] | None = None) -> Workload:
        """The workload; a given plan goes before the config's own."""
        return dlrm_workload(self.model, self.ranks or 1, self.plan if plan is None else plan)


def keys() -> tuple[str, ...]:
    """All keys of a config, dotted; a star stands for a table of the list, or for the name of one."""
    named = [f"constraints.{key}.{ANY}" for key in ("pinned", "kinds_of", "min_partition", "max_partition")]
    constraints = [f"constraints.{key}" for key in CONSTRAINTS]
    inner = {"skew": _SKEW_TYPES, "statistics": _HISTOGRAM_KEYS}
    tables = [*_TABLE_KEYS, *(f"{key}.{each}" for key, known in inner.items() for each in known)]
    own = [key for key in _KEYS if key != "kind"]
    return (*own, *(f"tables.{ANY}.{key}" for key in tables), f"plan.{ANY}", *constraints, *named)


def dlrm_of(
    values: Mapping[str, Any], where: str = "DLRM config", folder: Path = Path(), overrides: Overrides | None = None
) -> DlrmConfig:
    """The config in plain values; `where` is said in errors. Other ranks than the config's leave its plan aside."""
    changed = overrides or Overrides()
    values = applied(values, changed.settings, keys(), where)
    if changed.ranks is not None and any(key == "plan" or key.startswith("plan.") for key in changed.settings):
        values["ranks"] = changed.ranks  # a plan that is set is for the ranks that are asked for
    section = Values(values, where)
    section.expect(_KEYS, _REQUIRED)
    section.choice("kind", (KIND,), KIND)
    batch = section.whole("batch", 1, MOST_BATCH) if changed.batch is None else changed.batch
    model = Dlrm(
        name=section.text("name") if "name" in values else Path(where).stem,
        batch=batch,
        dense_features=section.whole("dense_features", 1, MOST_WIDTH),
        bottom=section.widths("bottom"),
        top=section.widths("top"),
        tables=_tables(section, batch, folder),
        lookup=section.choice("lookup", LOOKUPS, "table_batched"),
        optimizer=section.choice("optimizer", OPTIMIZERS, "sgd"),
        interaction=section.choice("interaction", INTERACTIONS, "dot"),
        loss=section.choice("loss", LOSSES, "bce"),
        precision=section.choice("precision", (*PRECISIONS, *FUSED), "fp32"),
        dense_optimizer=section.choice("dense_optimizer", DENSE_OPTIMIZERS, "sgd"),
        exchange_precision=section.choice("exchange_precision", tuple(EXCHANGE_DTYPES), "fp32"),
        prefetch=section.choice("prefetch", PREFETCHES, "none"),
        cuda_graph=section.switch("cuda_graph", False),
        fused=section.switch("fused", False),
        presorted=section.switch("presorted", False),
        **_cross(section),
    )
    check_model(model, where)
    rule = section.text("rule") if "rule" in values else None
    constraints = constraints_of(section.table("constraints")) if "constraints" in values else None
    if constraints is not None:
        constraints.check(model.tables, where)
    ranks, plan = _ranks_and_plan(section, model, folder, changed)
    return DlrmConfig(model, ranks, plan, rule, constraints, tuple(_evenly(values["tables"])))


def _evenly(tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is taken for granted of tables that say nothing of their lookups."""
    found = [table["name"] for table in tables if "skew" not in table and "statistics" not in table]
    if found:
        line = 'skew = { kind = "zipf", alpha = 1.05 }'
        yield (
            f"{len(found)} tables without skew or statistics are taken to be looked up evenly (first: {found[0]!r}), which is "
            f"seldom so; say how they are, as {line}"
        )


def _cross(section: Values) -> dict[str, int]:
    """The keys of cross layers that are there; only `dcnv2` has some."""
    keys = [key for key in ("cross_layers", "cross_rank") if key in section.values]
    if keys and section.values.get("interaction") != "dcnv2":
        raise InputError(f'{section.where}: {keys[0]} is for interaction "dcnv2"; drop it, or interaction = "dcnv2"')
    most = {"cross_layers": _MOST_CROSS_LAYERS, "cross_rank": MOST_WIDTH}
    return {key: section.whole(key, 1, most[key]) for key in keys}


def _ranks_and_plan(section: Values, model: Dlrm, folder: Path, overrides: Overrides) -> tuple[int | None, Plan | None]:
    placed = _plan_values(section, folder) if "plan" in section.values else None
    ranks = section.whole("ranks", 1, MOST_RANKS) if "ranks" in section.values else _most_rank(placed)
    plan = None
    if ranks is not None and overrides.batch is None:
        check_batch(model, ranks, section.where)
    if ranks is not None and placed is not None:
        try:
            plan = Plan.from_dict(placed, model.tables, ranks, "the plan")
            check_kinds(model, plan)
        except InputError as error:
            raise InputError(f"{section.where}, plan: {error}") from None
    if overrides.ranks is None or overrides.ranks == ranks:
        return ranks, plan
    return overrides.ranks, None


def _plan_values(section: Values, folder: Path) -> Mapping[str, Any]:
    """A table of the config, or the file of a plan beside it."""
    if isinstance(section.values["plan"], str):
        return next(iter(read_plans(folder / section.text("plan")).values()))
    return next(iter(plans_of({"plan": section.table("plan").values}, section.where).values()))


def _most_rank(placed: Mapping[str, Any] | None) -> int | None:
    """One more than the highest rank of a plan; what is no rank is refused when the plan is read."""
    if placed is None:
        return None
    listed = [value.get("ranks", []) if isinstance(value, Mapping) else value for value in placed.values()]
    flat = [rank for ranks in listed for rank in (ranks if isinstance(ranks, list) else [ranks])]
    return 1 + max((rank for rank in flat if type(rank) is int and 0 <= rank < MOST_RANKS), default=0)


def check_model(model: Dlrm, where: str) -> None:
    """Refuses sizes that do not go together."""
    if model.top[-1] != 1:
        raise InputError(f"{where}: top ends in {model.top[-1]}; expected 1, the prediction")
    if model.interaction == "dot":
        other = next((table for table in model.tables if table.dim != model.bottom[-1]), None)
        if other is not None:
            raise InputError(
                f'{where}: interaction "dot" takes vectors of one length: bottom ends in {model.bottom[-1]}, table '
                f'{other.name!r} has dim {other.dim}; make them equal, or interaction = "cat"'
            )
    if model.lookup in TOGETHER:
        odd = next((table for table in model.tables if table.dim % 4), None)
        if odd is not None:
            raise InputError(f'{where}: table {odd.name!r} has dim {odd.dim}; lookup "{model.lookup}" expects a multiple of 4')
    _check_tables(model, where)


def _check_tables(model: Dlrm, where: str) -> None:
    """Refuses tables that no such lookup has."""
    for table in model.tables:
        unusual = [
            text
            for text, there in (
                (f'precision "{table.precision}"', table.precision != "fp32"),
                ("weighted = true", table.weighted),
                ("pooled = false", not table.pooled),
            )
            if there
        ]
        if unusual and model.lookup not in TOGETHER:
            raise InputError(
                f'{where}: table {table.name!r} has {unusual[0]}, which lookup "{model.lookup}" is not built with; '
                'lookup = "table_batched" or "fbgemm"'
            )
        whole = table.pooling_factor == round(table.pooling_factor) >= 1 and table.generator.lengths == "fixed"
        if not table.pooled and not whole:
            raise InputError(
                f"{where}: table {table.name!r} is not pooled, with {table.pooling_factor:g} lookups a sample of "
                f'"{table.generator.lengths}" lengths; expected whole sequences: pooling_factor 1 or more, lengths "fixed"'
            )
    if model.fused:
        _check_fused(model, where)
    elif model.precision in FUSED:
        raise InputError(
            f'{where}: precision "{model.precision}" has parameters in 16 bits, which layers of fused = true have; write '
            f'precision = "{model.precision}-autocast" for PyTorch\'s layers, or add fused = true'
        )
    if model.presorted and model.prefetch != "none":
        raise InputError(f'{where}: presorted = true with prefetch "{model.prefetch}"; expected one of the two')
    if model.lookup not in TOGETHER and model.presorted:
        raise InputError(f'{where}: presorted = true with lookup "{model.lookup}"; lookup = "table_batched" or "fbgemm"')
    if model.lookup not in TOGETHER and model.cuda_graph:
        raise InputError(
            f'{where}: cuda_graph = true with lookup "{model.lookup}", whose sparse gradients the host waits for; lookup = '
            '"table_batched" or "fbgemm"'
        )
    if model.lookup not in TOGETHER and model.optimizer not in ("sgd", "rowwise_adagrad"):
        raise InputError(
            f'{where}: optimizer "{model.optimizer}" is not built with lookup "{model.lookup}"; "sgd" or "rowwise_adagrad", or '
            'lookup = "table_batched" or "fbgemm"'
        )


def _check_fused(model: Dlrm, where: str) -> None:
    """Refuses what fused layers are not built with."""
    wanted = (
        ("precision", model.precision, tuple(FUSED)),
        ("interaction", model.interaction, ("cat", "dcnv2")),
        ("dense_optimizer", model.dense_optimizer, FUSED_OPTIMIZERS),
        ("lookup", model.lookup, TOGETHER),
        ("exchange_precision", model.exchange_precision, ("fp32",)),
    )
    for key, value, known in wanted:
        if value not in known:
            expected = (
                "none: it is that of the layers" if key == "exchange_precision" else " or ".join(f'"{each}"' for each in known)
            )
            raise InputError(f'{where}: fused = true with {key} "{value}"; expected {expected}')


def _tables(section: Values, batch: int, folder: Path) -> tuple[Table, ...]:
    result = section.values["tables"]
    if not isinstance(result, list) or not result or not all(isinstance(table, Mapping) for table in result):
        raise section.wrong("tables", "one or more [[tables]]")
    precision = section.choice("table_precision", tuple(TABLE_DTYPES), "fp32")
    tables = tuple(_table(table, index, section.where, batch, folder, precision) for index, table in enumerate(result))
    check_names(tables, section.where)
    return tables


def check_names(tables: Sequence[Table], where: str) -> None:
    """Refuses tables of one name."""
    twice = next((name for name, count in Counter(table.name for table in tables).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{where}: table {twice!r} is there twice; expected every name once")


def _table(values: Mapping[str, Any], index: int, where: str, batch: int, folder: Path, precision: str) -> Table:
    name = values.get("name")
    section = Values(values, f"{where}, table {name!r}" if isinstance(name, str) else f"{where}, tables[{index}]")
    section.expect(_TABLE_KEYS, _TABLE_REQUIRED)
    name, rows, dim = section.text("name"), section.whole("rows", 1, MOST_ROWS), section.whole("dim", 1, MOST_WIDTH)
    pooling = section.number("pooling_factor", 0.0)
    if "skew" in values and "statistics" in values:
        raise InputError(f"{section.where}: has both skew and statistics; expected one of them")
    other: dict[str, Any] = {
        "precision": section.choice("precision", tuple(TABLE_DTYPES), precision),
        "weighted": section.switch("weighted", False),
        "pooled": section.switch("pooled", True),
    }
    if "statistics" not in values:
        skew = section.table("skew") if "skew" in values else Values({"kind": "uniform"}, section.where)
        return Table(name, dim, _generator(skew, rows, pooling, index), **other)
    counted = _statistics(section, rows, dim, pooling, batch, folder)
    like = generator_like(rows, pooling, counted.batch, counted.unique, index)
    return Table(name, dim, like, counted, **other)


def _generator(section: Values, rows: int, pooling: float, index: int) -> Generator:
    section.expect(tuple(_SKEW_TYPES), ("kind",))
    values: dict[str, Any] = {"seed": index}
    for key, value in section.values.items():
        kinds, expected = _SKEW_TYPES[key]
        huge = isinstance(value, int) and abs(value) > MOST_WHOLE
        if huge or not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise section.wrong(key, expected)
        values[key] = float(section.values[key]) if float in kinds else value
    return generator_of(section.where, rows=rows, pooling=pooling, **values)


def generator_of(where: str, **values: Any) -> Generator:
    """The generator of these values; `where` begins what it refuses."""
    try:
        return Generator(**values)
    except InputError as error:
        raise InputError(f"{where}: {str(error).partition(': ')[2]}") from None


def _statistics(section: Values, rows: int, dim: int, pooling: float, batch: int, folder: Path) -> TableStatistics:
    result = section.values["statistics"]
    if isinstance(result, str):
        return _from_file(section, folder / result, rows, dim, pooling)
    if isinstance(result, list):
        result = {"reuse": result}
    if not isinstance(result, Mapping):
        raise section.wrong("statistics", "the name of a file, or the 17 bins of the reuse histogram")
    histogram = Values(result, f"{section.where}, statistics")
    histogram.expect(_HISTOGRAM_KEYS, ("reuse",))
    reuse = result["reuse"]
    good = isinstance(reuse, list) and len(reuse) == REUSE_BINS and all(type(b) in (int, float) and 0 <= b <= 1 for b in reuse)
    if not good or not 0.98 <= sum(reuse) <= 1.02:  # people round shares
        raise histogram.wrong("reuse", f"{REUSE_BINS} shares of distinct rows that add up to 1")
    counted_over = histogram.whole("batch", 1, MOST_BATCH) if "batch" in result else batch
    unique = histogram.whole("unique", 1, rows) if "unique" in result else None
    return of_reuse(
        generator_of(section.where, rows=rows, pooling=pooling), dim, counted_over, tuple(map(float, reuse)), unique
    )


def _from_file(section: Values, path: Path, rows: int, dim: int, pooling: float) -> TableStatistics:
    counted = saved.load(path)
    if counted.rows != rows:
        raise InputError(f"{section.where}: rows is {rows}, {path} is of a table of {counted.rows}; expected the same")
    factor = counted.lookups / counted.batch
    if abs(factor - pooling) > _FACTOR_AGREES * max(factor, pooling):
        raise InputError(f"{section.where}: pooling_factor is {pooling:g}, {path} has {factor:g}; expected the same to 1 %")
    return replace(counted, dim=dim)
