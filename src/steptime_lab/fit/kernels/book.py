"""What the fits of forms by the book share: launch lists from measured calls, and kernel names that tell code apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms.lists import Lists, Reals


def fit_lists(
    kinds: Sequence[str],
    places: Reals,
    kernels: Sequence[Sequence[str]],
    times_ns: Sequence[Sequence[float]],
    levels: Floats,
    states: Sequence[int] | None = None,
) -> Lists:
    """Keeps the lists; of calls of one kind that lie at one place, the first, and the first level of each state."""
    seen: dict[tuple[str, bytes], dict[int, int]] = {}  # where -> state -> row
    for row, (kind, place) in enumerate(zip(kinds, places, strict=True)):
        seen.setdefault((kind, place.tobytes()), {}).setdefault(states[row] if states is not None else 0, row)
    firsts = {next(iter(by_state.values())): by_state for by_state in seen.values()}
    kept = sorted(firsts, key=lambda row: (kinds[row], row))
    count = 1 + max(states) if states is not None and len(states) else 1
    # A list that was not measured in some state says what it does in the one that it was measured in.
    chosen = np.array([[firsts[row].get(state, row) for state in range(count)] for row in kept], dtype=int).reshape(-1, count)
    shares = [_shares(kernels[row], times_ns[row]) for row in kept]
    names = np.array([kinds[row] for row in kept], dtype=np.str_)
    held, bounds = np.unique(names, return_index=True)
    kernel_names, listed, counts, which = _distinct([tuple(kernels[row]) for row in kept])
    return Lists(
        kinds=held,
        places=np.ascontiguousarray(places[kept].T),
        names=kernel_names,
        which=which,
        levels=levels[chosen].astype(places.dtype),
        kernels=listed,
        shares=np.concatenate([*shares, np.zeros(0)]).astype(places.dtype),
        bounds=np.append(bounds, len(kept)),
        kernel_counts=counts,
        share_counts=np.array([len(times_ns[row]) for row in kept], dtype=np.int32),
    )


def _shares(kernels: Sequence[str], times_ns: Sequence[float]) -> Reals:
    """Of the time of a list, what each kernel takes; in a long one, those of one name take alike, which takes less to keep."""
    shares = np.asarray(times_ns) / sum(times_ns)
    if len(shares) <= _LONG:
        return shares
    names = np.asarray(kernels)
    return np.array([shares[names == name].mean() for name in kernels])


_LONG = 8
_Ints = npt.NDArray[np.int32]


def _distinct(lists: Sequence[tuple[str, ...]]) -> tuple[npt.NDArray[np.str_], _Ints, _Ints, _Ints]:
    """The names that occur, the distinct lists behind each other, how long each is, and which of them each list is."""
    seen: dict[tuple[str, ...], int] = {}
    which = np.array([seen.setdefault(kernels, len(seen)) for kernels in lists], dtype=np.int32)
    names = sorted({name for kernels in seen for name in kernels})
    code = {name: number for number, name in enumerate(names)}
    listed = np.array([code[name] for kernels in seen for name in kernels], dtype=np.int32)
    return np.asarray(names, dtype=np.str_), listed, np.array([len(kernels) for kernels in seen], dtype=np.int32), which


def short_name(name: str) -> str:
    """A kernel's name cut to what tells code apart: no arguments, no template, no tile."""
    text = name.removeprefix("void ")
    if match := re.match(r"(sm\d+_xmma_[a-z]+)", text):
        return match.group(1)
    if match := re.match(r"(nvjet_sm\d+)", text):
        return match.group(1)
    if match := re.search(r"<(cutlass_\w+?)_\d+x\d+", text):
        return match.group(1)
    if text.startswith("_ZN"):
        return "cutlass_implicit_gemm"
    return re.sub(r"[<(].*", "", text.replace("(anonymous namespace)::", "")).split("::")[-1].strip()
