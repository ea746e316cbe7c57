"""Real traces with something taken out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def without_identity(source: Path, target: Path) -> Path:
    """A copy of a Kineto trace that does not say which rank wrote it."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    document.pop("distributedInfo", None)
    target.write_text(json.dumps(document), encoding="utf-8")
    return target
