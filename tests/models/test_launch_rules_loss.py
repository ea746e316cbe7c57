"""Laws of what losses launch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.models.launching import rules_of

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import MEMCPY, REDUCE, SCATTER_GATHER

launches = rules_of("loss")

NONE, MEAN = 0, 1


def kernels(call: Call) -> list[str]:
    return [launch.kernel for launch in launches(call)]


@given(st.integers(1, 100_000), st.integers(1, 60_000))
def test_the_threads_of_one_block_meet_every_label(rows: int, classes: int) -> None:
    (launch,) = launches(Call("aten::nll_loss_forward.default", (TensorArg((rows, classes)), TensorArg((rows,), "int64"))))
    threads, passes = launch.facts["threads"], launch.grids[0][1]
    assert threads in (32, 64, 128, 256, 512, 1024)
    assert (passes - 1) * threads < rows <= passes * threads
    assert sum(one.nbytes for one in launch.reads) <= rows * (32 + 8), "one sector of scores and one label each"


def test_a_loss_that_is_not_reduced_has_no_reduction() -> None:
    x = TensorArg((4096, 8))
    for op, reduced in (("aten::mse_loss.default", [REDUCE]), ("aten::binary_cross_entropy.default", [REDUCE, MEMCPY])):
        rest = () if "mse" in op else (None,)
        assert kernels(Call(op, (x, x, *rest, MEAN)))[1:] == reduced
        assert len(kernels(Call(op, (x, x, *rest, NONE)))) == 1


def test_labels_of_a_loss_that_is_not_reduced_are_met_each_by_itself() -> None:
    x, labels, losses = TensorArg((100_000, 16)), TensorArg((100_000,), "int64"), TensorArg((100_000,))
    (forward,) = launches(Call("aten::nll_loss_forward.default", (x, labels, None, NONE, -100)))
    zeros, backward = launches(Call("aten::nll_loss_backward.default", (losses, x, labels, None, NONE, -100, losses)))
    assert forward.kernel == backward.kernel == SCATTER_GATHER and zeros.writes[0].shape == x.shape
    assert forward.writes[0].shape == labels.shape and forward.grids[0][0] > 1


def test_a_gradient_of_a_mean_is_read_once_for_all_elements() -> None:
    x, one = TensorArg((4096, 8)), TensorArg(())
    launch = launches(Call("aten::mse_loss_backward.default", (one, x, x, MEAN)))[-1]
    assert launch.reads[2].nbytes == 4
    assert launch.reads[2].shape == x.shape
