"""Training steps of the models that `models.toml` names: each built by its library, and given data of its kind."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

MODELS = Path(__file__).with_name("models.toml")
DEVICE = "cuda"
TOKENS, CLASSES = 128, 1000
Step = Callable[[], None]
Losses = Callable[[torch.nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model of the list, or a variant of one."""

    library: str
    model: str
    kind: str  # what it is given
    variant: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.library, self.model, self.variant)))


def cases(path: Path = MODELS) -> Iterator[Case]:
    """Every model of the list, then its variants."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind, names in listed["torchvision"].items():
        yield from (Case("torchvision", name, kind) for name in names)
    yield from (Case("timm", name, "image") for name in listed["timm"]["names"])
    for row in listed["transformers"]:
        for variant in ("", *row.get("variants", ())):
            yield Case("transformers", row["model"], row["input"], variant, row.get("arguments", {}))


def model_of(case: Case) -> tuple[torch.nn.Module, Losses]:
    """A model, and its loss of data of its kind."""
    return {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}[case.library](case)


def step_of(case: Case) -> tuple[Step, int]:
    """The training step of a model, to be called while it is captured, and the model's own count of parameters."""
    model, losses = model_of(case)
    model.to(DEVICE)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=case.library == "timm"):
            loss = losses(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, sum(parameter.numel() for parameter in model.parameters())


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE)


def _labels(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape).to(DEVICE)


def _torchvision(case: Case) -> tuple[torch.nn.Module, Losses]:
    import torchvision

    make = {"segmentation": "segmentation.", "video": "video.", "detection": "detection."}.get(case.kind, "") + case.model
    found: Any = torchvision.models
    for part in make.split("."):
        found = getattr(found, part)
    inner = {"weights_backbone": None} if case.kind in ("segmentation", "detection") else {}
    return found(weights=None, **inner), {"detection": _detection, "segmentation": _segmentation}.get(
        case.kind, _classification
    )(case)


def _classification(case: Case) -> Losses:
    size = 299 if case.model.startswith("inception") else 224
    shape = (8, 3, size, size)
    if case.kind == "video":
        side = 224 if case.model.startswith(("mvit", "swin3d", "s3d")) else 112
        shape = (4, 3, 16, side, side)
    x, y = _images(*shape), _labels(400 if case.kind == "video" else CLASSES, shape[0])

    def losses(model: torch.nn.Module) -> torch.Tensor:
        out = model(x)
        heads = out if isinstance(out, tuple) else (out,)
        return sum((cross_entropy(head, y) for head in heads), torch.zeros((), device=DEVICE))

    return losses


def _segmentation(_: Case) -> Losses:
    x, y = _images(4, 3, 256, 256), _labels(21, 4, 256, 256)
    return lambda model: cross_entropy(model(x)["out"], y)


def _detection(_: Case) -> Losses:
    images = [torch.rand(3, 480, 640).to(DEVICE) for _ in range(2)]
    corner = torch.rand(4, 2) * 200
    boxes = torch.cat([corner, corner + 50], dim=1)
    masks = torch.zeros(4, 480, 640, dtype=torch.uint8)
    target = {"boxes": boxes, "labels": torch.ones(4, dtype=torch.int64), "masks": masks}
    targets = [{key: value.to(DEVICE) for key, value in target.items()} for _ in images]
    return lambda model: sum(model(images, targets).values())


def _timm(case: Case) -> tuple[torch.nn.Module, Losses]:
    import timm

    model = timm.create_model(case.model, pretrained=False, num_classes=CLASSES)
    x, y = _images(8, *model.default_cfg["input_size"]), _labels(CLASSES, 8)

    def losses(model: torch.nn.Module) -> torch.Tensor:
        out = model(x)
        heads = out if isinstance(out, tuple) else (out,)
        return sum((cross_entropy(head, y) for head in heads), torch.zeros((), device=DEVICE))

    return model, losses


def _transformers(case: Case) -> tuple[torch.nn.Module, Losses]:
    import transformers

    kind = getattr(transformers, case.model)
    config = kind.config_class(**case.arguments)
    implementation = {"attn_implementation": case.variant} if case.variant in ("eager", "sdpa", "flex_attention") else {}
    model = kind._from_config(config, **implementation)
    if case.variant == "checkpointing":
        model.gradient_checkpointing_enable()
    given = _GIVEN[case.kind](config)
    if case.variant == "mask":
        mask = torch.ones(given["input_ids"].shape, dtype=torch.long)
        mask[1:, -17:] = 0
        given["attention_mask"] = mask.to(DEVICE)
    return model, lambda model: model(**given).loss


def _text(config: Any) -> dict[str, Any]:
    ids = _labels(config.vocab_size, 4, TOKENS)
    return {"input_ids": ids, "labels": ids}


def _seq2seq(config: Any) -> dict[str, Any]:
    return {"input_ids": _labels(config.vocab_size, 4, TOKENS), "labels": _labels(config.vocab_size, 4, 64)}


def _side(config: Any) -> int:
    size = getattr(config, "image_size", None) or 224
    return int(size if isinstance(size, int) else size[0])


def _pixels(config: Any, count: int = 8) -> torch.Tensor:
    return _images(count, 3, _side(config), _side(config))


def _image_text(config: Any) -> dict[str, Any]:
    text = getattr(config, "text_config", config)
    length = min(getattr(text, "max_position_embeddings", 40), 77)
    pixels = _pixels(getattr(config, "vision_config", config))
    ids = _labels(text.vocab_size, 8, length)
    given = {"input_ids": ids, "pixel_values": pixels}
    return {**given, "return_loss": True} if config.model_type in ("clip", "siglip") else {**given, "labels": ids}


def _boxes(config: Any) -> dict[str, Any]:
    side = _side(config) if not isinstance(getattr(config, "image_size", None), list) else 512
    labels = [{"class_labels": _labels(2, 4), "boxes": torch.rand(4, 4).to(DEVICE)} for _ in range(2)]
    return {"pixel_values": _images(2, 3, side, side), "labels": labels}


def _spectrogram(config: Any) -> dict[str, Any]:
    if config.model_type == "whisper":
        return {"input_features": _images(4, config.num_mel_bins, 3000), "labels": _labels(config.vocab_size, 4, 64)}
    return {"input_features": _images(4, 500, 80), "labels": _labels(config.vocab_size, 4, 64)}


def _series(config: Any) -> dict[str, Any]:
    channels = config.num_input_channels
    return {
        "past_values": _images(32, config.context_length, channels),
        "future_values": _images(32, config.prediction_length, channels),
    }


_GIVEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "text": _text,
    "text-class": lambda config: {"input_ids": _labels(config.vocab_size, 4, TOKENS), "labels": _labels(2, 4)},
    "seq2seq": _seq2seq,
    "image": lambda config: {"pixel_values": _pixels(config), "labels": _labels(2, 8)},
    "image-alone": lambda config: {"pixel_values": _pixels(config)},
    "image-pixels": lambda _: {"pixel_values": _images(2, 3, 512, 512), "labels": _labels(2, 2, 512, 512)},
    "image-text": _image_text,
    "image-boxes": _boxes,
    "speech": lambda config: {"input_values": _images(4, 64_000), "labels": _labels(config.vocab_size, 4, 20)},
    "spectrogram": _spectrogram,
    "spectrogram-class": lambda config: {
        "input_values": _images(4, config.max_length, config.num_mel_bins),
        "labels": _labels(2, 4),
    },
    "series": _series,
    "video": lambda config: {
        "pixel_values": _images(2, config.num_frames, 3, _side(config), _side(config)),
        "labels": _labels(2, 2),
    },
}
