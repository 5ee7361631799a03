"""A trainer that always waited for most of its steps waits longer for longer responses, and nothing is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import unseen_runs


@pytest.mark.parametrize(
    ("name", "verdict"), [("longer_answers", "well"), ("buffer_never_fills", "buffer_never_fills")]
)
def test_longer_waits_for_responses_that_grow_slowly_are_no_fault(
    name: str, verdict: str, tmp_path: Path
) -> None:
    """Waits of 401 of 450 s become 735 of 797 s over the run, and lengths grow as much, too slowly for one step to show
    it; beside it the same world with a buffer that does not fill."""
    diagnosis = diagnose(
        load(str(unseen_runs.write_jsonl(unseen_runs.make(name, 9100), tmp_path / "run.jsonl")))
    )
    assert diagnosis.verdict == verdict
