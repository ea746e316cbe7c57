"""Recordings that lack something: what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptime._cli.app import run


def test_a_profile_of_the_host_alone_was_recorded_though_no_gpu_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 50, "args": {"External id": 1}},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert run(["predict", str(file)]) == 2
    said = capsys.readouterr().err
    assert "was recorded without GPU events (ProfilerActivity.CUDA records them)" in said
    assert "never run" not in said
