"""More pairs, of other models, recorded after what-ifs were settled: what they get wrong here was not tuned away."""

from __future__ import annotations

from typing import Any

import torch
from changed_cases import Change, optimizer_of
from step_cases import Step
from torch import nn
from torch.nn import functional


class TextClassifier(nn.Module):
    """Words, a bidirectional LSTM, the last state to a class."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers (batch, sequence) to logits."""
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


class Encoder(nn.Module):
    """PyTorch's own encoder layers over tokens, the mean to a class."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers (batch, sequence) to logits."""
        return self.head(self.layers(self.words(tokens)).mean(dim=1))


class Factors(nn.Module):
    """A tower per side over bags of ids, and their product."""

    def __init__(self, rows: int, width: int, tables: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.left, self.right = (
            nn.Sequential(nn.Linear(width * tables // 2, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (batch, tables, bag) to a logit in each of two columns."""
        sums = [bag(ids[:, at]) for at, bag in enumerate(self.bags)]
        half = len(sums) // 2
        score = (self.left(torch.cat(sums[:half], 1)) * self.right(torch.cat(sums[half:], 1))).sum(1)
        return torch.stack([score, -score], 1)


def model_of(config: dict[str, Any]) -> nn.Module:
    """The network that a configuration names."""
    name = config["model"]
    if name == "lstm":
        return TextClassifier(20_000, config["width"], 20)
    if name == "encoder":
        return Encoder(30_000, config["width"], config["layers"], 20, config.get("dropout", 0.0))
    if name == "factors":
        return Factors(100_000, 64, 8)
    import torchvision.models

    return getattr(torchvision.models, name)(num_classes=20)


def inputs_of(config: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Random images, tokens or ids."""
    batch = config["batch"]
    if config["model"] in ("lstm", "encoder"):
        return torch.randint(20_000, (batch, config["length"]), device=device)
    if config["model"] == "factors":
        return torch.randint(100_000, (batch, 8, 10), device=device)
    return torch.randn(batch, 3, 224, 224, device=device)


def supervised(config: dict[str, Any], device: torch.device) -> Step:
    """Forward, cross entropy, backward, optimiser; keys say precision, optimiser, reading of the loss, a CUDA graph."""
    torch.set_float32_matmul_precision("high" if config.get("tf32") else "highest")
    torch.manual_seed(1)
    with device:
        model = model_of(config)
        labels = torch.randint(20, (config["batch"],))
    if config["model"] == "factors":
        labels = labels % 2
    optimizer = optimizer_of(model.parameters(), config)
    inputs = inputs_of(config, device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            device.type, torch.bfloat16, enabled=bool(config.get("bf16")), cache_enabled=not config.get("graph")
        ):
            loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if config.get("reads_loss"):
            loss.item()
        optimizer.step()

    return replayed(step) if config.get("graph") else step


def replayed(step: Step) -> Step:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def again() -> None:
        graph.replay()
        assert step  # what the graph reads lives as long as what captured it

    return again


ENCODER = {"model": "encoder", "width": 512, "layers": 6, "length": 256}

CHANGES_AGAIN = (
    Change("vit_tf32", "tf32 on", supervised, {"model": "vit_b_16", "batch": 32}, {"tf32": True}, steps=15),
    Change("lstm_batch", "batch = 512", supervised, {"model": "lstm", "width": 512, "length": 100, "batch": 128},
           {"batch": 512}),
    Change("resnet18_batch", "batch = 384", supervised, {"model": "resnet18", "batch": 96, "bf16": True, "optimizer": "sgd"},
           {"batch": 384}),
    Change("encoder_dropout", "op:native_dropout remove", supervised, {**ENCODER, "batch": 128, "bf16": True, "dropout": 0.1},
           {"dropout": 0.0}),
    Change("encoder_bf16", "bf16 on", supervised, {**ENCODER, "batch": 64}, {"bf16": True}, steps=15),
    Change("factors_loss_read", "sync remove", supervised, {"model": "factors", "batch": 16384, "reads_loss": True},
           {"reads_loss": False}),
    Change("encoder_graph", "cuda graph", supervised, {**ENCODER, "batch": 8, "bf16": True, "optimizer": "sgd"},
           {"graph": True}),
    Change("convnext_fused", "optimizer fused", supervised, {"model": "convnext_tiny", "batch": 24, "bf16": True},
           {"implementation": "fused"}),
    Change("factors_fused", "optimizer fused", supervised, {"model": "factors", "batch": 4096}, {"implementation": "fused"}),
    Change("vgg_tf32", "tf32 on", supervised, {"model": "vgg11", "batch": 64, "optimizer": "sgd"}, {"tf32": True}),
)  # fmt: skip

CHANGED_AGAIN = {case.name: case for change in CHANGES_AGAIN for case in change.cases()}
