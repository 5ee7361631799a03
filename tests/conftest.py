"""Fixtures that several folders' tests share."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tiny_run import TinyRun, run_tiny


@pytest.fixture
def tiny_run(tmp_path: Path) -> TinyRun:
    """The real loop, in this process, on a tiny model; see tiny_run.py."""
    return functools.partial(run_tiny, tmp_path)
