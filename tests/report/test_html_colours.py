"""The colours of families: any two stay apart, for eyes that see all colours and for those that do not, in light and dark."""

from __future__ import annotations

import re
from importlib import resources
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from steptime._ops.families import WorkFamily

Values = npt.NDArray[np.float64]

# Linear RGB as eyes without one kind of cone see it: Machado, Oliveira and Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency" (2009), severity 1.0.
EYES = {
    "all": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
# Linear sRGB to CIE XYZ (IEC 61966-2-1), over the white point D65.
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])
# A CIE 1976 distance of 2.3 is just noticeable (Mahy and others, 1994); bars a pixel wide need several times that.
APART = 12.0


def colours(scheme: int) -> dict[str, str]:
    style = resources.files("steptime._report").joinpath("page", "style.css").read_text(encoding="utf-8")
    found = {name: (light, dark) for name, light, dark in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style)}
    return {family.label: found[family.label][scheme] for family in WorkFamily}


def lab(colour: str, eyes: Values) -> Values:
    """CIE L*a*b* of a colour as these eyes see it."""
    encoded = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(eyes @ linear, 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", list(EYES))
def test_any_two_families_stay_apart(scheme: int, eyes: str) -> None:
    seen = {family: lab(colour, EYES[eyes]) for family, colour in colours(scheme).items()}
    near = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2)}
    assert min(near.values()) >= APART, min(near, key=lambda pair: near[pair])
