"""PyTorch's compiler stays away from a capture, and is the real one for whoever asks more of it, then and afterwards."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

_SCRIPT = """
    import sys
    import torch
    import steptime

    def made(ask):
        def make():
            model = torch.nn.Linear(8, 8).to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 8, device="cuda")

            def step():
                optimizer.zero_grad()
                ask()
                torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
                optimizer.step()

            return step

        return make

    def submodule():
        from torch._dynamo.utils import counters
        import torch._dynamo.config as config

        assert config.recompile_limit and counters is sys.modules["torch._dynamo.utils"].counters

    plain = steptime.capture(made(lambda: None))
    assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
    asked = steptime.capture(made(submodule))
    assert len(asked.programs[0].ops) == len(plain.programs[0].ops)
    assert type(sys.modules["torch._dynamo"]) is type(sys) and torch.cuda.device_count() == 0
    again = steptime.capture(made(submodule))
    assert len(again.programs[0].ops) == len(plain.programs[0].ops)
    twice = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
"""


def test_the_compiler_is_imported_for_those_who_ask_more_of_it_alone() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
