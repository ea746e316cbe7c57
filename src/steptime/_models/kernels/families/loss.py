"""Losses, forward and backward: negative log-likelihood (the second half of cross-entropy), binary cross-entropy, squares."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    indices,
    log_int,
    mixture,
    pick,
    scalar,
    size,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.loss import launches

_MOST_ELEMENTS = USUAL_BYTES // 4
# Values of `reduction` in ATen, and what nn.CrossEntropyLoss ignores unless told.
_NONE, _MEAN, _SUM = 0, 1, 2
_IGNORED = -100


def _labelled(rng: Rng) -> tuple[TensorArg, TensorArg]:
    """Log-probabilities of rows, and their labels. Under autocast the loss runs in single precision."""
    classes = pick(rng, (*VOCABULARIES, 2, 10, 1000)) if chance(rng, 0.6) else size(rng, 2, 65536)
    rows = log_int(rng, 8, min(65536, _MOST_ELEMENTS // classes))
    dtype = "float32" if chance(rng, 0.7) else floating(rng)
    return TensorArg((rows, classes), dtype), indices((rows,), classes)


def _nll(rng: Rng) -> Call:
    log_probabilities, labels = _labelled(rng)
    return Call("aten::nll_loss_forward.default", (log_probabilities, labels, None, _MEAN, _IGNORED))


def _nll_backward(rng: Rng) -> Call:
    log_probabilities, labels = _labelled(rng)
    total = scalar(log_probabilities.dtype, "positive")
    arguments = (scalar(log_probabilities.dtype), log_probabilities, labels, None, _MEAN, _IGNORED, total)
    return Call("aten::nll_loss_backward.default", arguments)


def _pixels(rng: Rng) -> tuple[TensorArg, TensorArg]:
    side, classes = log_int(rng, 16, 512), pick(rng, (2, 19, 21, 150))
    batch = log_int(rng, 1, max(1, min(64, _MOST_ELEMENTS // (classes * side * side))))
    return TensorArg((batch, classes, side, side)), indices((batch, side, side), classes)


def _nll_pixels(rng: Rng) -> Call:
    return Call("aten::nll_loss2d_forward.default", (*_pixels(rng), None, _MEAN, _IGNORED))


def _nll_pixels_backward(rng: Rng) -> Call:
    log_probabilities, labels = _pixels(rng)
    arguments = (scalar(), log_probabilities, labels, None, _MEAN, _IGNORED, scalar(values="positive"))
    return Call("aten::nll_loss2d_backward.default", arguments)


def _outcomes(rng: Rng) -> Shape:
    """One click probability per sample as in DLRM, or several labels."""
    rows = log_int(rng, 32, 262144)
    return pick(rng, ((rows,), (rows, 1), (rows, log_int(rng, 2, 128))))


def _reduction(rng: Rng) -> int:
    return pick(rng, (_MEAN, _SUM, _NONE), (0.8, 0.1, 0.1))


def _bce(rng: Rng) -> Call:
    shape, dtype, reduction = _outcomes(rng), floating(rng), _reduction(rng)
    probability = TensorArg(shape, dtype, values="unit")
    if chance(rng, 0.5):
        return Call("aten::binary_cross_entropy.default", (probability, probability, None, reduction))
    arguments = (TensorArg(shape, dtype), probability, None, None, reduction)
    return Call("aten::binary_cross_entropy_with_logits.default", arguments)


def _bce_backward(rng: Rng) -> Call:
    shape, dtype, reduction = _outcomes(rng), floating(rng), _reduction(rng)
    probability = TensorArg(shape, dtype, values="unit")
    dy = TensorArg(shape, dtype) if reduction == _NONE else scalar(dtype)
    return Call("aten::binary_cross_entropy_backward.default", (dy, probability, probability, None, reduction), written=(0, 1))


def _values(rng: Rng) -> Shape:
    rows = log_int(rng, 32, 65536)
    return pick(rng, ((rows,), (rows, log_int(rng, 1, 512))))


def _mse(rng: Rng) -> Call:
    x = TensorArg(_values(rng), floating(rng))
    return Call("aten::mse_loss.default", (x, x, _reduction(rng)))


def _mse_backward(rng: Rng) -> Call:
    x, reduction = TensorArg(_values(rng), floating(rng)), _reduction(rng)
    dy = x if reduction == _NONE else scalar(x.dtype)
    return Call("aten::mse_loss_backward.default", (dy, x, x, reduction), written=(0, 1))


FAMILY = Family(
    name="loss",
    ops=(
        *("aten::nll_loss_forward.default", "aten::nll_loss_backward.default"),
        *("aten::nll_loss2d_forward.default", "aten::nll_loss2d_backward.default"),
        *("aten::binary_cross_entropy.default", "aten::binary_cross_entropy_backward.default"),
        "aten::binary_cross_entropy_with_logits.default",
        *("aten::mse_loss.default", "aten::mse_loss_backward.default"),
    ),
    sweep=mixture(
        *((1.5, _nll), (1.5, _nll_backward), (0.3, _nll_pixels), (0.3, _nll_pixels_backward)),
        *((1.4, _bce), (0.8, _bce_backward), (0.7, _mse), (0.7, _mse_backward)),
    ),
    weight=3.0,
    rules=launches,
)
