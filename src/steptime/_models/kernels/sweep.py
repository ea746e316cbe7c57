"""Sweeps: the calls that are measured to model a family, declared as what varies and the forms of call made of it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar, cast

import numpy as np

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._units import MIB, dtype_bytes

T = TypeVar("T")
Shape = tuple[int, ...]
# A call as text: `mm(*x, weight)`, `clamp_min(*x, 0)`, `add.Tensor(*x, *y, alpha=alpha)`. Names stand for what was drawn or for
# dtypes, anything else for itself; an argument with a star has just been written when a step makes the call; one given by name
# is left out where it is None. An op without a namespace is ATen's, one without an overload the default.
Form = str
# What was drawn, by the names that forms have for it.
Drawn = Mapping[str, Argument]
# Draws what varies in a call; None where the sizes make none that is worth its GPU time.
Drawing = Callable[["Draw"], Drawn | None]
# Share, what varies, and one form, several that are picked evenly, or several with shares.
Group = tuple[float, Drawing, *tuple[Form | tuple[float, Form], ...]]

# Arguments of one call where a sweep would go beyond; its outputs are never larger than that again, so that everything stays
# below 2 GiB.
MOST_BYTES = 800 * MIB
# The largest single activation; a kernel that reads and writes it lasts a fifth of a millisecond on an H200.
USUAL_BYTES = 320 * MIB
USUAL_ELEMENTS = USUAL_BYTES // 4

FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
_FLOAT_SHARES = (0.45, 0.35, 0.2)

# Hidden sizes of BERT, GPT-2, XLNet, T5 and Llama models of all sizes.
HIDDEN = (128, 256, 312, 384, 512, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120)
# GPT-2, BERT, Llama 2, T5, XLNet; the last three are GPT-2's, BERT's and Whisper's rounded up for alignment.
VOCABULARIES = (50257, 30522, 32000, 32128, 50304, 30528, 51872)
SEQUENCES = (64, 128, 197, 256, 384, 512, 1024, 2048)


class Draw:
    """Sizes as real models have them, dtypes and layouts: at random, but the same from the same seed."""

    def __init__(self, rng: np.random.Generator, forms: Sequence[Form | tuple[float, Form]]) -> None:
        self.rng = rng
        self._forms = forms
        self._form: Form | None = None

    def form(self, among: Sequence[Form | tuple[float, Form]] = ()) -> Form:
        """The form of the call, one of these or of its group's. It is picked when it is first asked for, else last."""
        if self._form is None:
            forms = among or self._forms
            shares = [form[0] for form in forms if isinstance(form, tuple)]
            texts = [form if isinstance(form, str) else form[1] for form in forms]
            self._form = self.pick(texts, shares or None) if len(texts) > 1 else texts[0]
        return self._form

    def pick(self, choices: Sequence[T], shares: Sequence[float] | None = None) -> T:
        """One of the choices."""
        if shares is None:
            return choices[self.below(len(choices))]
        edges = np.cumsum(shares)
        return choices[min(int(np.searchsorted(edges, self.rng.random() * edges[-1], side="right")), len(choices) - 1)]

    def chance(self, share: float) -> bool:
        """True in this share of draws."""
        return bool(self.rng.random() < share)

    def below(self, number: int) -> int:
        """An integer from 0 to number - 1."""
        return int(self.rng.integers(number))

    def log_int(self, low: int, high: int) -> int:
        """An integer, log-uniform from low to high, both included."""
        return min(high, max(low, int(math.exp(self.rng.uniform(math.log(low), math.log(high + 1))))))

    def size(self, low: int, high: int) -> int:
        """A dimension: mostly a multiple of 8 to 128, else a power of two, else whatever comes (odd ones too)."""
        value = self.log_int(low, high)
        kind = self.rng.random()
        if kind < 0.3:
            return value
        step = 2 ** round(math.log2(value)) if kind < 0.5 else self.pick((8, 16, 32, 64, 128))
        return min(high, max(low, step * max(1, round(value / step))))

    def width(self, low: int = 8, high: int = 8192) -> int:
        """A feature dimension: a model's hidden size, four times one, or any size."""
        if self.chance(0.4):
            named = self.pick(HIDDEN) * self.pick((1, 1, 3, 4))
            if low <= named <= high:
                return named
        return self.size(low, high)

    def tokens(self, high: int = 32768) -> int:
        """Rows of an activation: samples times sequence, or samples alone."""
        if self.chance(0.5):
            rows = self.pick(SEQUENCES) * self.log_int(1, 64)
            if rows <= high:
                return rows
        return self.size(16, high)

    def floating(self) -> str:
        """A dtype of activations: single precision most, then bfloat16, then half."""
        return self.pick(FLOATS, _FLOAT_SHARES)

    def activation_shape(self, most_elements: int = USUAL_ELEMENTS) -> Shape:
        """The shape of an activation or gradient: rows of features, sequences, heads or images, or a flat buffer."""
        kind = self.rng.random()
        if kind < 0.35:
            shape: Shape = (self.tokens(), self.width())
        elif kind < 0.6:
            shape = (self.log_int(1, 128), self.pick(SEQUENCES), self.width())
        elif kind < 0.75:
            side = self.pick((7, 14, 17, 28, 35, 56, 112))
            shape = (self.log_int(1, 256), self.size(16, 1024), side, side)
        elif kind < 0.85:
            sequence = self.pick(SEQUENCES)
            shape = (self.log_int(1, 64), self.pick((4, 8, 12, 16, 20)), sequence, sequence)
        else:
            shape = (self.log_int(256, most_elements),)
        return shape if math.prod(shape) <= most_elements else (self.log_int(1024, most_elements),)

    def activation(self, values: str = "normal") -> TensorArg:
        """An activation or gradient."""
        return TensorArg(self.activation_shape(), self.floating(), values=values)


def indices(shape: Shape, high: int) -> TensorArg:
    """64-bit integers from 0 to high - 1."""
    return TensorArg(shape, "int64", high=high)


class KernelSweep:
    """Distinct calls to which each group contributes in proportion to its share, spread evenly over the sweep.

    `most_bytes` are those of the arguments of a call; larger ones are left out.
    """

    def __init__(self, *groups: Group, most_bytes: int | None = None) -> None:
        self._draws = [(share, drawing, forms) for share, drawing, *forms in groups]
        self._most_bytes = most_bytes
        texts = [form if isinstance(form, str) else form[1] for _, _, forms in self._draws for form in forms]
        self.ops = tuple(dict.fromkeys(map(op_of, texts)))

    def __call__(self, rng: np.random.Generator, count: int) -> Iterator[Call]:
        """So many calls; the same generator gives the same."""
        total = sum(share for share, _, _ in self._draws)
        shares = [share / total for share, _, _ in self._draws]
        credit = [0.0] * len(shares)
        seen: set[Call] = set()
        for _ in range(40 * count):
            if len(seen) >= count:
                return
            credit = [left + share for left, share in zip(credit, shares, strict=True)]
            chosen = max(range(len(credit)), key=credit.__getitem__)
            call = self._call(rng, chosen)
            if call is None:
                credit = [left - share for left, share in zip(credit, shares, strict=True)]
                continue
            credit[chosen] -= 1.0
            if call not in seen:
                seen.add(call)
                yield call

    def _call(self, rng: np.random.Generator, number: int) -> Call | None:
        _, drawing, forms = self._draws[number]
        draw = Draw(rng, forms)
        drawn = drawing(draw)
        if drawn is None:
            return None
        call = call_of(draw.form(), drawn)
        return call if self._most_bytes is None or call.nbytes <= self._most_bytes else None


def op_of(form: Form) -> str:
    """The op of a form, with its namespace and overload."""
    op = form.partition("(")[0]
    return ("" if "::" in op else "aten::") + op + ("" if "." in op else ".default")


def call_of(form: Form, drawn: Drawn) -> Call:
    """The call that a form becomes."""
    parsed = _parsed(form)
    args = tuple(_argument(node.value if isinstance(node, ast.Starred) else node, drawn) for node in parsed.args)
    named = sorted((str(keyword.arg), _argument(keyword.value, drawn)) for keyword in parsed.keywords)
    written = tuple(index for index, node in enumerate(parsed.args) if isinstance(node, ast.Starred))
    return Call(op_of(form), args, tuple(item for item in named if item[1] is not None), written)


@cache
def _parsed(form: Form) -> ast.Call:
    call = ast.parse("call" + form[form.index("(") :], mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def _argument(node: ast.expr, drawn: Drawn) -> Argument:
    if isinstance(node, ast.Name):
        return DtypeArg(node.id) if node.id not in drawn and dtype_bytes(node.id) else drawn[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_argument(item, drawn) for item in node.elts)
    return cast(Argument, node.value if isinstance(node, ast.Constant) else ast.literal_eval(node))
