"""Tables divided by columns and rows and copied: the ops that each kind adds to a step, and what its ranks look up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.workload import dlrm_workload, row_share, table_lookups
from steptime._lookups.generators import Generator
from steptime._lookups.workload import DENSE, WorkloadLookups
from steptime._program.workload import Workload
from steptime.errors import InputError

RANKS = 4
ROW_WISE, COPIED = {"kind": "row_wise"}, {"kind": "data_parallel"}


def model(lookup: str = "table_batched", optimizer: str = "sgd", interaction: str = "cat") -> Dlrm:
    tables = tuple(Table(f"t{i}", 32, Generator(rows=1000 * (i + 1), pooling=8.0, kind="zipf")) for i in range(4))
    return Dlrm("small", 256, 16, (32,), (16, 1), tables, lookup, optimizer, interaction)


def built(plan: list[Any], **changes: str) -> Workload:
    return dlrm_workload(model(**changes), RANKS, {f"t{i}": where for i, where in enumerate(plan)})


def collectives(workload: Workload) -> Counter[str]:
    return Counter(one.kind for one in workload.programs[0].collectives)


def test_a_slice_is_looked_up_on_its_rank_as_a_narrower_table() -> None:
    found = built([0, 1, 2, [3, 2]])
    assert found.lookups is not None
    assert [lookups.steps.tables for _, lookups in sorted(found.lookups.ranks.items())] == [
        ("t0",), ("t1",), ("t2", "t3[16:32]"), ("t3[0:16]",),
    ]  # fmt: skip
    assert collectives(found)["all_to_all"] == 2


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
@pytest.mark.parametrize("interaction", ["cat", "dot"])
def test_rows_on_all_ranks_add_a_reduce_scatter_and_an_all_gather(lookup: str, interaction: str) -> None:
    found = built([0, 1, 2, ROW_WISE], lookup=lookup, interaction=interaction)
    whole = built([0, 1, 2, 3], lookup=lookup, interaction=interaction)
    assert collectives(found) == collectives(whole) + Counter(("reduce_scatter", "all_gather"))
    sums = next(one for one in found.programs[0].collectives if one.kind == "reduce_scatter")
    assert (sums.bytes_in, sums.bytes_out) == (4 * 256 * 32, 4 * 64 * 32)


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_copied_table_adds_an_all_reduce_of_its_gradient(lookup: str, optimizer: str) -> None:
    found, whole = (built(plan, lookup=lookup, optimizer=optimizer) for plan in ([COPIED, 1, 2, 3], [0, 1, 2, 3]))
    assert collectives(found)["all_reduce"] == collectives(whole)["all_reduce"] + 1
    assert 4 * 1000 * 32 in [one.bytes_in for one in found.programs[0].collectives if one.kind == "all_reduce"]
    assert found.lookups is not None
    copies = (found.lookups.ranks[1].then or (found.lookups.ranks[1],))[-1]
    assert (copies.optimizer, copies.steps.steps[0][0].batch) == (DENSE, 256 // RANKS)


def test_a_step_without_a_table_on_a_single_rank_exchanges_no_columns() -> None:
    found = built([ROW_WISE, ROW_WISE, COPIED, COPIED])
    assert collectives(found)["all_to_all"] == 0
    assert len(found.programs) == 1


def test_on_one_rank_every_kind_is_the_whole_table() -> None:
    plans = ({"kind": kind, "ranks": [0]} for kind in ("table_wise", "row_wise", "data_parallel"))
    lookups = []
    for plan in plans:
        found = dlrm_workload(model(), 1, {f"t{i}": plan for i in range(4)})
        assert not found.programs[0].collectives
        assert found.lookups is not None
        lookups.append(found.lookups.ranks[0].steps)
    assert lookups[0] == lookups[1] == lookups[2]


def test_shares_of_rows_have_all_lookups_and_distinct_rows_between_them() -> None:
    whole = table_lookups(model().tables[3], 256)
    share = row_share(whole, RANKS)
    assert share.rows * RANKS == whole.rows
    assert share.lookups * RANKS == pytest.approx(whole.lookups, rel=0.01)
    assert share.unique * RANKS == pytest.approx(whole.unique, rel=0.01)
    assert share.counted.reuse == whole.counted.reuse
    assert share.footprint.unique == pytest.approx(whole.unique / RANKS, rel=0.01)
    assert share.lengths.longest <= whole.lengths.longest
    assert row_share(whole, 1) is whole
    nothing = table_lookups(replace(model().tables[0], generator=Generator(rows=9, pooling=0.0)), 256)
    assert row_share(nothing, RANKS).lookups == 0


def test_lookups_of_several_groups_come_back_from_a_file(tmp_path: Any) -> None:
    found = built([0, 1, ROW_WISE, COPIED])
    assert found.lookups is not None
    assert [len(lookups.then) for _, lookups in sorted(found.lookups.ranks.items())] == [2, 2, 1, 1]
    found.lookups.save(tmp_path / "lookups.json")
    assert WorkloadLookups.load(tmp_path / "lookups.json") == found.lookups


def test_slices_of_vectors_that_interact_by_dot_are_refused() -> None:
    with pytest.raises(InputError, match="cuts table 't3' into slices, and interaction \"dot\""):
        built([0, 1, 2, [3, 2]], interaction="dot")


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("kind", ["zipf", "uniform", "power", "hot"])
def test_blocks_of_rows_have_the_shares_of_lookups_that_are_drawn(kind: str, scatter: bool) -> None:
    generator = Generator(rows=10_007, pooling=40.0, kind=kind, alpha=1.2, shift=3.0, scatter=scatter, seed=5)
    drawn = generator.bags(4096).indices
    for blocks in (1, 4, 64):
        found = generator.block_shares(blocks)
        counted = np.bincount(drawn // -(-generator.rows // blocks), minlength=blocks) / len(drawn)
        assert found.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(found, counted, atol=0.01)


def test_row_wise_ranks_look_up_what_the_one_with_the_most_popular_rows_does() -> None:
    tables = (Table("t0", 32, Generator(rows=100_000, pooling=20.0, kind="zipf", alpha=1.3, seed=1)),)
    skewed = replace(model(), tables=tables, batch=4096)
    share = float(tables[0].generator.block_shares(RANKS).max())
    found = dlrm_workload(skewed, RANKS, {"t0": ROW_WISE}).lookups
    assert found is not None and share > 1.3 / RANKS
    whole = table_lookups(tables[0], 4096)
    (busiest,) = found.ranks[0].steps.steps[0]
    assert busiest.lookups == pytest.approx(share * whole.lookups, rel=0.001)
    # Popular rows are looked up as often as before, and no more rows are found than an even share has.
    assert busiest.hottest[0] == pytest.approx(whole.hottest[0], rel=0.02)
    assert busiest.unique == pytest.approx(whole.unique / RANKS, rel=0.01)
    assert sum(busiest.spectrum.lookups) == pytest.approx(busiest.lookups, rel=0.001)
