"""Laws of the form for matrix products, on a small fit."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.compute as pc
import pytest

from steptime._hardware.device import FOLDER, read_device
from steptime._models.engine.constants import constants_of
from steptime._models.engine.splits import FIT, TEST
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms.matmul import MAIN, PATTERNS, REDUCE, MatmulForm
from steptime._models.kernels.forms.matmul.mixture import (
    COMPANY,
    FACTORS,
    NO_SHARES,
    KernelMixture,
    MatmulConstants,
    ProductShares,
    inputs_of,
)
from steptime._models.kernels.forms.matmul.products import GROUPS, TILES, Products, groups_of, of_questions, upright
from steptime._models.kernels.question import Question
from steptime.errors import InputError
from steptime_lab.fit.kernels.matmul import candidate, fit, modelled, pattern_of
from steptime_lab.fit.kernels.matmul_training import Schedule
from steptime_lab.measurements.kernels import Row, rows_of
from steptime_lab.measurements.shipped import shipped

H200 = read_device("h200")
DEVICE = constants_of(H200, "matmul", MatmulConstants)
SHORT = Schedule(epochs=4, batch=64, further=2, trees=20)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every 24th measured product on a whole GPU, and every sixth on shares."""
    table = shipped("kernels")
    table = table.filter(pc.equal(table["family"].cast("string"), "matmul"))
    whole, shares = (table.filter(pc.equal(pc.equal(table["share"], 1), side)) for side in (True, False))
    found = [*rows_of(whole.take(np.arange(0, whole.num_rows, 24))), *rows_of(shares.take(np.arange(0, shares.num_rows, 6)))]
    return [row for row in found if modelled(row.question.call)]


@pytest.fixture(scope="module")
def fitted(rows: list[Row]) -> MatmulForm:
    return fit(rows, 0, H200, SHORT)


def mm(m: int, k: int, n: int, dtype: str = "float32", **settings: object) -> Question:
    """A plain product."""
    return Question(Call("aten::mm.default", (TensorArg((m, k), dtype), TensorArg((k, n), dtype))), **settings)  # type: ignore[arg-type]


def transposed(rows: int, columns: int, dtype: str) -> TensorArg:
    """A matrix stored by columns."""
    return TensorArg((rows, columns), dtype, strides=(1, rows))


def test_a_short_fit_already_beats_a_constant_rate_on_unseen_products(fitted: MatmulForm, rows: list[Row]) -> None:
    unseen = [row for row in rows if row.split == TEST and row.question.share == 1]
    measured = np.array([row.time_ns for row in unseen])
    products = of_questions([row.question for row in unseen])
    predicted = np.array([answer.time_ns for answer in fitted.answers([row.question for row in unseen])])
    work = (products.m * products.n * products.k * products.batch).astype(float)
    constant = 2000 + work * np.median(measured / work)
    assert np.median(np.abs(predicted / measured - 1)) < 0.2 < np.median(np.abs(constant / measured - 1))


def test_a_file_of_its_arrays_loads_the_same_form(fitted: MatmulForm, rows: list[Row]) -> None:
    file = io.BytesIO()
    np.savez(file, **pack(fitted))  # type: ignore[arg-type]
    file.seek(0)
    questions = [row.question for row in rows[:200]]
    with np.load(file, allow_pickle=False) as arrays:
        again = unpack(MatmulForm, dict(arrays))
    assert again.answers(questions) == fitted.answers(questions)


def test_rows_of_validation_and_test_change_nothing(rows: list[Row]) -> None:
    quick = Schedule(epochs=1, batch=1024, further=1, trees=2)
    whole = [row for row in rows if row.question.share == 1]
    seen = [row for row in whole if row.split == FIT]
    first, second = pack(fit(whole, 1, H200, quick)), pack(fit(seen, 1, H200, quick))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_an_answer_does_not_depend_on_what_else_is_asked(fitted: MatmulForm, rows: list[Row]) -> None:
    questions = [row.question for row in rows[:50]]
    together = fitted.answers(questions)
    for question, answer in zip(questions, together, strict=True):
        assert fitted.answers([question])[0].time_ns == pytest.approx(answer.time_ns, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (Call("aten::mm.default", (TensorArg((4, 5)), TensorArg((6, 7)))), "cannot be multiplied"),
        (Call("aten::mm.default", (TensorArg((4, 5, 6)), TensorArg((6, 7)))), "2 dimensions"),
        (Call("aten::mm.default", (TensorArg((4, 5)),)), "1 arguments"),
        (Call("aten::mm.default", (TensorArg((4, 5), "float64"), TensorArg((5, 6), "float64"))), "float64"),
        (Call("aten::bmm.default", (TensorArg((2, 4, 5)), TensorArg((3, 5, 6)))), "cannot be multiplied"),
        (Call("aten::addmm.default", (TensorArg((9,)), TensorArg((4, 5)), TensorArg((5, 6)))), "cannot be added"),
        (Call("aten::relu.default", (TensorArg((9,)),)), "no matrix product"),
    ],
)
def test_calls_that_cannot_be_raise_one_line_with_the_op(fitted: MatmulForm, call: Call, word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        fitted.answers([Question(call)])
    assert call.op in str(error.value) and "\n" not in str(error.value)


def test_products_without_elements_launch_nothing_and_those_without_terms_fill(fitted: MatmulForm) -> None:
    nothing, fill = fitted.answers([mm(0, 8, 8), mm(8, 0, 8)])
    assert nothing.launches == ()
    assert [launch.kernel for launch in fill.launches] == ["fill"]


def test_groups_go_by_the_least_aligned_leading_dimension() -> None:
    sizes = ((64, 64, 64), (64, 64, 60), (64, 64, 61), (64, 63, 64), (1, 64, 61))
    half = of_questions([mm(*size, "bfloat16") for size in sizes])
    assert [GROUPS[place] for place in groups_of(half)] == ["half_16", "half_4", "half_2", "half_2", "vector"]
    tf32 = of_questions([mm(64, 64, 64, tf32=True), mm(64, 64, 62, tf32=True)])
    assert [GROUPS[place] for place in groups_of(tf32)] == ["tf32_aligned", "tf32_odd"]


def test_a_vector_from_the_left_is_the_same_product_from_the_right(fitted: MatmulForm) -> None:
    lying = Question(Call("aten::mm.default", (TensorArg((1, 700)), TensorArg((700, 333)))))
    standing = Question(Call("aten::mm.default", (transposed(333, 700, "float32"), TensorArg((700, 1)))))
    first, second = (upright(of_questions([one])) for one in (lying, standing))
    assert (first.m, first.n, first.layout) == (second.m, second.n, second.layout)
    answers = fitted.answers([lying, standing])
    assert answers[0].time_ns == pytest.approx(answers[1].time_ns, rel=1e-5)


def test_eight_bits_are_sixteen_with_half_the_inner_length() -> None:
    x, weight = TensorArg((4096, 2048), "float8"), TensorArg((1024, 2048), "float8").transposed()
    half, half_weight = TensorArg((4096, 1024), "bfloat16"), TensorArg((1024, 1024), "bfloat16").transposed()
    scale = TensorArg(())
    products = of_questions(
        [
            Question(Call("aten::_scaled_mm.default", (x, weight, scale, scale))),
            Question(Call("aten::mm.default", (half, half_weight))),
        ]
    )
    for name, column in vars(products).items():
        assert column[0] == column[1], name


def test_groups_of_rows_with_a_matrix_each_are_a_batch_of_even_groups() -> None:
    rows, experts, ends = TensorArg((64, 32), "bfloat16"), TensorArg((4, 32, 48), "bfloat16"), TensorArg((4,), "int32")
    dy = TensorArg((64, 48), "bfloat16")
    operands = ((rows, experts, ends), (rows.transposed(), dy, ends))
    products = of_questions([Question(Call("aten::_grouped_mm.default", each)) for each in operands])
    assert np.stack([products.batch, products.m, products.n, products.k]).T.tolist() == [[4, 16, 48, 32], [4, 32, 48, 16]]


def test_products_of_groups_follow_the_tiles_of_each_group() -> None:
    models = KernelModels.load(FOLDER / "h200.npz")

    def time_of(each: int, groups: int, inner: int = 1024, outer: int = 2048) -> float:
        x, ends = TensorArg((groups * each, inner), "bfloat16"), TensorArg((groups,), "int32")
        weight = TensorArg((groups, outer, inner), "bfloat16").transposed()
        (answered,) = models.ask([Question(Call("aten::_grouped_mm.default", (x, weight, ends)))])
        assert answered.answer is not None
        return answered.answer.time_ns

    assert time_of(257, 32) == pytest.approx(
        time_of(512, 32), rel=0.1
    )  # two tiles of 128 rows, and two blocks beside each other
    assert time_of(512, 64) > 1.7 * time_of(512, 32) > 3 * time_of(256, 16)
    assert 600 < 2 * 4096 * 16 * 4096 * 4096 / time_of(4096, 16, 4096, 4096) / 1e3 < 850  # TFLOP/s of the largest
    assert 8e3 < time_of(16, 4, 256, 256) < 12e3  # what preparing the groups takes


def test_copies_follow_rules(fitted: MatmulForm) -> None:
    left, right = TensorArg((8, 32, 64)), TensorArg((8, 64, 48))
    odd = TensorArg((8, 32, 64), strides=(1, 8, 256))
    added = Call("aten::baddbmm.default", (TensorArg((8, 32, 48)), left, right), (("beta", 1),))
    ignored = Call("aten::baddbmm.default", (TensorArg((8, 32, 48)), left, right), (("beta", 0),))
    row = Call("aten::addmm.default", (TensorArg((48,)), TensorArg((32, 64)), TensorArg((64, 48))))
    narrow = Call("aten::addmm.default", (TensorArg((1,)), TensorArg((32, 64)), TensorArg((64, 1))))
    strided = Call("aten::bmm.default", (odd, right))
    counts = [
        [launch.kernel for launch in answer.launches].count("copy")
        for answer in fitted.answers([Question(call) for call in (added, ignored, row, narrow, strided)])
    ]
    assert counts == [1, 0, 0, 1, 1]


def test_measured_launches_are_named_most_of_the_time(fitted: MatmulForm, rows: list[Row]) -> None:
    whole = [row for row in rows if row.question.share == 1]
    answers = fitted.answers([row.question for row in whole])
    right = [len(answer.launches) == len(row.kernel_names) for answer, row in zip(answers, whole, strict=True)]
    assert np.mean(right) > 0.55


def test_launch_times_add_up_and_are_positive(fitted: MatmulForm, rows: list[Row]) -> None:
    for answer in fitted.answers([row.question for row in rows[:400]]):
        assert all(launch.time_ns > 0 for launch in answer.launches)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_far_outside_time_grows_like_work_and_says_so(fitted: MatmulForm, dtype: str) -> None:
    big, deeper, wider = fitted.answers(
        [mm(2**16, 2**16, 2**16, dtype), mm(2**16, 2**17, 2**16, dtype), mm(2**16, 2**16, 2**17, dtype)]
    )
    assert not big.inside
    assert deeper.time_ns / big.time_ns == pytest.approx(2, rel=0.1)
    assert wider.time_ns / big.time_ns == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("side", ["m", "n", "k", "batch"])
@pytest.mark.parametrize(("dtype", "tf32"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_doubling_a_side_never_saves_more_than_a_tenth(fitted: MatmulForm, side: str, dtype: str, tf32: bool) -> None:
    questions = []
    for length in 64 * 2 ** np.arange(8):
        size = {"m": 256, "n": 256, "k": 256, "batch": 4, side: int(length)}
        left, right = ((size["batch"], size[rows], size[columns]) for rows, columns in (("m", "k"), ("k", "n")))
        questions.append(Question(Call("aten::bmm.default", (TensorArg(left, dtype), TensorArg(right, dtype))), tf32=tf32))
    times = [answer.time_ns for answer in fitted.answers(questions)]
    assert all(larger > 0.9 * smaller for smaller, larger in pairwise(times))


def test_measured_products_are_inside(fitted: MatmulForm, rows: list[Row]) -> None:
    seen = [row.question for row in rows if row.split == FIT and row.question.share == 1]
    assert all(answer.inside for answer in fitted.answers(seen))


def test_warm_operands_never_cost_more_than_a_little(fitted: MatmulForm) -> None:
    cold = [mm(size, 1024, 1024, "bfloat16") for size in (64, 256, 1024, 4096)]
    warm = [replace(question, warm=True) for question in cold]
    for before, after in zip(fitted.answers(cold), fitted.answers(warm), strict=True):
        assert after.time_ns < 1.05 * before.time_ns


def test_a_large_product_takes_longer_the_smaller_its_part_of_a_gpu(fitted: MatmulForm) -> None:
    whole = mm(4096, 4096, 4096, "bfloat16")
    shares = [replace(whole, share=share, others="same") for share in (2, 4, 8)]
    times = [answer.time_ns for answer in fitted.answers([whole, *shares])]
    assert all(smaller > 1.4 * larger for larger, smaller in pairwise(times))


def test_whole_gpus_have_all_of_everything() -> None:
    shares = ProductShares(np.array([2.0, 8.0]), np.full((2, len(COMPANY), len(FACTORS)), 0.3))
    share, others = np.array([1, 2, 4]), np.array([0, 2, 1])
    factors = shares.factors(share, others)
    assert np.array_equal(factors[:, 0], np.ones(len(FACTORS)))
    assert np.log(factors[0, 1:]) == pytest.approx([0.3 - np.log(2), 0.3 - np.log(4)])
    assert inputs_of(of_questions([mm(8, 8, 8)]), 0, shares, DEVICE).sms == DEVICE.sms


def test_torch_and_numpy_give_the_same_times(fitted: MatmulForm, rows: list[Row]) -> None:
    torch = pytest.importorskip("torch")
    from steptime_lab.fit.kernels import matmul_training as training

    whole = of_questions([row.question for row in rows if row.question.share == 1])
    for group, name in enumerate(GROUPS):
        inputs = inputs_of(whole.take(groups_of(whole) == group), group, NO_SHARES, DEVICE)
        prefix = f"{name}.whole."
        network = {key.removeprefix(prefix): value for key, value in pack(fitted).items() if key.startswith(prefix)}
        tiles = TILES[group]
        along = [torch.tensor([float(getattr(tile, side)) for tile in tiles]) for side in ("along_n", "along_m")]
        own = {key: torch.tensor(value) for key, value in network.items()}
        clipped = replace(
            inputs, choice=np.clip(inputs.choice, network["choice_low"][:, None], network["choice_high"][:, None])
        )
        found = training._forward(torch, own, training._tensors(torch, clipped), *along)[0].numpy()
        assert KernelMixture(group, network).ask(inputs).log_ns == pytest.approx(found, abs=0.02)


def test_kernel_names_say_tile_split_and_role() -> None:
    nvjet = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
    simt = (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(cutlass_80_simt_sgemm_128x64_8x5_nt_align1::Params)"
    )
    reduce = "void cublasLt::splitKreduce_kernel<32, 16, int, float>"
    half, single = GROUPS.index("half_16"), GROUPS.index("fp32")
    tile = TILES[half][candidate((nvjet,), half)]
    assert (tile.kind, tile.along_n, tile.along_m) == ("nvjet", 128, 256)
    whole, split = candidate((simt,), single), candidate((simt, reduce), single)
    assert split == whole + len(TILES[single])
    assert PATTERNS[pattern_of((simt, reduce))] == (MAIN, REDUCE)
    assert pattern_of(("Memcpy DtoD (Device -> Device)", nvjet)) == 0


def test_most_measured_products_launch_as_many_kernels_as_predicted() -> None:
    """Those of the split `test`, which nothing was fitted to."""
    table = shipped("kernels")
    rows = [row for row in rows_of(table, families=["matmul"], shares=[1]) if row.split == TEST and not row.question.warm]
    rows = [row for row in rows if modelled(row.question.call)][::4]
    answers = KernelModels.load(FOLDER / "h200.npz").forms["matmul"].answers([row.question for row in rows])
    right = [len(answer.launches) == len(row.kernel_names) for answer, row in zip(answers, rows, strict=True)]
    assert np.mean(right) > 0.93


def test_a_counter_of_tiles_is_cleared_beyond_two_waves_of_them() -> None:
    """Far below and far above, whichever tile is taken."""
    form = KernelModels.load(FOLDER / "h200.npz").forms["matmul"]
    few, many = (Question(Call("aten::mm.default", (_half(rows, 1024), _half(1024, 3072)))) for rows in (2048, 8192))
    assert [len(answer.launches) for answer in form.answers([few, many])] == [1, 2]


def test_a_batch_longer_than_a_grid_is_made_in_turns() -> None:
    form = KernelModels.load(FOLDER / "h200.npz").forms["matmul"]
    products = [Question(Call("aten::bmm.default", (TensorArg((batch, 13, 13)),) * 2)) for batch in (65_535, 65_536, 10**15)]
    whole, in_turns, huge = ([each.kernel for each in answer.launches].count(MAIN) for answer in form.answers(products))
    assert (whole, in_turns) == (1, 2)
    assert huge <= 64


def _half(*shape: int) -> TensorArg:
    return TensorArg(shape, "bfloat16")


@pytest.mark.parametrize("copied", [False, True])
def test_a_product_of_complex_numbers_is_four_of_real_ones(copied: bool) -> None:
    def product(dtype: str) -> Products:
        right = TensorArg((256, 256, 64), dtype).permuted(2, 0, 1) if copied else TensorArg((64, 256, 256), dtype)
        left = TensorArg((64, 256, 256), dtype)
        return of_questions([Question(Call("aten::bmm.default", (left, right)))])

    real, pairs = product("float32"), product("complex64")
    assert pairs.m * pairs.n * pairs.k == 4 * real.m * real.n * real.k
    assert pairs.copied == real.copied == copied
    # As many bytes twice as wide.
    assert (real.copied_bytes < pairs.copied_bytes <= 2 * real.copied_bytes).all() or not copied
