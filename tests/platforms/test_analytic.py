"""Devices that nobody ran: another device's times, carried over by data sheets, in proportion to what each call is bound by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.platforms.counting_lookups import counting_device, looked_up

from steptime._hardware.description import Quantity
from steptime._hardware.device import CARRIED_KINDS, FOLDER, device_names, read_device
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.call import Call, TensorArg, flop_of
from steptime._models.kernels.question import LaunchTime, Question
from steptime._models.lookups.question import Lookup
from steptime._platforms.device import Device, KernelEstimate
from steptime._platforms.transfer import Product, Transfer, Work, carried_kind, product_ns, reached_flop_per_s, works_of
from steptime.errors import InputError

ANALYTIC = ("a100", "a100-40gb", "h100")


def half(*shape: int) -> TensorArg:
    return TensorArg(shape, "bfloat16")


PRODUCT = Question(Call("aten::mm.default", (half(8192, 8192), half(8192, 8192))))
SUM = Question(Call("aten::add.Tensor", (TensorArg((1 << 26,)), TensorArg((1 << 26,)))))
TINY = Question(Call("aten::add.Tensor", (TensorArg((4,)), TensorArg((4,)))))
ATTENTION = Question(
    Call("aten::_scaled_dot_product_flash_attention.default", (half(8, 16, 2048, 64),) * 3 + (0.0, False), written=())
)
UNHEARD = Question(Call("aten::never_heard_of.default", (TensorArg((1 << 20,)),)))
LOOKUP = Lookup("embedding_bag", "forward", (looked_up(1000, 500),))


def transfer(name: str) -> Transfer:
    there = read_device(name)
    assert there.transfer is not None
    return Transfer(read_device(there.models), there, there.transfer)


def estimate(name: str, question: Question) -> KernelEstimate:
    return Device.load(name).estimates([question])[0]


def slower(name: str, question: Question) -> float:
    return estimate(name, question).estimate.time_ns / estimate("h200", question).estimate.time_ns


@pytest.mark.parametrize("name", [name for name in device_names() if read_device(name).analytic])
@pytest.mark.parametrize("question", [PRODUCT, SUM, TINY, ATTENTION])
def test_a_carried_time_says_that_it_is_analytic_and_is_less_sure(name: str, question: Question) -> None:
    there, here = estimate(name, question), estimate("h200", question)
    assert there.estimate.source is Source.ANALYTIC
    assert there.estimate.inside == here.estimate.inside
    assert "h200" in there.why
    assert [one.kernel for one in there.launches] == [one.kernel for one in here.launches]
    assert sum(one.time_ns for one in there.launches) == pytest.approx(there.estimate.time_ns)
    width = [one.estimate.high_ns / one.estimate.low_ns for one in (there, here)]
    assert there.estimate.low_ns < there.estimate.time_ns < there.estimate.high_ns
    assert width[0] > width[1]


def test_what_computes_takes_as_long_on_the_same_chip_and_what_moves_memory_longer_by_its_bandwidth() -> None:
    assert slower("h100", PRODUCT) == pytest.approx(1.0)
    assert slower("h100", SUM) == pytest.approx(4.8 / 3.35, rel=0.02)
    assert slower("h100", TINY) == pytest.approx(1.0, rel=0.01)


def test_an_older_chip_is_slower_by_the_limit_that_binds() -> None:
    assert slower("a100", PRODUCT) == pytest.approx(989.5 / 312, rel=0.1)
    assert slower("a100", SUM) == pytest.approx(4.8 / 2.039, rel=0.03)
    assert slower("a100-40gb", SUM) == pytest.approx(4.8 / 1.555, rel=0.03)
    # Latency goes with the clock, instructions with the clock and the SMs.
    assert 1.98 / 1.41 * 0.99 < slower("a100", TINY) < 132 * 1.98 / (108 * 1.41) * 1.01


def test_attention_goes_by_what_it_reaches_not_by_peaks() -> None:
    assert 1.3 < slower("a100", ATTENTION) < 1.8
    assert slower("h100", ATTENTION) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("name", [name for name in device_names() if read_device(name).analytic])
def test_attention_never_beats_the_peak(name: str) -> None:
    for kind in ("flash", "cudnn", "efficient"):
        operands = (half(4, 32, 8192, 128),) * 3
        question = Question(Call(f"aten::_scaled_dot_product_{kind}_attention.default", (*operands, 0.0, False), written=()))
        found = estimate(name, question)
        if found.estimate.source is Source.ANALYTIC:
            limits = read_device(name)
            assert flop_of(question.call) / found.estimate.time_ns * 1e9 < limits.peak_flop_per_s["float16"].value


def test_a_device_carried_to_itself_keeps_its_times() -> None:
    same = replace(transfer("h100"), there=read_device("h200"))
    for question in (PRODUCT, SUM, TINY, ATTENTION):
        here = estimate("h200", question)
        found = same.launches(question, here.family, here.launches)
        assert [one.time_ns for one in found] == pytest.approx([one.time_ns for one in here.launches])


def test_products_go_by_what_is_published_and_others_by_the_fraction_of_their_peak() -> None:
    l4, h100 = read_device("l4"), read_device("h100")
    assert l4.transfer is not None
    assert reached_flop_per_s(l4, "float32") == l4.transfer.product_flop_per_s["float32"].value
    fraction = l4.transfer.product_flop_per_s["bfloat16"].value / l4.peak_flop_per_s["bfloat16"].value
    assert reached_flop_per_s(l4, "tf32") == pytest.approx(fraction * l4.peak_flop_per_s["tf32"].value)
    assert reached_flop_per_s(h100, "bfloat16") == h100.reach.peak.value * h100.peak_flop_per_s["bfloat16"].value


def test_every_kind_of_kernel_has_its_own_interval() -> None:
    short, longer = Estimate(1e3, 1e3, 1e3, Source.FITTED, True), Estimate(1e6, 1e6, 1e6, Source.FITTED, True)
    way = transfer("a100")
    widths = {kind: way.estimate(longer, 1e6, kind).high_ns / 1e6 for kind in CARRIED_KINDS}
    assert widths == pytest.approx({kind: way.basis.interval_factor[kind].value for kind in CARRIED_KINDS})
    assert way.estimate(short, 1e3, "short").low_ns == pytest.approx(1e3 / widths["short"])
    questions = {"product": PRODUCT, "memory": SUM, "short": TINY, "attention": ATTENTION}
    assert {kind: carried_kind(one, estimate("a100", one).estimate.time_ns) for kind, one in questions.items()} == {
        kind: kind for kind in questions
    }


def test_a_device_with_better_memory_is_never_slower() -> None:
    plain = transfer("a100")
    better = replace(plain, there=replace(plain.there, bandwidth_bytes_per_s=Quantity(3e12, "made up")))
    for question in (PRODUCT, SUM, TINY):
        here = estimate("h200", question)
        times = [sum(one.time_ns for one in way.launches(question, here.family, here.launches)) for way in (better, plain)]
        assert times[0] <= times[1]


def test_what_is_in_the_cache_is_not_read_from_memory() -> None:
    both = (TensorArg((1 << 20,)), TensorArg((1 << 20,)))
    warm = Question(Call("aten::add.Tensor", both, written=(0, 1)), warm=True)
    launch = (LaunchTime("vectorized_elementwise_kernel", 5e3),)
    (hot,), (cold,) = (
        works_of(warm, "elementwise", launch, read_device("h200"), 1.0),
        works_of(replace(warm, warm=False), "elementwise", launch, read_device("h200"), 1.0),
    )
    assert hot.cache_bytes == 2 * (4 << 20)
    assert hot.memory_bytes == 4 << 20  # the result
    assert (cold.cache_bytes, cold.memory_bytes) == (0, 3 * (4 << 20))
    # A cache of a tenth keeps none of it.
    assert works_of(warm, "elementwise", launch, read_device("h200"), 0.1)[0].cache_bytes == 0


def test_copies_from_the_host_go_by_the_link() -> None:
    copied = Work(host_bytes=64e6)
    way = transfer("a100")
    assert way.book_ns(way.there, copied) > 1.9 * way.book_ns(way.here, copied)


def test_whole_waves_never_end_before_divided_ones() -> None:
    limits = read_device("a100")
    for m in range(128, 4096, 416):
        one = Product(m, 1024, 1024, 1)
        divided, whole = (product_ns(limits, one, 250e12, 5e12, whole_waves=waves) for waves in (False, True))
        assert divided <= whole * (1 + 1e-12)
        assert divided >= 1e9 * 2 * m * 1024 * 1024 / 250e12 * (1 - 1e-12)


def test_one_tile_more_than_the_sms_takes_a_second_wave() -> None:
    limits = read_device("a100")
    full, over = (
        product_ns(limits, Product(128, 256 * tiles, 8192, 1), 250e12, 5e12, whole_waves=True) for tiles in (108, 109)
    )
    assert over > 1.2 * full


def test_an_op_without_a_model_gets_the_roofline_of_its_own_device() -> None:
    found = [estimate(name, UNHEARD) for name in ("h200", "h100", "a100")]
    assert all(one.estimate.source is Source.FALLBACK for one in found)
    times = [one.estimate.time_ns for one in found]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("name", ("h200", *ANALYTIC))
def test_a_call_that_launches_nothing_takes_nothing(name: str) -> None:
    found = estimate(name, Question(Call("aten::add.Tensor", (TensorArg((0,)), TensorArg((0,))))))
    assert (found.estimate.time_ns, found.launches) == (0, ())
    assert found.estimate.source is (Source.FITTED if name == "h200" else Source.ANALYTIC)


def test_lookups_are_carried_over_alike() -> None:
    plain = counting_device("h200").lookup_estimates([LOOKUP])[0]
    carried = replace(counting_device("a100"), transfer=transfer("a100")).lookup_estimates([LOOKUP])[0]
    assert carried.estimate.source is Source.ANALYTIC
    assert carried.estimate.inside == plain.estimate.inside
    assert 1.3 < carried.estimate.time_ns / plain.estimate.time_ns < 2.5
    assert sum(one.time_ns for one in carried.launches) == pytest.approx(carried.estimate.time_ns)


@pytest.mark.parametrize("name", ANALYTIC)
def test_shipped_lookup_models_answer_for_it(name: str) -> None:
    (there,), (here,) = (Device.load(one).lookup_estimates([LOOKUP]) for one in (name, "h200"))
    assert there.estimate.source is Source.ANALYTIC
    assert there.estimate.time_ns >= here.estimate.time_ns


def test_a_users_device_can_take_shipped_models(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text((FOLDER / "a100.toml").read_text().replace('"a100"', '"mine"'))
    mine = Device.load(str(tmp_path / "mine.toml")).estimates([SUM])[0]
    assert mine.estimate == estimate("a100", SUM).estimate


def test_models_of_a_device_that_has_none_are_refused(tmp_path: Path) -> None:
    text = (FOLDER / "a100.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('transferred_from = "h200"', 'transferred_from = "h100"'))
    with pytest.raises(InputError, match="takes the models of h100, which has none of its own"):
        Device.load(str(tmp_path / "mine.toml"))
