"""Memory of a sharded step: a rank holds its part, whatever shapes distributed tensors say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from steptime._capture.ranks import capture_ranks
from steptime._models.memory.lifetimes import MemoryKind
from steptime._models.memory.peak import peak_memory

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama70b_capture.py"


def example() -> ModuleType:
    found = importlib.util.spec_from_file_location("llama70b_capture", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def test_a_rank_holds_its_part_of_parameters_and_state() -> None:
    made = example()
    model = made.Llama(
        layers=2, width=512, heads=8, kv_heads=8, feed_forward=1024, vocabulary=1000, length=128, tensor_parallel=2
    )
    parameters = sum(weight.numel() for weight in made.Transformer(model).parameters())
    (program,) = capture_ranks(lambda: made.training_step(model), ranks=4, alike=True).programs
    parts = peak_memory(program).parts
    # Norms are whole on every rank of a tensor-parallel group.
    assert parts[MemoryKind.PARAMETERS] == pytest.approx(4 * parameters / 4, rel=0.02)
    assert parts[MemoryKind.OPTIMIZER_STATE] == pytest.approx(2 * parts[MemoryKind.PARAMETERS], rel=0.02)
    # One batch of tokens and labels, angles; no gathered parameter stays beyond its layer.
    assert parts.get(MemoryKind.INPUTS, 0) < 4 * parameters / 4 / 4
