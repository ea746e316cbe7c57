"""Verdicts: whether a step fits, what binds it and how sure that is, the same in every form of an answer."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.api.answer_schema import wrong_in

import steptime
from steptime._models.memory.fit import Fit, Remedy
from steptime._platforms.platform import Platform
from steptime._platforms.situation import CARRIED, CARRIED_CALIBRATED, KNOWN, KNOWN_CALIBRATED
from steptime._remedies import OversizedJob, remedies
from steptime._report.cost import Cost, money
from steptime._report.text import print_prediction
from steptime._report.verdict import Certainty, Verdict, verdict_of
from steptime._report.words import time_ms
from steptime._sim.prediction import Operations
from steptime._units import size_words
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = EXAMPLES / "configs"


@cache
def small() -> steptime.Prediction:
    return steptime.predict(CONFIGS / "dlrm_small.toml", "2xh200-nvlink", price=2.5)


def crowded(**sizes: int) -> steptime.Prediction:
    """The same step where its parts take these gigabytes of one."""
    found = small()
    parts = {kind: nbytes * 2**30 for kind, nbytes in sizes.items()}
    rank = {**found.memory["ranks"][0], "parts": parts, "peak_bytes": sum(parts.values())}
    memory = {**found.memory, "ranks": [rank], "capacity_bytes": 2**30, "fits": False, "peak_bytes": rank["peak_bytes"]}
    return replace(found, memory=memory)


def said(prediction: steptime.Prediction) -> str:
    out = io.StringIO()
    print_prediction(Console(file=out, width=100, highlight=False), prediction)
    return " ".join(out.getvalue().split())


def test_what_does_not_fit_has_no_step_time() -> None:
    found = crowded(parameters=1, optimizer_state=2)
    verdict = found.verdict
    assert (verdict.fits, verdict.short_bytes, verdict.bound) == (False, 2 * 2**30, "memory")
    text = said(found)
    assert "Does not fit by 2 GiB" in text
    assert "optimizer state 2 GiB, parameters 1 GiB" in text
    assert "Step time" not in text
    assert "samples/s" not in text
    assert f"{time_ms(found.step_time_ms)} ms per step if there were room" in text
    assert "DOES NOT FIT" in repr(found)


@pytest.mark.parametrize(
    ("needed", "said"), [(90, "fits"), (96, "barely fits"), (100, "barely fits"), (101, "does not fit by 1 bytes")]
)
def test_room_within_the_error_of_peaks_is_no_plain_fit(needed: int, said: str) -> None:
    fit = Fit(3, needed, 100, {})
    assert (fit.words, fit.tight) == (said, said == "barely fits")
    assert ("may not fit" in fit.room) == fit.tight
    verdict = Verdict(fit, small().bound, Certainty.around(1.0, (0.9, 1.1), KNOWN))
    assert verdict.headline.startswith(said)


def job_of(found: steptime.Prediction) -> OversizedJob:
    """The job of a prediction as one that cannot be built anew."""
    return OversizedJob(replace(found.workload, rebuild=None), Platform.load("2xh200-nvlink"), found.memory)


def test_a_job_that_cannot_be_built_anew_is_helped_by_what_fills_the_memory() -> None:
    assert any("of the batch" in each.change for each in remedies(job_of(crowded(activations=4))))
    assert not any("of the batch" in each.change for each in remedies(job_of(crowded(parameters=4))))
    assert all(each.fit is not None and each.fit.fits for each in remedies(job_of(crowded(activations=4))))


def test_checkpointing_is_not_proposed_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = crowded(activations=4)
    assert any("checkpointing" in each.change for each in remedies(job_of(found)))
    monkeypatch.setattr("steptime._remedies.operations_of", lambda _: Operations(1.0, 4.0, again=1.0))
    assert not any("checkpointing" in each.change for each in remedies(job_of(found)))


def test_more_ranks_are_proposed_only_where_they_help() -> None:
    """Of what cannot be built anew nobody knows what ranks would share."""
    found = crowded(parameters=4)
    assert not any("ranks" in each.change or "instead of" in each.change for each in remedies(job_of(found)))


def test_whatever_is_said_to_help_does() -> None:
    source, platform, limit = CONFIGS / "gpt2-ddp.toml", "8xh200-nvlink", 10 * 10**9
    found = steptime.predict(source, platform, memory_bytes=limit)
    assert {"batch", "settings", "limit"} <= {_kind(each) for each in found.verdict.helps}
    for each in found.verdict.helps:
        assert each.fit is not None and each.fit.fits
        if each.ranks is None and (each.batch is not None or each.settings):
            changed = steptime.predict(
                source, platform, memory_bytes=limit, batch=each.batch, settings=each.settings or None, suggest=False
            )
            assert changed.fits
            assert changed.memory["peak_bytes"] == each.fit.needed_bytes
    document = found.to_dict()
    assert [each["text"] for each in document["verdict"]["remedies"]] == document["verdict"]["helps"]
    assert wrong_in(document, "predict") == []


def test_changes_that_are_enough_together_alone_are_named_together() -> None:
    source, platform, limit = CONFIGS / "gpt2-ddp.toml", "8xh100-nvlink", 5 * 10**9
    found = steptime.predict(source, platform, ranks=4, batch=64, memory_bytes=limit)
    settings = found.helps[0].settings
    assert settings == {"parallel.data": 1, "parallel.fsdp": 4, "recompute": "full", "gradient_accumulation": 16}
    options = {"ranks": 4, "batch": 64, "memory_bytes": limit, "suggest": False}
    assert steptime.predict(source, platform, settings=settings, **options).fits  # type: ignore[arg-type]


def _kind(remedy: Remedy) -> str:
    return next((kind for kind in ("ranks", "batch", "settings") if getattr(remedy, kind)), "limit")


def test_a_batch_that_would_not_help_is_not_said_to() -> None:
    found = steptime.predict(CONFIGS / "gpt2.toml", "1xh200", memory_bytes=2 * 10**9)
    assert {_kind(each) for each in found.helps} <= {"limit", "ranks"}


@given(st.floats(0.01, 1e4), st.floats(0.0, 1.0), st.floats(0.0, 3.0))
def test_an_interval_is_said_as_shares_of_the_step(step: float, below: float, above: float) -> None:
    found = Certainty.around(step, (step * (1 - below), step * (1 + above)), KNOWN)
    assert (found.below, found.above) == pytest.approx((below, above), abs=1e-9)
    assert f"{round(100 * found.above)} %" in found.span


def test_how_sure_says_what_is_known_of_the_machine() -> None:
    known = {name: Certainty.around(1.0, (0.9, 1.2), name) for name in (KNOWN, KNOWN_CALIBRATED, CARRIED, CARRIED_CALIBRATED)}
    assert [each.measured for each in known.values()] == [True, True, False, False]
    assert [each.calibrated for each in known.values()] == [False, True, False, True]
    assert all("data sheets" in known[name].text for name in (CARRIED, CARRIED_CALIBRATED))
    assert Certainty.around(1.0, (0.9, 1.2), None).measured is None
    guessed = Certainty.around(1.0, (0.9, 1.2), KNOWN, coverage={"fitted": 0.8, "fallback": 0.2, "out_of_range": 0.5})
    assert "20 % of the device time is a guess" in guessed.text
    assert "50 % of the device time is beyond" in guessed.text


def test_what_binds_a_step_without_room_is_memory() -> None:
    sure = Certainty.around(1.0, (0.9, 1.1), KNOWN)
    assert Verdict(None, small().bound, sure).bound == small().bound.kind
    assert Verdict(Fit(0, 2, 1, {}), small().bound, sure).bound == "memory"


def test_every_form_of_an_answer_begins_with_the_same_verdict() -> None:
    found = small()
    document = found.to_dict()
    assert list(document)[:2] == ["schema_version", "verdict"]
    assert document["verdict"]["headline"] == found.verdict.headline == verdict_of(found).headline
    assert document["verdict"]["text"].startswith(found.verdict.headline)
    assert said(found).index(found.verdict.headline) < said(found).index("Ranks")
    assert found.verdict.fit is not None
    assert size_words(found.memory["peak_bytes"]) in found.verdict.fit.text


def test_a_changed_step_keeps_its_verdict_and_price() -> None:
    changed = steptime.predict(CONFIGS / "dlrm_small.toml", "2xh200-nvlink", what_if=["host * 0.5"], price=2.5)
    assert changed.verdict.fits is True
    assert changed.verdict.certainty.below >= small().verdict.certainty.below - 1e-9
    assert changed.verdict.certainty.above >= small().verdict.certainty.above - 1e-9
    assert changed.cost is not None
    assert small().cost is not None
    assert changed.cost.per_step < small().cost.per_step  # type: ignore[union-attr]


@given(st.floats(0.0, 100.0), st.integers(1, 1024), st.floats(1e-4, 100.0), st.integers(1, 10**6), st.integers(1, 10**5))
def test_costs_are_of_the_same_hours(price: float, gpus: int, step_s: float, batch: int, sequence: int) -> None:
    cost = Cost(price, gpus, step_s, batch, sequence)
    assert cost.per_step * 3600 / step_s == pytest.approx(price * gpus)
    assert cost.per_million_samples == pytest.approx(cost.per_step * 1e6 / batch)
    assert cost.per_trillion_tokens == pytest.approx(cost.per_step * 1e12 / batch / sequence)
    assert Cost(price, gpus, step_s).per_million_samples is None


def test_a_rank_may_use_less_than_its_device_has() -> None:
    needed = small().memory["peak_bytes"]
    limited = steptime.predict(CONFIGS / "dlrm_small.toml", "2xh200-nvlink", memory_bytes=needed - 2**20)
    assert (limited.verdict.fits, limited.verdict.short_bytes) == (False, 2**20)
    assert (small().fits, limited.fits, limited.warnings) == (True, False, small().warnings)
    assert limited.step_time_ms == small().step_time_ms
    assert steptime.predict(CONFIGS / "dlrm_small.toml", "2xh200-nvlink", memory_bytes=2**60).memory == small().memory


def test_shares_of_a_gpu_cost_shares_of_its_price() -> None:
    quarter = steptime.predict(CONFIGS / "dlrm_heavy4.toml", "4xh200-quarter-loopback", price=4.0)
    assert quarter.cost is not None
    assert quarter.cost.gpus == 1.0


@pytest.mark.parametrize(("amount", "text"), [(0.0, "$0.00"), (0.00002874, "$0.0000287"), (2.5, "$2.50"), (80285.4, "$80,285")])
def test_money_has_as_many_digits_as_matter(amount: float, text: str) -> None:
    assert money(amount) == text


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(steptime.InputError, match="per GPU and hour"):
        steptime.predict(CONFIGS / "dlrm_small.toml", "2xh200-nvlink", price=price)


def test_memory_of_a_recording_that_names_no_tensors_is_not_known(tmp_path: Path) -> None:
    """Neither fits nor not, in every form: workspaces alone would always fit."""
    found = steptime.predict(EXAMPLES / "prefetch_sync", "1xh200")
    verdict = found.verdict
    assert (verdict.fit, verdict.fits, verdict.to_dict()["fits"]) == (None, None, None)
    assert set(found.to_dict()["memory"]) == {"peak_bytes", "unknown"}
    for text in (verdict.headline, verdict.text, said(found)):
        assert "memory unknown" in text
        assert "fits" not in text
    assert "does not name its tensors" in said(found)
    assert "Allocated" not in said(found)
    found.html(tmp_path / "page.html")
    assert "Memory unknown" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_memory_of_a_recording_with_execution_traces_is_known() -> None:
    found = steptime.predict(EXAMPLES / "h200_mps4_dlrm", "4xh200-nvlink")
    assert found.verdict.fits is not None
    assert "memory unknown" not in said(found)


def test_nobody_asks_whether_a_step_as_recorded_fits() -> None:
    assert "memory unknown" not in said(steptime.predict(EXAMPLES / "prefetch_sync"))


@pytest.mark.parametrize("platform", [None, "1xh200"])
@given(share=st.floats(0.3, 0.95))
@settings(max_examples=4, deadline=None)
def test_no_interval_is_claimed_for_a_recording_that_is_cut_off(platform: str | None, share: float) -> None:
    """The part that is missing is in no interval: certainty says so, the first warning too, and nothing is said of the MFU."""
    whole = (EXAMPLES / "prefetch_sync" / "rank0.kineto.json.gz").read_bytes()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rank0.kineto.json.gz"
        file.write_bytes(whole[: int(share * len(whole))])
        try:
            found = steptime.predict(file, platform)
        except InputError:
            assume(False)  # nothing to play is left of it
        sure = found.verdict.to_dict()["certainty"]
        assert (sure["below"], sure["above"], found.mfu) == (None, None, None)
        assert "cut off" in found.verdict.headline
        assert "breaks off" in found.warnings[0]
        assert "%" not in found.verdict.headline
        assert "no interval is claimed" in said(found)
        assert wrong_in(found.to_dict(), "predict") == []


def test_an_interval_is_claimed_for_the_whole_recording() -> None:
    assert steptime.predict(EXAMPLES / "prefetch_sync", "1xh200").verdict.certainty.claimed
