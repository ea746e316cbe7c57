"""For all tests: a torchvision whose library does not load must not keep transformers from being imported, and what a test
switches on in PyTorch is as before afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from steptime._capture.vision_ops import declared_when_imported

declared_when_imported()


@pytest.fixture(autouse=True)
def switches_as_before() -> Iterator[None]:
    """Of tests that run after PyTorch was imported."""
    if "torch" not in sys.modules:
        yield
        return
    from steptime._capture.switches import restored

    with restored():
        yield
