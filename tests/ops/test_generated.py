"""Descriptions of generated kernels: what sources say, and their text, whole and damaged."""

from __future__ import annotations

import ast
import json
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._ops.generated import ATOMIC, LOAD, STORE, Access, AddressTerm, GeneratedKernel, coarse
from steptime._ops.triton_index import Index, index_of
from steptime._ops.triton_source import described
from steptime._program.program import Tensor
from steptime.errors import InputError

# Written by Inductor of PyTorch 2.11 for steps of the lab's zoo on an H200.
SOURCES = sorted((Path(__file__).parent / "triton_sources").glob("*.txt"))


@cache
def kernel(name: str) -> GeneratedKernel:
    return described((Path(__file__).parent / "triton_sources" / f"{name}.txt").read_text(encoding="utf-8"))


def by_argument(of: GeneratedKernel, name: str) -> list[Access]:
    return [access for access in of.accesses if of.arguments[access.argument][0] == name]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_text_and_back(source: Path) -> None:
    found = kernel(source.stem)
    assert GeneratedKernel.read(found.text()).text() == found.text()
    assert "\n" not in found.text()
    assert found.elements > 0
    assert found.accesses


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_access_is_described(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    assert len(kernel(source.stem).accesses) == sum(text.count(f"tl.{kind}(") for kind in (LOAD, STORE, ATOMIC))


def test_a_broadcast_goes_along_its_own_axes() -> None:
    found = kernel("pointwise")
    (whole,) = by_argument(found, "in_ptr0")
    assert whole.elements == found.elements
    row, column = by_argument(found, "in_ptr1")[0], by_argument(found, "in_ptr2")[0]
    assert row.elements * column.elements == found.elements
    assert found.special == 1
    assert dict(found.functions)["erf"] == 1


def test_a_concatenation_reads_each_part_once() -> None:
    found = kernel("concatenation")
    for name in ("in_ptr0", "in_ptr1", "in_ptr2"):
        (access,) = by_argument(found, name)
        assert access.elements == found.elements // 2
        assert access.share == pytest.approx(0.5)


def test_a_split_sum_reaches_no_more_than_there_is() -> None:
    found = kernel("split_sum")
    (whole,) = by_argument(found, "in_ptr1")
    assert whole.elements * 4 == pytest.approx(9456 * 384 * 4, rel=0.02)
    assert whole.loop == 1
    assert found.reductions == 1
    assert whole.share == pytest.approx(9456 / (74 * 128), rel=1e-3)


def test_partial_sums_of_blocks_are_written() -> None:
    found = kernel("both_ways")
    (partial,) = by_argument(found, "ws_ptr")
    assert found.rows == 16
    assert partial.elements == math.ceil(found.extent("x") / 16) * found.extent("r0")
    assert not partial.indirect


def test_scattered_rows_are_indirect() -> None:
    (access,) = (each for each in kernel("scatter").accesses if each.kind == ATOMIC)
    assert access.indirect


def test_a_foreach_kernel_has_parts() -> None:
    found = kernel("foreach")
    assert found.parts == 5
    assert sum(access.share for access in found.accesses if access.kind == STORE) == pytest.approx(1)


def test_random_numbers_are_counted() -> None:
    assert kernel("dropout").random == 1
    assert kernel("layer_norm").special < 0.1  # a division and a root for each row


def test_sizes_given_as_arguments() -> None:
    source = (Path(__file__).parent / "triton_sources" / "pointwise.txt").read_text(encoding="utf-8")
    number = kernel("pointwise").elements
    dynamic = source.replace(f"    xnumel = {number}\n", "")
    assert described(dynamic, {"xnumel": 960}).elements == 960
    assert described(dynamic).elements >= number  # the next power of two, as the hints have it


@pytest.mark.parametrize("text", ["", "x = 1", "def (", "{}", "\0"])
def test_what_is_no_kernel(text: str) -> None:
    with pytest.raises(InputError, match="no Triton kernel"):
        described(text)


@given(st.sampled_from(SOURCES), st.data())
def test_damaged_sources_say_less(source: Path, data: st.DataObject) -> None:
    lines = source.read_text(encoding="utf-8").splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    damaged = data.draw(st.sampled_from(["", lines[at][::-1], lines[at].replace("tl.", "it."), lines[at].replace("tmp", "x")]))
    try:
        found = described("\n".join([*lines[:at], damaged, *lines[at + 1 :]]))
    except InputError:
        return
    assert GeneratedKernel.read(found.text()).name == found.name


@given(st.sampled_from(SOURCES), st.data())
def test_damaged_text_is_one_clear_line(source: Path, data: st.DataObject) -> None:
    text = kernel(source.stem).text()
    at = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.sampled_from(["", "-", "9" * 30, '"', "[", "null", "1.5", "{", "true"]))
    try:
        found = GeneratedKernel.read(text[:at] + put + text[at + data.draw(st.integers(0, 5)) :])
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert isinstance(found, GeneratedKernel)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7), st.integers(-9, 9))
def test_terms_are_the_addresses(first: int, second: int, third: int, offset: int) -> None:
    extent = first * second * third
    expression = f"({offset}) + 5*(x % {first}) + {first}*((x // {first}) % {second}) + 100*(x // {first * second})"
    known = {"x": Index((AddressTerm("x", 1, extent, 1),) if extent > 1 else ())}
    found = index_of(ast.parse(expression, mode="eval").body, known)
    for x in range(extent):
        parts = sum((x // term.every) % term.extent * term.stride for term in found.terms)
        assert parts + found.constant == eval(expression, {"x": x})  # noqa: S307 - the expression above


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 2000))
def test_remainders_reach_no_further_than_their_divisor(inner: int, outer: int, divisor: int) -> None:
    whole = Index((AddressTerm("r0", 1, inner, 1), AddressTerm("x", 1, outer, inner)))
    found = whole.modulo(divisor)
    assert math.prod(term.extent for term in found.terms) <= 2 * min(divisor, inner * outer)


def test_names_and_tensors_alone() -> None:
    rows, row = Tensor((64, 256), "bfloat16"), Tensor((64,), "float32")
    found = coarse("triton_red_fused_sum_3", [rows], [row])
    assert (found.kind, found.extents) == ("reduction", (("x", 64), ("r0", 256)))
    assert [access.elements for access in found.accesses] == [64 * 256, 64]
    assert coarse("triton_poi_fused_add_0", [], []).elements == 1


@pytest.mark.parametrize("damaged", [("m", [[0, 0, 17, []]]), ("m", [[0, 0, 4, [], 0, 1.5, 0, 0]]), ("f", [["exp", 1e9]])])
def test_numbers_that_no_kernel_has_are_refused(damaged: tuple[str, object]) -> None:
    content = json.loads(kernel("pointwise").text())
    with pytest.raises(InputError, match="not a generated kernel's description"):
        GeneratedKernel.read(json.dumps({**content, damaged[0]: damaged[1]}))
