"""Pages that follow the code function by function name nothing that is not there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rollbook"
PAGES = ("weight-sync.md", "architecture.md", "async.md")

FILE = re.compile(r"`(?:python )?([\w/]+\.py)\b")
MEMBER = re.compile(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)\b")
"""`Class.method`, in prose and in drawings."""
PRIVATE = re.compile(r"(?<![\w.])(_[a-z][a-z_]+)\b(?!\.)")
"""A function of its own file, in drawings."""
OF_FILE = re.compile(r"`[\w/]+\.py: ([A-Za-z_]\w*)(?:\.\w+)?(?:\(\d*\))?`")
CALLED = re.compile(r"`(test_\w+)`|::(test_[a-z0-9_]+)\b(?!…)")


@functools.cache
def members() -> dict[str, set[str]]:
    """By class: its methods, fields and what `self` is given. Under "": all functions and classes."""
    found: dict[str, set[str]] = {"": set()}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[""].add(node.name)
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_members(node))
    return found


def _members(of: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def names_of_tests() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)", text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_page_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    drawings = "\n".join(re.findall(r"```\n(.*?)```", text, flags=re.DOTALL))
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for folder in ("src", "bench", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    missing = [name for name in FILE.findall(text) if not any(file.endswith(f"/{name}") for file in files)]
    missing += [
        f"{name}.{member}"
        for name, member in MEMBER.findall(text)
        if member != "py" and member not in members().get(name, set())
    ]
    missing += [name for name in OF_FILE.findall(text) if name not in members()[""]]
    missing += [name for name in PRIVATE.findall(drawings) if name not in members()[""]]
    files_of_tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for name in filter(None, (a or b for a, b in CALLED.findall(text))):
        if name not in names_of_tests() | files_of_tests and not any(
            t.startswith(name) for t in names_of_tests()
        ):
            missing.append(name)
    assert not missing
