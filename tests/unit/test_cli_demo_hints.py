"""What the demo prints to type next is typed as it stands in the reader's shell."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rollbook.cli.demo import program


def test_a_program_off_the_path_is_called_by_where_it_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sys, "argv", [".venv/bin/rollbook", "demo"])
    assert program() == ".venv/bin/rollbook"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/rollbook"), "demo"])
    assert program() == ".venv/bin/rollbook"


def test_a_program_on_the_path_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rollbook", "demo"])
    assert program() == "rollbook"
