"""Fixtures that several folders' tests share.

Tests compute on one thread: models are tiny, and threads that wait for each other on a busy machine cost far more than
they bring. The variable is read when torch is loaded, so nothing here may import it before.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_run import TinyRun

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def tiny_run(tmp_path: Path) -> TinyRun:
    """The real loop, in this process, on a tiny model; see tiny_run.py."""
    from tiny_run import run_tiny

    return functools.partial(run_tiny, tmp_path)
