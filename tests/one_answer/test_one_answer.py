"""One step has one answer: every command that can be asked about a step says the same of it, in every form.

`make test` asks about a sample; the whole is slow. Numbers come from one function each, so none has a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.one_answer import facts
from tests.one_answer.cases import (
    CONFIGS,
    RECORDINGS,
    SCRIPT_NAMES,
    SHARDED,
    SWEPT,
    WINNER_NAMES,
    WINNERS,
    answered,
    capture_file,
    capture_words,
    captured,
    config,
    printed,
    recording,
    scripted,
    sharded,
    winner_of,
    without_comment,
)
from tests.slow import slow_unless

import steptime
from steptime._explore.answer import PREDICT
from steptime._explore.answer import answered as explored
from steptime._explore.controls import SET
from steptime._explore.subject import Subject
from steptime._program.formats import saved
from steptime._report.words import time_ms
from steptime._units import size_words

Document = dict[str, Any]

# One of a kind each: a config of each builder, winners with and without pipelines, a capture, a recording.
QUICK = (
    "bert",
    "dlrm_heavy4",
    "interleaved",
    "experts",
    "fp8",
    "mnist_convnet",
    "prefetch_sync",
    "prefetch_sync on 8xh200-nvlink",
)

ASKED: dict[str, list[str]] = {
    **{name: config(name) for name in CONFIGS},
    **{name: winner_of(name)[1][1:] for name in WINNER_NAMES},
    **{name: captured(name) for name in SCRIPT_NAMES},
    **{name: recording(name) for name in RECORDINGS},
    "prefetch_sync on 8xh200-nvlink": recording("prefetch_sync", "8xh200-nvlink"),
    "h200_mps4_dlrm on 8xa100-nvlink": recording("h200_mps4_dlrm", "8xa100-nvlink"),
    "vae on 2xh100-nvlink": [str(capture_file("vae")), "--platform", "2xh100-nvlink"],
}
EVERY = slow_unless(QUICK, list(ASKED))


@pytest.fixture(autouse=True)
def wide_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is not broken, so that a sentence is one line of it."""
    monkeypatch.setenv("COLUMNS", "4000")


_PREDICTED: dict[tuple[str, ...], Document] = {}


def predicted(words: list[str]) -> Document:
    """What `predict --json` answers."""
    key = tuple(words)
    if key not in _PREDICTED:
        _PREDICTED[key] = answered(["predict", *words])
    return _PREDICTED[key]


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Two answers of `predict` in which no fact differs."""
    assert facts.differences(facts.of_document(first), facts.of_document(second)) == {}


def options(words: list[str]) -> dict[str, Any]:
    """The options behind a command as Python takes them."""
    given: dict[str, Any] = {}
    for option, value in pairwise(words):
        if option == "--platform":
            given["platform"] = value
        elif option == "--price":
            given["price"] = float(value)
        elif option == "--set":
            key, _, number = value.partition("=")
            given.setdefault("settings", {})[key] = int(number) if number else None
    return given


@pytest.mark.parametrize("case", EVERY)
def test_text_and_page_show_what_json_has(case: str, tmp_path: Path) -> None:
    words, page = ASKED[case], tmp_path / "page.html"
    shown = facts.shown(predicted(words))
    text = facts.of_text(printed(["predict", *words, "--html", str(page)]))
    assert facts.differences(shown, text) == {}
    assert "step" in text
    on_page = facts.of_page(page.read_text(encoding="utf-8"))
    assert facts.differences(shown, on_page) == {}
    assert on_page.keys() >= text.keys() - {"headline", "bound"}


@pytest.mark.parametrize("case", EVERY)
def test_python_and_explore_say_what_the_command_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ASKED[case]
    document, given = predicted(words), options(words)
    monkeypatch.chdir(Path(__file__).parents[2])
    answer = steptime.predict(words[0], **given)
    assert answer.to_dict() == document
    assert answer.verdict.to_dict()["headline"] == document["verdict"]["headline"]

    settings = given.pop("settings", {})
    gone = {key: value for key, value in settings.items() if value is None}  # keys that are taken away have no control
    workload = steptime.read(words[0], settings=gone or None, platform_ranks=_ranks(given))
    subject = Subject(workload, (words[0],), given.get("platform"))
    values = {f"{SET}{key}": value for key, value in settings.items() if key not in gone} | {"price": given.get("price")}
    page = json.loads(explored(subject, PREDICT, values))
    assert page.get("error") is None
    same(document, page["answer"])
    assert facts.differences(facts.shown(document), facts.of_page(page["sections"]["summary"])) == {}


def _ranks(given: Mapping[str, Any]) -> int | None:
    return int(given["platform"].partition("x")[0]) if "platform" in given else None


@pytest.mark.parametrize("case", EVERY)
def test_sweep_compare_and_diff_say_what_predict_says(case: str, tmp_path: Path) -> None:
    words = ASKED[case]
    document = predicted(words)
    if "--platform" in words:
        (variant,) = answered(["sweep", *words])["variants"]
        assert {key: variant[key] for key in document if key != "verdict"} == {
            key: value for key, value in document.items() if key != "verdict"
        }
        same(document, variant)
    if "--set" in words:
        return
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    for answer in answered(["compare", str(file), *words])["variants"]:
        same(document, answer)
    listed_in(printed(["compare", str(file), str(file)]), document)
    if "--price" not in words:
        two = answered(["diff", words[0], words[0], *words[1:]])
        same(document, {**two["before"], "basis": two["basis"]})
        assert two["warnings"] == [*document["verdict"]["caveats"], *document["warnings"]]  # no headline has the caveats
        same(document, two["after"])


def listed_in(text: str, document: Document) -> None:
    """An answer is a row of a table: some line has its step, throughput and memory."""
    shown, memory = facts.shown(document), document["memory"].get("peak_bytes")
    rates = [shown[name] for name in ("tokens/s", "samples/s") if name in shown][:1]
    words = [time_ms(document["step_time_ms"]), *rates, *([] if memory is None else [size_words(memory)])]
    assert any(all(word in line for word in words) for line in text.splitlines()), words


@pytest.mark.parametrize("case", slow_unless(("prefetch_sync", "mnist_convnet"), [*CONFIGS, *SCRIPT_NAMES, *RECORDINGS]))
def test_whatif_begins_with_the_step_that_predict_says(case: str) -> None:
    words = [each for each in ASKED[case] if each != "--price"]
    if "--set" in words or len(words) != len(ASKED[case]):
        pytest.skip("whatif takes neither keys nor prices")
    answer = answered(["whatif", *words])
    same(predicted(words), answer)
    assert facts.differences(facts.shown(predicted(words)), facts.of_text(printed(["whatif", *words]))) == {}
    change = answer["changes"][0] if answer["changes"] else None
    if change is not None:
        before = answered(["predict", *words, "--what-if", change["change"]])
        same(predicted(words), before["before"])
        assert before["step_time_ms"] == change["step_time_ms"]
        assert before["bound_by"] == change["bound_by"]


@pytest.mark.parametrize("name", slow_unless(("pipeline", "fp8"), WINNER_NAMES))
def test_plan_answers_its_winner_as_predict_does(name: str, tmp_path: Path) -> None:
    words, predict_words = winner_of(name)
    file = tmp_path / "winner.toml"
    planned = answered([*words, "--save", str(file)])
    document = predicted(predict_words[1:])
    shipped = (WINNERS / f"{name}.toml").read_text(encoding="utf-8")
    assert without_comment(file) == shipped, "python -m tests.one_answer.cases makes the winners anew"
    found, said = facts.of_document(planned), facts.of_document(document)
    assert all("layout" in warning for warning in found.pop("warnings") - said["warnings"])  # of the search
    assert said.pop("warnings") <= set(planned["warnings"])
    assert facts.differences(found, said) == {}
    page = tmp_path / "page.html"
    shown = {name: value for name, value in facts.shown(document).items() if name != "warnings"}
    assert facts.differences(shown, facts.of_text(printed([*words, "--html", str(page)]))) == {}
    assert facts.differences(shown, facts.of_page(page.read_text(encoding="utf-8"))) == {}
    assert found.keys() >= {"step_time_ms", "interval_ms", "bound", "fits", "peak_bytes", "tokens_per_s", "headline"}


@pytest.mark.parametrize("name", slow_unless((), SCRIPT_NAMES))
def test_a_script_and_its_capture_have_one_answer(name: str, tmp_path: Path) -> None:
    same(answered(["predict", *scripted(name)]), predicted(captured(name)))
    file = tmp_path / "again.json.gz"
    printed(capture_words(name, file))
    same(answered(["predict", str(file), *captured(name)[1:]]), predicted(captured(name)))


@pytest.mark.parametrize("name", slow_unless(("dlrm_small",), list(CONFIGS)))
def test_a_config_and_the_workload_that_is_saved_of_it_have_one_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = config(name)
    given = options(words)
    monkeypatch.chdir(Path(__file__).parents[2])
    file = tmp_path / f"{name}.json.gz"
    workload = steptime.read(words[0], settings=given.get("settings"), platform_ranks=_ranks(given))
    saved.write(workload, file)
    price = [] if "price" not in given else ["--price", str(given["price"])]
    same(predicted(words), answered(["predict", str(file), "--platform", given["platform"], *price]))


@pytest.mark.parametrize("case", slow_unless((next(iter(SWEPT)),), list(SWEPT)))
def test_variants_of_a_sweep_are_what_predict_says_of_them(case: str) -> None:
    words, variants = SWEPT[case]
    found = answered(["sweep", *words])["variants"]
    assert len(found) == len(variants)
    text = printed(["sweep", *words])
    for variant, asked in zip(found, variants, strict=True):
        same(predicted(asked), variant)
        listed_in(text, variant)


@pytest.mark.parametrize("case", slow_unless(("quarters",), list(SHARDED)))
def test_plans_of_a_search_are_what_predict_says_of_them(case: str, tmp_path: Path) -> None:
    words, machine, memory = sharded(case)
    page, plans = tmp_path / "page.html", tmp_path / "plans.json"
    found = answered(["shard", *words, *machine])
    plans.write_text(json.dumps(found), encoding="utf-8")
    best = predicted([words[0], *machine, *memory, "--plan", str(plans)])
    same(best, {**found, "memory": {"peak_bytes": max(rank["used_bytes"] for rank in found["ranks"])}})
    shown = facts.shown(best)
    assert facts.differences(shown, facts.of_text(printed(["shard", *words, *machine, "--html", str(page)]))) == {}
    assert facts.differences(shown, facts.of_page(page.read_text(encoding="utf-8"))) == {}

    given = {plan["name"]: plan for plan in answered(["shard", words[0], *machine, "--evaluate", str(plans)])["plans"]}
    for number, plan in enumerate([found["best"], *found["alternatives"]]):
        assert given[f"alternative {number}" if number else "best"]["step_time_ms"] == plan["step_time_ms"]
    assert given["best"]["interval_ms"] == found["best"]["interval_ms"]
    for rule, step in found["rules"].items():
        assert step in (None, predicted([words[0], *machine, "--set", f"rule={rule}"])["step_time_ms"]), rule
