"""The page that lists every key of a config."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from rollbook.config.reference import to_markdown

ROOT = Path(__file__).parents[2]


def test_the_printed_page_is_up_to_date() -> None:
    """If this fails: python -m rollbook.config.reference > docs/config.md"""
    assert (ROOT / "docs" / "config.md").read_text() == to_markdown()


def test_every_key_of_the_examples_stands_in_the_page_of_its_section_with_a_meaning() -> None:
    tables = {
        block.partition("`")[0].strip("[]"): block.split("\n## `")[0]
        for block in to_markdown().split("## `")[1:]
    }

    def check(path: str, section: dict[str, Any]) -> None:
        for key, value in section.items():
            inner = f"{path}.{key}".lstrip(".")
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict) and inner in tables:
                    check(inner, each)
                else:
                    elsewhere = re.search(r"Its keys are those of `(.+)`\.", tables[path])
                    assert f"| `{key}` | " in tables[elsewhere[1] if elsewhere else path], inner

    for example in (ROOT / "examples").glob("*.toml"):
        check("", tomllib.loads(example.read_text()))
    rows = [line for line in to_markdown().splitlines() if line.startswith("| `")]
    assert all(not row.endswith("|  |") for row in rows)
