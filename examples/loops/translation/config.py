"""Settings of the translation example."""

from dataclasses import dataclass


@dataclass
class Config:
    source_words: int = 19214
    target_words: int = 10837
    width: int = 512
    heads: int = 8
    pairs: int = 1200
    length: int = 48
    batch_size: int = 64
    epochs: int = 1
    lr: float = 1e-4
