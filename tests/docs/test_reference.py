"""The reference pages: everything that the code has is on them, with its meaning."""

from __future__ import annotations

import pytest
from tests.api.answer_schema import answers_schema
from tests.docs.site_scripts import script

import steptime
from steptime._cli.app import app

configs = script("configs")


@pytest.mark.parametrize("section", configs.sections(), ids=lambda section: section.name)
def test_every_key_that_a_reader_knows_has_a_meaning_and_no_other_has(section: object) -> None:
    said = configs.meanings()[section.name]  # type: ignore[attr-defined]
    assert set(said) == set(section.keys)  # type: ignore[attr-defined]
    assert all(each["meaning"].endswith(".") for each in said.values())


@pytest.mark.parametrize("section", configs.sections(), ids=lambda section: section.name)
def test_every_key_says_what_it_accepts(section: object) -> None:
    said = configs.meanings()[section.name]  # type: ignore[attr-defined]
    keys = section.keys  # type: ignore[attr-defined]
    assert [key for key in keys if not (said[key].get("accepts") or configs.accepts(section, key))] == []


def test_every_table_of_meanings_is_a_table_of_a_config() -> None:
    assert set(configs.meanings()) == {section.name for section in configs.sections()}


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    commands = script("commands")
    page = commands.page()
    for info in app.registered_commands:
        name = info.name or info.callback.__name__  # type: ignore[union-attr]
        assert f"\n## {name}\n" in page
        if name not in commands.OWN_PARSERS:
            for key, _, shown, _ in commands._parameters(info.callback):
                option = isinstance(shown, commands.OptionInfo)
                names = commands.spellings(shown) if option else [shown.metavar or key.upper()]
                assert names and all(f"`{each}`" in page for each in names)


def test_every_answer_of_the_schema_is_on_the_page_of_json() -> None:
    page = script("answers").page()
    assert [name for name in answers_schema()["$defs"] if f"\n## {name}\n" not in page] == []


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = script("python_api").page()
    assert [
        name
        for name in steptime.__all__
        if name != "__version__" and f"`steptime.{name}`" not in page and f"| `{name}` |" not in page
    ] == []


def test_every_key_of_an_answer_has_a_meaning() -> None:
    page = script("answers").page()
    assert [line for line in page.splitlines() if line.startswith("| `") and line.rstrip().endswith("|  |")] == []
