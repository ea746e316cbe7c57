"""For all tests: a torchvision whose library does not load must not keep transformers from being imported."""

from __future__ import annotations

from steptime._capture.vision_ops import declared_when_imported

declared_when_imported()
