"""A name is looked at once, however many rows of a log have it: else reading grows with rows times names."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rollbook.diagnose.readers import words
from rollbook.diagnose.readers.table import load


class Watched:
    """A pattern that counts what it is asked of."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._pattern = words._PIECE

    def findall(self, name: str) -> list[str]:
        self.asked[name] += 1
        return list(self._pattern.findall(name))


def test_the_words_of_a_name_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"actor/once_{i}" for i in range(20)] + [
        "timing_s/step",
        "critic/score/mean",
        "buffer/once_wait_s",
    ]
    path = tmp_path / "exp.jsonl"
    path.write_text(
        "".join(json.dumps({"step": n, "data": dict.fromkeys(names, 1.0 + n)}) + "\n" for n in range(1, 301))
    )
    watched = Watched()
    monkeypatch.setattr(words, "_PIECE", watched)
    load(str(path))
    most = watched.asked.most_common(1)
    assert watched.asked["actor/once_0"] > 0 and most[0][1] <= 10, most
