"""Nested tensors of the jagged layout as captured: ops on rows of all samples, attention of samples of their own lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from steptime._capture.capture import capture  # noqa: E402
from steptime._models.kernels.call import Call, TensorArg  # noqa: E402
from steptime._models.kernels.forms.attention import heads_of  # noqa: E402
from steptime._ops.operations import operations_of  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.program import Program  # noqa: E402
from steptime._program.workload import Workload  # noqa: E402
from steptime._sim.modelled.step import modelled  # noqa: E402
from steptime.errors import InputError  # noqa: E402

LENGTHS, WIDTH, HEADS = (100, 20, 30, 50), 64, 4
TOKENS = sum(LENGTHS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        parts = self.all(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + functional.gelu(self.out(mixed.transpose(1, 2).flatten(-2)))


def step_of(half: bool) -> Program:
    def make() -> Callable[[], None]:
        model = Block().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [torch.randn(length, WIDTH) for length in LENGTHS]

        def step() -> None:
            optimizer.zero_grad()
            x = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = model(x).values().float().square().mean()
            assert x.device == torch.device("cuda", 0)
            loss.backward()
            optimizer.step()

        return step

    return capture(make)


@pytest.mark.parametrize(("half", "kernel"), [(False, "efficient"), (True, "flash")])
def test_a_block_over_samples_of_their_own_lengths_works_on_all_rows_at_once(half: bool, kernel: str) -> None:
    program = step_of(half)
    table = op_table(program)
    products = [table.arguments[row].inputs[1].shape for row, name in enumerate(table.names) if name == "aten::addmm"]
    assert products == [(TOKENS, WIDTH)] * 2
    for way in ("forward", "backward"):
        assert table.names.count(f"aten::_{kernel}_attention_{way}") == 1
    step = modelled(Workload((program,), 1), Platform.load("1xh200"))
    assert not any("no model" in each for each in step.warnings)


def test_a_padded_transformer_may_be_evaluated_beside_its_training() -> None:
    """Where it is, PyTorch packs samples into nested tensors of the other layout, which do without a backward pass."""

    def make() -> Callable[[], None]:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).cuda()
        x, padded = torch.randn(4, 10, 32, device="cuda"), torch.zeros(4, 10, dtype=torch.bool, device="cuda")
        padded[:, 8:] = True

        def step() -> None:
            with torch.no_grad():
                encoder.eval()(x, src_key_padding_mask=padded)
            encoder.train()(x, src_key_padding_mask=padded).sum().backward()

        return step

    assert op_table(capture(make)).names.count("aten::_scaled_dot_product_efficient_attention") == 2


def test_the_other_layout_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"layout=torch\.jagged"):
        capture(lambda: torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], device="cuda"))


def attention(most: int) -> Call:
    row, starts = TensorArg((TOKENS, HEADS, 16), "bfloat16"), TensorArg((len(LENGTHS) + 1,), "int32")
    return Call("aten::_flash_attention_forward.default", (row, row, row, starts, starts, most, most, 0.0, False, False))


def test_attention_of_uneven_samples_counts_their_squares() -> None:
    even, uneven = heads_of(attention(TOKENS // 4)), heads_of(attention(100))
    assert (even.batch, even.heads, even.queries, even.keys, even.dim) == (4, HEADS, 50, 50, 16)
    assert uneven.keys == 67  # lengths from none to twice the mean have squares a third larger than its
    assert uneven.queries == even.queries


def test_operations_of_packed_attention_are_those_of_as_many_equal_samples() -> None:
    row, starts = TensorArg((TOKENS, HEADS, 16), "bfloat16"), TensorArg((len(LENGTHS) + 1,), "int32")
    flop = operations_of("aten::_flash_attention_forward", (), (row, row, row, starts, starts))
    assert flop == 4 * TOKENS * HEADS * 16 * 50
