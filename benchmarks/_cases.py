"""Where the benchmarks find traces: those shipped, and public ones in a folder beside the project or at STEPTIME_SHARED."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"


@dataclass(frozen=True)
class Case:
    """A run to load and replay."""

    name: str
    paths: tuple[Path, ...]
    scored: bool = True  # counts towards the bar; the rest is listed


def public_traces() -> Path | None:
    """The folder of public traces, if it is at hand."""
    root = Path(os.environ.get("STEPTIME_SHARED", REPOSITORY.parent / "shared")) / "data" / "traces"
    return root if root.is_dir() else None


def shipped() -> list[Case]:
    """The runs shipped with the project."""
    return [Case(folder.name, (folder,)) for folder in sorted(file.parent for file in EXAMPLES.glob("*/measured.json"))]


def public() -> list[Case]:
    """Public runs. The scored set was agreed before anything was measured; the two others are listed beside it."""
    root = public_traces()
    if root is None:
        return []
    variety = root / "variety"
    return [
        Case("dlrm_8xV100", (root / "dlrm_8xV100",)),
        Case("h200_resnet50", (root / "h200_resnet50",)),
        Case("h100_qwen_inference", tuple(variety.glob("h100_Qwen*"))),
        Case("ns_resolution_resnet", tuple(variety.glob("ns_resolution*"))),
        Case("nccl_data_resnet", tuple(variety.glob("nccl_parser*"))),
        Case("mi300_resnet", tuple(variety.glob("mi300*"))),
        Case("meta_ranking_2xV100", (root / "meta_ranking_2xV100",), scored=False),
        Case("megatron_tp8_8xA100", (root / "megatron_tp8_8xA100",), scored=False),
    ]


def large_kineto_files() -> list[Path]:
    """Kineto files worth timing, largest first: public ones if at hand, else the shipped ones."""
    root = public_traces()
    if root is None:
        return sorted(EXAMPLES.rglob("*.kineto.json.gz"))
    patterns = ("meta_ranking_2xV100/*.gz", "variety/ns_*", "variety/mi300*", "variety/nccl_*", "h200_resnet50/*kineto*")
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]
