"""A config of any kind, by what it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime._build.config import configured, read_config
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.transformer.config import Transformer
from steptime._shard.configs import configured_in
from steptime.errors import InputError

DLRM = """
batch = 64
dense_features = 4
bottom = [16, 8]
top = [16, 1]
tables = [{ name = "a", rows = 1000, dim = 8, pooling_factor = 2, skew = { kind = "uniform" } }]
"""
TRANSFORMER = """
kind = "transformer"
layers = 2
width = 64
heads = 4
sequence = 16
vocabulary = 100
batch = 8
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_with_tables_is_a_dlrm_whether_it_says_so_or_not(tmp_path: Path) -> None:
    for text in (DLRM, 'kind = "dlrm"' + DLRM):
        found = read_config(written(tmp_path, text))
        assert isinstance(found, DlrmConfig)
        assert found.model.name == "mine"
        assert configured(found).name == "mine"


def test_a_file_with_layers_is_a_transformer_whether_it_says_so_or_not(tmp_path: Path) -> None:
    for text in (TRANSFORMER, TRANSFORMER.replace('kind = "transformer"', "")):
        found = read_config(written(tmp_path, text))
        assert isinstance(found, Transformer)
        assert found.layers == 2


def test_one_thing_of_a_transformer_changes_at_a_time(tmp_path: Path) -> None:
    found = configured_in(written(tmp_path, TRANSFORMER))
    assert (found.description.batch, found.world_size, found.lookups) == (8, 1, None)
    assert found.varied(batch=16).description.batch == 16
    four = found.varied(ranks=4)
    assert (four.description.batch, four.world_size) == (8, 4)
    assert len(four.varied(ranks=1).programs[0].ops) == len(found.programs[0].ops)
    with pytest.raises(InputError, match="batch is 0; expected 1 or more"):
        found.varied(batch=0)
    with pytest.raises(InputError, match="a transformer has none"):
        configured(read_config(written(tmp_path, TRANSFORMER)), {"a": 0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch = 3", "'kind' is missing"),
        ('kind = "convnet"', 'kind is \'convnet\'; expected "dlrm" or "transformer"'),
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_config(written(tmp_path, text))
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
