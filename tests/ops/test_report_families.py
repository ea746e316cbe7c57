"""Families: an op that is made of others claims what is inside, user-chosen names say nothing, little is left over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from steptime._ops.families import WorkFamily, kernel_family, op_family, work_families
from steptime._program.program import Calls, Ops, Program, Stream, Thread, WorkKind, Works

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "h200_mps4_dlrm"


def shared() -> Path:
    return Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared"))


def program_of(chain: list[str], kernel: str, kind: WorkKind = WorkKind.KERNEL, *, launched: bool = True) -> Program:
    """One work launched inside nested ops, given from the outermost to the innermost."""
    names = (*chain, kernel)
    depth = len(chain)
    ops = Ops.from_columns(
        {
            "name": np.arange(depth),
            "thread": [0] * depth,
            "start_ns": np.arange(depth),
            "end_ns": 100 - np.arange(depth),
            "parent": np.arange(depth) - 1,
            **{column: [0] * depth for column in ("step", "phase")},
            **{column: [-1] * depth for column in ("sequence", "signature", "node")},
        }
    )
    zero, none = [0], [-1]
    calls = Calls(zero, zero, zero, [depth - 1], zero, [50], [51], none, none, none)  # type: ignore[arg-type]
    work = {"kind": [kind], "name": [depth], "stream": zero, "call": zero if launched else none, "step": zero}
    works = Works.from_columns({**work, "start_ns": [60], "end_ns": [70], "bytes": zero, "collective": none})
    return Program(0, 1, names, (Thread(1),), (Stream(7),), ops, calls, works)


def family_of(chain: list[str], kernel: str = "anything", **options: object) -> WorkFamily:
    return WorkFamily(int(work_families(program_of(chain, kernel, **options))[0]))  # type: ignore[arg-type]


def test_an_enclosing_lookup_claims_the_gather_inside_it() -> None:
    assert family_of(["aten::_embedding_bag_backward", "aten::index_select", "aten::gather"]) is WorkFamily.EMBEDDING
    assert family_of(["aten::index_select", "aten::gather"]) is WorkFamily.INDEXING


def test_an_optimizer_step_claims_everything_inside_it() -> None:
    assert family_of(["Optimizer.step#SGD.step", "aten::add_", "aten::index_add_"]) is WorkFamily.OPTIMIZER


def test_attention_claims_its_matmuls_and_copies() -> None:
    assert family_of(["aten::scaled_dot_product_attention", "aten::matmul", "aten::bmm"]) is WorkFamily.ATTENTION


def test_below_the_claiming_families_the_innermost_op_decides() -> None:
    assert family_of(["aten::matmul", "aten::reshape", "aten::clone", "aten::copy_"]) is WorkFamily.COPY
    assert family_of(["AddmmBackward0", "aten::mm"]) is WorkFamily.MATMUL


def test_accumulating_the_gradient_of_a_convolution_is_no_convolution() -> None:
    assert family_of(["autograd::engine::evaluate_function: ConvolutionBackward0", "aten::add_"]) is WorkFamily.ELEMENTWISE
    assert family_of(["ConvolutionBackward0", "aten::convolution_backward"]) is WorkFamily.CONVOLUTION


def test_names_chosen_by_users_decide_nothing() -> None:
    assert family_of(["## forward:embedding tower ##", "aten::mm"]) is WorkFamily.MATMUL
    assert op_family("nn.Module: Embedding_3") is WorkFamily.OTHER


def test_the_kernel_name_decides_where_no_op_does() -> None:
    assert family_of(["CompiledFunction"], "volta_sgemm_128x32_nt") is WorkFamily.MATMUL
    assert family_of(["aten::mm"], "volta_sgemm_128x32_nt", launched=False) is WorkFamily.MATMUL


@pytest.mark.parametrize(
    ("kind", "family"),
    [(WorkKind.COPY, WorkFamily.COPY), (WorkKind.MEMSET, WorkFamily.MEMSET), (WorkKind.COLLECTIVE, WorkFamily.COMMUNICATION)],
)
def test_copies_memsets_and_collectives_are_what_they_are_wherever_they_occur(kind: WorkKind, family: WorkFamily) -> None:
    assert family_of(["Optimizer.step#SGD.step", "aten::copy_"], kind=kind) is family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", WorkFamily.COMMUNICATION),
        ("void split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1<float>", WorkFamily.EMBEDDING),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>", WorkFamily.OPTIMIZER),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>", WorkFamily.NORMALIZATION),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16", WorkFamily.MATMUL),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>", WorkFamily.REDUCTION),
        ("triton_poi_fused_add_mul_tanh_0", WorkFamily.GENERATED),
        ("triton_per_fused_native_layer_norm_3", WorkFamily.GENERATED),
        ("triton_red_fused__log_softmax_nll_loss_forward_7d1d2de", WorkFamily.GENERATED),
        ("triton_for_fused_1", WorkFamily.GENERATED),
        ("triton__0d1d2de", WorkFamily.GENERATED),
        ("triton_tem_fused_addmm_gelu_4", WorkFamily.MATMUL),
        ("triton_softmax_of_mine", WorkFamily.SOFTMAX_LOSS),
        ("mystery", WorkFamily.OTHER),
    ],
)
def test_kernels_are_known_by_name(name: str, family: WorkFamily) -> None:
    assert kernel_family(name) is family


def test_a_program_without_ops_or_works_has_no_families() -> None:
    empty = Program(0, 1, (), (), (), Ops.from_columns({}), Calls.from_columns({}), Works.from_columns({}))
    assert len(work_families(empty)) == 0


def test_next_to_nothing_of_the_example_is_other() -> None:
    from steptime._program.load import load

    for program in load([EXAMPLE]).programs:
        duration = program.works.end_ns - program.works.start_ns
        other = work_families(program) == WorkFamily.OTHER
        assert duration[other].sum() <= 0.03 * duration.sum(), program.source


@pytest.mark.parametrize("folder", ["dlrm_8xV100", "meta_ranking_2xV100", "h200_resnet50"])
def test_next_to_nothing_of_other_real_traces_is_other(folder: str) -> None:
    from steptime._program.load import load

    place = shared() / "data" / "traces" / folder
    if not place.exists():
        pytest.skip(f"{folder} is not here: set STEPTIME_SHARED to the folder that holds data/traces")
    for program in load([place]).programs:
        duration = program.works.end_ns - program.works.start_ns
        other = work_families(program) == WorkFamily.OTHER
        assert duration[other].sum() <= 0.03 * duration.sum(), program.source
