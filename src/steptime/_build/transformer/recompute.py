"""What of a layer is computed again in backward: nothing, all of it, some of its parts, or all but the results of some ops.

Parts are what Megatron-core calls modules (`--recompute-modules`): `attention` (its core, from turned queries and keys to what
the heads saw), `feed_forward`, and `norm` and `activation`, whose outputs are dropped as well. `selective` is Megatron's when
nothing else is said: the core of attention (Korthikanti et al., arXiv 2205.05198). `ops` is torchtitan's
selective checkpointing by op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from steptime._build.emit.tape import Keeps
from steptime._ops.catalogue import ATEN

NONE, FULL, SELECTIVE, OPS = "none", "full", "selective", "ops"
_ATTENTION, _FEED_FORWARD, _NORM, _ACTIVATION = PARTS = ("attention", "feed_forward", "norm", "activation")
DROPPED_WHOLE = (_NORM, _ACTIVATION)
# Every second product, attention and what sequence parallelism reduces (torchtitan, models/llama3/infra/parallelize.py).
TITAN_KEEPS = ("mm/2", "attention", "reduce_scatter")
_SHORT: Mapping[str, tuple[str, ...]] = {
    "attention": tuple(f"{ATEN}_scaled_dot_product_{kernels}_attention" for kernels in ("cudnn", "flash", "efficient")),
    "reduce_scatter": ("c10d::_reduce_scatter_base_",),
}


def parts_of(recompute: str | tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a layer that are computed again one by one."""
    if isinstance(recompute, tuple):
        return recompute
    return (_ATTENTION,) if recompute == SELECTIVE else ()


def keeps_of(recompute: str | tuple[str, ...], keeps: Sequence[str]) -> Keeps | None:
    """Which results a layer keeps that is computed again as a whole."""
    if recompute != OPS:
        return None
    ops: dict[str, int] = {}
    for each in keeps or TITAN_KEEPS:
        name, _, again = each.partition("/")
        ops |= dict.fromkeys(_SHORT.get(name, (f"{ATEN}{name}",)), int(again or 0))
    return Keeps(ops)


def wrong_recompute(recompute: object, keeps: object, every: int, checkpointing: bool) -> Iterator[str]:
    """What a config says that is no way to recompute."""
    if isinstance(recompute, tuple | list):
        for part in recompute:
            if part not in PARTS:
                yield f"recompute has {part!r}; expected parts of a layer: {', '.join(PARTS)}"
    elif recompute not in (NONE, FULL, SELECTIVE, OPS):
        yield f"recompute is {recompute!r}; expected none, full, selective, ops or a list of {', '.join(PARTS)}"
    if checkpointing and recompute not in (NONE, FULL):
        yield f"checkpointing is true, which is recompute = 'full', and recompute is {recompute!r}; leave checkpointing out"
    if keeps and recompute != OPS:
        yield f"recompute_keeps goes with recompute = 'ops'; recompute is {recompute!r}"
    if not isinstance(keeps, tuple | list) or not all(_is_op(each) for each in keeps):
        yield f"recompute_keeps is {keeps!r}; expected names of ops, such as ['mm/2', 'attention'] (every second mm again)"
    if every > 1 and recompute == NONE and not checkpointing:
        yield "recompute_every says which layers are computed again, and recompute is none; give recompute = 'full'"


def _is_op(value: object) -> bool:
    if not isinstance(value, str):
        return False
    name, slash, again = value.partition("/")
    return name.isidentifier() and (not slash or (again.isdecimal() and 2 <= int(again) < 1000))
