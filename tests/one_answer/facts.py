"""What an answer says about a step, out of every form that it has: JSON, text, a page.

Facts of JSON are its values. Text and pages show words; `shown` has the words for the values of a JSON answer. A fact that an
answer does not have is not among its facts, so facts are compared where two answers have them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from steptime._report.cost import money
from steptime._report.words import in_unit, rate, step_words
from steptime._units import size_words

Facts = dict[str, Any]
Document = Mapping[str, Any]

VALUES = (
    "step_time_ms", "interval_ms", "bound_by", "situation", "samples_per_s", "tokens_per_s", "mfu", "hfu", "power_w",
    "energy_j", "cost_per_step", "cost_per_million_samples", "cost_per_trillion_tokens", "peak_bytes",
)  # fmt: skip
VERDICT = ("fits", "tight", "short_bytes", "bound", "headline", "text")

_LINES = re.compile(r"^  (Bound by|Memory|Certainty|Speed|Power|Cost|Would take)  +(.+)$", re.MULTILINE)
_TAGS = re.compile(r"<[^>]+>")


def of_document(document: Document) -> Facts:
    """Of JSON: an answer of `predict` or one like it; `best` of a search is its winner."""
    values = {**document, **document.get("memory", {})}
    if isinstance(document.get("best"), Mapping):
        values |= document["best"]
    facts = {name: values[name] for name in VALUES if values.get(name) is not None}
    verdict = document.get("verdict") or {}
    facts |= {name: verdict[name] for name in VERDICT if verdict.get(name) is not None}
    facts |= {name: set(document[name]) for name in ("warnings", "basis") if name in document}
    facts |= {"caveats": set(verdict["caveats"])} if verdict else {}
    return facts


def shown(document: Document) -> Facts:
    """The words that text and pages have for a JSON answer of `predict`."""
    low, high, unit = in_unit(*document["interval_ms"])
    memory, fits = document["memory"], document["verdict"]["fits"] is not False
    facts: Facts = {
        "step": step_words(document["step_time_ms"]),
        "interval": f"{low if low == high else f'{low}-{high}'} {unit}",
        "caveats": set(document["verdict"]["caveats"]),
        "warnings": set(document["warnings"]),
        "basis": "; ".join(document["basis"]),
    }
    if fits:
        facts["bound"] = document["bound_by"]
        facts["headline"] = document["verdict"]["headline"]
    if document["verdict"]["certainty"]["below"] is None:
        del facts["interval"]
    if document["verdict"]["fits"] is not None:
        facts["memory"] = f"{size_words(memory['peak_bytes'])} of {size_words(memory['capacity_bytes'])}"
    for name, title in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
        if document[name] is not None:
            facts[title] = rate(document[name])
    for name in ("mfu", "hfu"):
        if document[name] is not None:
            facts[name] = f"{100 * document[name]:.1f} %"
    if document["power_w"] is not None:
        facts["power"] = f"{document['power_w']:,.0f} W"
    if document["cost_per_step"] is not None:
        facts["cost"] = money(document["cost_per_step"])
    return facts


def of_text(text: str) -> Facts:
    """Of what a command prints, in lines as wide as they need."""
    lines = dict(_LINES.findall(text))
    facts: Facts = {
        "caveats": set(re.findall(r"^  Caveat  +(.+)$", text, re.MULTILINE)),
        "warnings": set(re.findall(r"^    ! (.+)$", text, re.MULTILINE)),
        "basis": "".join(re.findall(r"^  Based on  +(.+)$", text, re.MULTILINE)),
    }
    first = re.search(r"^  (?:Step time|Best plan)  (\S+ m?s)   (.+)$", text, re.MULTILINE)
    if first is not None:
        facts |= {"step": first[1], "headline": first[2], "bound": lines["Bound by"]}
        sure = lines.get("Certainty", "")
    else:
        sure = lines["Would take"]
        facts["step"] = sure.partition(" per step")[0]
        short = re.search(r"^  Does not fit .*needs (\S+ \S+ of \S+ \S+)", text, re.MULTILINE)
        facts["memory"] = short[1] if short else ""
    span = re.search(r"(?:90 % interval|range with the recorded steps) (\S+ m?s)", sure)
    if span is not None:
        facts["interval"] = span[1]
    if "Memory" in lines and not lines["Memory"].startswith("unknown"):
        facts["memory"] = lines["Memory"].partition(" on ")[0]
    for each in lines.get("Speed", "").split(", "):
        for name in ("samples/s", "tokens/s"):
            if each.endswith(f" {name}"):
                facts[name] = each.removesuffix(f" {name}")
        for name in ("MFU", "HFU"):
            if each.startswith(f"{name} "):
                facts[name.lower()] = each.removeprefix(f"{name} ")
    if "Power" in lines:
        facts["power"] = lines["Power"].partition(" of ")[0]
    if "Cost" in lines:
        facts["cost"] = lines["Cost"].partition(" per step")[0]
    return facts


def of_page(page: str) -> Facts:
    """Of the summary of a page."""
    summary = page.partition('id="summary"')[2].partition("</section>")[0] or page
    listed = {_plain(name): _plain(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", summary)}
    facts: Facts = {
        "caveats": {_plain(each) for each in re.findall(r'<p class="caveat"><strong>Caveat</strong>: (.*?)</p>', summary)},
        "warnings": set(_items(r'<ul class="warnings".*?</ul>', summary)),
        "basis": "; ".join(_items(r'<details class="basis".*?</details>', summary)),
    }
    fits = '<div class="short"' not in summary
    if fits:
        facts["step"] = _plain(_first(r'<p class="step">(.*?) per step', summary).replace("<span", " <span"))
        bound = _plain(_first(r'<p class="bound">(.*?)</p>', summary))
        facts["bound"] = bound[:1].lower() + bound[1:] if not bound.startswith("GPU") else bound
        chips = [
            _plain(each)
            for each in re.findall(r"<span class=\"chip[^>]*>(.*?)</span>", _first(r'id="verdict">(.*?)</p>', summary))
        ]
        facts["headline"] = ", ".join(each if each.startswith("GPU") else each[:1].lower() + each[1:] for each in chips)
        sure = _plain(_first(r'<p class="sure">(.*?)</p>', summary))
    else:
        sure = _plain(_first(r"With room it would take (.*?)</p>", summary))
        facts["step"] = sure.partition(" per step")[0]
        facts["memory"] = _plain(_first(r"needs (.*?)</p>", summary)).partition(" (")[0]
    span = re.search(r"(?:90 % interval|range with the recorded steps) (\S+ m?s)", sure)
    if span is not None:
        facts["interval"] = span[1]
    names = {"Samples/s": "samples/s", "Tokens/s": "tokens/s", "MFU": "mfu", "HFU": "hfu"}
    facts |= {names[name]: value for name, value in listed.items() if name in names}
    ends = {"Memory": ("memory", " on "), "Power": ("power", " of "), "Cost": ("cost", " per step")}
    facts |= {ends[name][0]: value.partition(ends[name][1])[0] for name, value in listed.items() if name in ends}
    return facts


def differences(first: Facts, second: Facts) -> dict[str, tuple[Any, Any]]:
    """Facts of both that are not equal, whatever types the JSON of each has for a list."""
    return {name: (first[name], second[name]) for name in first.keys() & second.keys() if first[name] != second[name]}


def _items(of_list: str, text: str) -> list[str]:
    found = re.search(of_list, text)
    return [] if found is None else [_plain(each) for each in re.findall(r"<li>(.*?)</li>", found[0])]


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} on the page"
    return found[1]


def _plain(markup: str) -> str:
    return html.unescape(_TAGS.sub("", markup)).replace("\u00a0", " ").strip()
