"""The Transformers train: every weight moves, ranks stay alike, and nothing in a step waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.errors import InputError
from steptime_lab.workloads import transformers
from steptime_lab.workloads.case import build, workload
from steptime_lab.workloads.training import ModelStep

pytest.importorskip("transformers")

CPU = torch.device("cpu")
NAMES = ("bert", "gpt2", "xlnet")

# Ops that hand a value of a tensor to Python or make a shape of values; on a GPU they wait for it.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "unique_dim", "_unique2")


@dataclass(frozen=True)
class Ranks:
    """A group."""

    rank: int = 0
    ranks: int = 1


def _step(name: str, precision: str = "fp32", group: Ranks | None = None) -> ModelStep:
    group = group or Ranks()
    step = build(replace(workload(name).small(group.ranks)[0], precision=precision), group, CPU)
    assert isinstance(step, ModelStep)
    return step


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which ops were called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_every_trained_weight(name: str) -> None:
    step = _step(name)
    trained = [weight for weight in step.model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    step()
    assert len(trained) >= 30
    assert all((now != then).any() for now, then in zip(trained, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_step_waits_for_the_device(name: str) -> None:
    step = _step(name)
    with Watch() as watch:
        step._loss(step.model, step._inputs[0]).backward()  # type: ignore[no-untyped-call]
    assert "addmm" in watch.seen or "bmm" in watch.seen
    assert watch.seen.isdisjoint(WAITING)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_runs_products_in_bf16_and_keeps_weights_in_fp32(name: str) -> None:
    step = _step(name, "bf16")
    seen: set[torch.dtype] = set()
    for module in step.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    # oneDNN takes bf16 instructions for granted wherever a CPU names them.
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        step()
    assert seen == {torch.bfloat16}
    assert {weight.dtype for weight in step.model.parameters()} == {torch.float32}


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for name in NAMES:
        step = _step(name, group=Ranks(rank, 2))
        # In the second step DDP complains of weights that got no gradient in the first.
        step()
        step()
        inputs = next(iter(step._inputs[0].values()))
        torch.save(
            {"weights": [weight.detach() for weight in step.model.parameters()], "inputs": inputs}, f"{folder}/{name}-{rank}.pt"
        )
        step.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_train_the_same_weights_on_different_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spawn(_train, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    for name in NAMES:
        first, second = (torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in range(2))
        assert (first["inputs"] != second["inputs"]).any()
        torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def test_inputs_repeat_from_build_to_build() -> None:
    first, second = (_step("gpt2")._inputs for _ in range(2))
    assert len(first) == len(second) == 4
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


def test_a_hidden_token_of_xlnet_is_seen_by_none_before_it() -> None:
    inputs = _step("xlnet")._inputs[0]
    hidden, predicted = inputs["perm_mask"].bool(), inputs["labels"] != -100
    assert predicted.any()
    # What is not predicted is hidden from nobody; what is predicted is hidden from itself.
    assert not (hidden & ~predicted[:, None, :]).any()
    assert torch.equal(hidden.diagonal(dim1=1, dim2=2), predicted)
    # Of two predicted tokens exactly one sees the other: there is an order.
    apart = ~torch.eye(hidden.shape[1], dtype=torch.bool)
    pairs = predicted[:, :, None] & predicted[:, None, :] & apart
    assert torch.equal((hidden ^ hidden.transpose(1, 2)) & pairs, pairs)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(transformers, "import_module", fail)
    with pytest.raises(InputError, match=r"BertForSequenceClassification .* install transformers"):
        transformers.pretrained_class("bert.modeling_bert", "BertForSequenceClassification")
