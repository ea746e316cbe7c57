"""torchvision can be imported and captured where its compiled library does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from steptime._capture.vision_ops import declared_when_imported
declared_when_imported()
import torchvision
torchvision.models.resnet18(weights=None)
print(len(torchvision.ops.nms.__name__))
"""


def test_torchvision_is_imported_without_its_library() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)
    run = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "3"
