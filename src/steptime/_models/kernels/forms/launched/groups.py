"""Groups of launches that share weights, from coarse to fine: kernel, path, element size, op, dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from steptime._models.kernels.launches import Launch

# Levels that say what code runs; those below say what it computes, which changes the time of the same code only so much.
CODE_LEVELS = 3
# What launches of any name can have no part of; it also tells levels apart, by how many there are.
_JOIN = "\t"


def groups_of(op: str, launch: Launch) -> tuple[str, ...]:
    """The groups of a launch by name, coarse to fine."""
    operand = launch.reads[0] if launch.reads else launch.writes[0] if launch.writes else None
    item = str(operand.item_bytes if operand is not None else 4)
    name, names = "", []
    for level, part in enumerate((launch.kernel, launch.path, item, op, launch.tag)):
        name = f"{name}{_JOIN}{part}" if level else part
        names.append(name)
    return tuple(names)


def finest(names: tuple[str, ...], known: Mapping[str, int]) -> int:
    """The finest of the groups that is known; -1 where none is."""
    return next((known[name] for name in reversed(names) if name in known), -1)


def coded(names: tuple[str, ...]) -> tuple[str, str, str]:
    """Of the groups of a launch those whose mean error trees are told: its path, op and tag."""
    return names[1], names[3], names[4]
