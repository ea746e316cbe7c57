"""What the names of kernels say of ops, and the tensors of NCCL's ops of collectives."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steptime._program.formats.kineto.arguments import read_signatures
from steptime._program.load import load
from steptime._program.program import Program, tensors_in

EXAMPLES = Path(__file__).parents[2] / "examples"
SGEMM, TF32 = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x16"


def changed(tmp_path: Path, source: str, change: Callable[[dict[str, Any]], None]) -> Program:
    content = json.loads(gzip.decompress((EXAMPLES / source).read_bytes()))
    for event in content["traceEvents"]:
        change(event)
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    return load([tmp_path]).programs[0]


def of_products(program: Program) -> set[bool | None]:
    rows = [row for row, name in enumerate(program.ops.name.tolist()) if program.names[name] in ("aten::mm", "aten::addmm")]
    return {program.signatures[program.ops.signature[row]].switches.tf32 for row in rows if program.ops.signature[row] >= 0}


@pytest.mark.parametrize(("kernel", "tf32"), [(SGEMM, False), (TF32, True), ("ampere_s1688gemm_128x128_ldg8_f2f_tn", True)])
def test_products_compute_in_what_their_kernels_are_called_after(tmp_path: Path, kernel: str, tf32: bool) -> None:
    def named(event: dict[str, Any]) -> None:
        if event.get("cat") == "kernel" and "gemm" in event["name"]:
            event["name"] = kernel

    assert of_products(changed(tmp_path, "prefetch_sync/rank0.kineto.json.gz", named)) == {tf32}


def test_kernels_of_half_precision_say_nothing_of_tf32() -> None:
    assert of_products(load([EXAMPLES / "gpt_fsdp2_small"]).programs[0]) == {None}


def test_lists_have_the_type_of_their_kernels() -> None:
    program = load([EXAMPLES / "gpt_fsdp2_small"]).programs[0]
    launching = set(program.calls.op[program.works.call].tolist())
    lists = [
        tensor.dtype
        for row in launching
        if row >= 0 and program.ops.signature[row] >= 0
        for value in program.signatures[program.ops.signature[row]].inputs
        if isinstance(value, tuple)
        for tensor in tensors_in(value)
    ]
    assert lists and set(lists) <= {"float32", "bfloat16", "int64"}


def test_collectives_have_the_sizes_of_nccls_ops_where_kernels_have_none(tmp_path: Path) -> None:
    def bare(event: dict[str, Any]) -> None:
        if event.get("cat") == "kernel" or event.get("name") == "record_param_comms":
            for key in ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size"):
                event.get("args", {}).pop(key, None)
        if str(event.get("name", "")).startswith("nccl:") and "cat" in event:
            event["args"] = {**event.get("args", {}), "Input Dims": [[1024, 8]], "Input type": ["float"]}

    program = changed(tmp_path, "gpt_fsdp2_small/rank0.kineto.json.gz", bare)
    assert {each.bytes_in for each in program.collectives if each.sequence >= 0} == {1024 * 8 * 4}


def test_numbers_of_python_are_no_tensors_of_the_device() -> None:
    (signature,) = read_signatures([(b"[[8, 4], [], []]", b'["float", "double", "float"]', b"", b"")])
    assert [tensor.device for tensor in tensors_in(signature.inputs)] == [None, "cpu", None]


def test_numbers_and_truths_are_read_as_pytorch_writes_them() -> None:
    concrete = b'["0.", "[True, False, True]", "[0.5, 1.]", "1e-05", "mean", "[768]"]'
    dims = b"[[], [], [], [], [], []]"
    (signature,) = read_signatures(
        [(dims, b'["Scalar", "ScalarList", "ScalarList", "Scalar", "", "ScalarList"]', b"", concrete)]
    )
    assert signature.inputs == (0.0, (True, False, True), (0.5, 1.0), 1e-05, "mean", (768,))
    assert isinstance(signature.inputs[0], float)
