"""torchvision's own ops where its compiled library does not load, as beside a CPU build of PyTorch: it can be imported still.

Its models need the names and shapes of these ops alone. torchvision asks for them while it is imported, and scripts import it
first of all; so whoever looks for it finds them declared (`DeclaredOps`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_BOXES = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_INPUT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_BACKWARD = "Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_MAPPED = _BACKWARD.replace("rois,", "rois, Tensor channel_mapping,")
_DEFORMED = "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w"
# As torchvision declares them (torchvision/csrc/ops).
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({_BACKWARD}, {_INPUT}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align({_BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({_BACKWARD.replace('rois,', 'rois, Tensor argmax,')}, {_INPUT}) -> Tensor",
    f"ps_roi_align({_BOXES}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_MAPPED}, int sampling_ratio, {_INPUT}) -> Tensor",
    f"ps_roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_MAPPED}, {_INPUT}) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_DEFORMED}, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_DEFORMED}, SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_cuda_version() -> int",
)


class DeclaredOps(MetaPathFinder):
    """Declares the ops when torchvision is first imported; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: others find the module."""
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            found = PathFinder.find_spec(fullname)
            if found is not None and found.submodule_search_locations:
                declare(Path(next(iter(found.submodule_search_locations))))
        return None


def declared_when_imported() -> None:
    """From now on torchvision can be imported whether or not its library loads."""
    known = any(isinstance(finder, DeclaredOps) for finder in sys.meta_path)
    if not known and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, DeclaredOps())


_kept: list[Any] = []  # registrations hold as long as their object does


def declare(package: Path) -> None:
    """Loads the compiled library of the package, or declares its ops where it does not load."""
    import torch  # noqa: PLC0415 (a script may import torchvision before torch; without either, neither is needed)

    try:
        for file in package.glob("_C*.so"):
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
    except OSError:
        pass
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
    torch.library.register_autograd("torchvision::roi_align", _roi_align_backward, setup_context=_keep_roi_align, lib=library)
    _kept.append(library)
    load: Any = torch.ops.load_library

    def load_others(path: str) -> None:
        """torchvision takes its ops for loaded, and calls them."""
        if Path(path).parent != package or not Path(path).name.startswith("_C"):
            load(path)

    torch.ops.load_library = load_others  # type: ignore[method-assign]


def _keep_roi_align(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    source, rois, *rest = inputs
    ctx.save_for_backward(rois)
    ctx.shape, ctx.rest = source.shape, rest


def _roi_align_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    import torch  # noqa: PLC0415 (as above)

    scale, height, width, ratio, aligned = ctx.rest
    (rois,) = ctx.saved_tensors
    backward = torch.ops.torchvision._roi_align_backward
    return backward(gradient, rois, scale, height, width, *ctx.shape, ratio, aligned), *(None,) * 6
