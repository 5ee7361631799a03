"""The folder of diagnosis is what its map says: one file per rule, no rule that knows another, and every file named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rollbook.diagnose
from rollbook.diagnose.tree import RULES
from rollbook.diagnose.units import BYTES, GIB, unit_of

FOLDER = Path(rollbook.diagnose.__file__).parent
MAX_LINES = 25
"""Of a map that is read at a glance."""


def _modules(folder: str) -> list[Path]:
    return sorted(path for path in (FOLDER / folder).glob("*.py") if path.stem != "__init__")


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_each_file_in_rules_is_a_rule() -> None:
    assert {path.stem for path in _modules("rules")} == set(RULES)


@pytest.mark.parametrize("path", _modules("rules/parts"), ids=lambda path: path.stem)
def test_a_part_says_whose_it_is(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert set(re.findall(r"`(\w+)`", told)) & set(RULES)


def test_rules_do_not_know_each_other_nor_signs_the_rules() -> None:
    rules = {f"rollbook.diagnose.rules.{name}" for name in RULES}
    for path in (*_modules("rules"), *_modules("rules/parts")):
        assert not _imports(path) & rules, path
    for path in _modules("signs"):
        assert not [module for module in _imports(path) if ".diagnose.rules" in module], path


def test_the_map_names_every_file_and_folder() -> None:
    told = rollbook.diagnose.__doc__ or ""
    assert len(told.splitlines()) <= MAX_LINES
    folders = [path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()]
    assert not [name for name in folders if f"{name}/" not in told]
    assert not [path.name for path in _modules(".") if path.name not in told]


def test_units_of_bytes_are_powers_of_two_in_either_spelling() -> None:
    assert (BYTES["mb"], BYTES["mib"], BYTES["tb"] / GIB) == (2.0**20, 2.0**20, 1024.0)
    assert unit_of({"peak", "memory", "mib"}) == "mib"
    assert unit_of({"peak", "memory"}) is None
