"""What recordings show of generated kernels: axes from the numbers, what is summed along or across."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from steptime._ops.generated import LOAD, STORE, GeneratedKernel, coarse, kind_named
from steptime._ops.generated_calls import INNER, OUTER, kernel_called
from steptime._program.load import load
from steptime._program.program import Signature, Tensor, Value
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


def tensor(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, dtype, strides or tuple(math.prod(shape[at + 1 :]) for at in range(len(shape))))


def called(name: str, *inputs: Value) -> GeneratedKernel:
    kernel = kernel_called(name, Signature(inputs))
    assert kernel is not None
    return kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_add_0", "pointwise"),
        ("triton_red_fused_sum_3", "reduction"),
        ("triton_per_fused_native_layer_norm_1", "persistent_reduction"),
        ("triton_for_fused_2", "foreach"),
        ("triton_tem_fused_mm_2", "template"),
        ("swish_forward", ""),
    ],
)
def test_names_say_kinds(name: str, kind: str) -> None:
    assert kind_named(name) == kind


def test_what_a_capture_wrote_is_taken_as_it_is() -> None:
    written = called("triton_poi_fused_add_0", tensor(64), tensor(64), 64)
    reads: Value = (tensor(64),)
    assert called("triton_poi_fused_add_0", reads, reads, written.text()) == written


def test_nothing_is_known_of_a_kernel_without_tensors_and_of_templates() -> None:
    assert kernel_called("triton_poi_fused_add_0", Signature()) is None
    assert kernel_called("triton_tem_fused_mm_0", Signature((tensor(8, 8), tensor(8, 8)))) is None


def test_tensors_are_read_but_the_last() -> None:
    kernel = called("triton_poi_fused_add_0", tensor(8, 64), tensor(64), tensor(8, 64, dtype="bfloat16"), 512)
    assert [access.kind for access in kernel.accesses] == [LOAD, LOAD, STORE]
    assert [access.item_bytes * access.elements for access in kernel.accesses] == [2048, 256, 1024]
    assert kernel.elements == 512


def test_axes_of_two_numbers_and_numbers_that_are_no_axes() -> None:
    both = (tensor(32, 48), tensor(48, 32))
    assert called("triton_poi_fused_clone_0", *both, 32, 48).elements == 32 * 48  # y and x
    assert called("triton_poi_fused_clone_0", *both, 7, 32 * 48).elements == 32 * 48  # a symbolic size and x


def test_a_table_that_is_larger_than_what_is_read_of_it_is_read_in_places() -> None:
    kernel = called("triton_poi_fused_embedding_0", tensor(16, dtype="int64"), tensor(9000, 32), tensor(16, 32), 512)
    table = kernel.accesses[1]
    assert table.indirect
    assert table.elements == 512


def test_sums_go_along_rows_or_across_them() -> None:
    along = called("triton_per_fused_sum_0", tensor(128, 512), tensor(128, 1), 128, 512)
    across = called("triton_red_fused_sum_0", tensor(4096, 512), tensor(1, 512, 32, strides=(512 * 32, 1, 512)), 512 * 32, 128)
    views = called("triton_red_fused_sum_0", tensor(64, 64, 3, 8), tensor(1, 24, 32, strides=(24 * 32, 1, 24)), 24 * 32, 128)
    assert (along.hint, across.hint, views.hint) == (INNER, OUTER, OUTER)
    for kernel in (along, across, views):
        assert kernel.accesses[0].elements == kernel.elements
        assert kernel.reductions == 1


def test_every_generated_kernel_of_a_recording_is_described() -> None:
    program = load([EXAMPLES / "gpt_compiled"]).programs[0]
    found = 0
    for name, signature in zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True):
        if program.names[name].startswith("triton_"):
            kernel = kernel_called(program.names[name], program.signatures[signature])
            assert kernel is not None
            assert GeneratedKernel.read(kernel.text()) == kernel
            tensors = [value for value in program.signatures[signature].inputs if isinstance(value, Tensor)]
            assert all(access.elements <= tensors[access.argument].numel for access in kernel.accesses)
            found += 1
    assert found > 300


def test_a_description_that_its_tensors_contradict_is_refused() -> None:
    one = tensor(1024)
    for extent in (1 << 50, 0):
        kernel = replace(coarse("triton_poi_fused_add_0", [one], [one]), extents=(("x", extent),))
        with pytest.raises(InputError, match=r"triton_poi_fused_add_0: its description has .* its tensors have 2,048 elements"):
            kernel_called(kernel.name, Signature(((one,), (one,), kernel.text())))


def test_a_description_without_accesses_goes_by_its_tensors() -> None:
    one = tensor(1024)
    text = GeneratedKernel("triton_poi_fused_add_0").text()
    kernel = kernel_called("triton_poi_fused_add_0", Signature(((one,), (one,), text)))
    assert kernel == coarse("triton_poi_fused_add_0", [one], [one])
