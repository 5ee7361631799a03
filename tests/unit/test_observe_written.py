"""Each metric of the catalogue is written by some part of rollbook, or marked as one of other systems' logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.observe.catalogue import ELSEWHERE, STAGES, catalogue

SOURCE = Path(__file__).parents[2] / "src" / "rollbook"
READERS = (
    "diagnose",
    "drill",
    "cli",
    "planner",
    "observe/alerts.py",
    "observe/catalogue.py",
    "observe/grafana.py",
    "observe/history.py",
    "observe/page",
    "observe/terminal.py",
)
"""Parts that read metrics, or put them in on purpose."""
LEAST_TEXT = 3
"""Characters of a name that an f-string must spell out to be taken for it."""


def _texts() -> Iterator[re.Pattern[str]]:
    """Every string of the parts that write metrics; what an f-string fills in may be anything."""
    for path in sorted(SOURCE.rglob("*.py")):
        if any(str(path.relative_to(SOURCE)).startswith(part) for part in READERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                yield re.compile(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
                spelled = "".join(p for p in parts if isinstance(p, str))
                if len(spelled) >= LEAST_TEXT and " " not in spelled:
                    yield re.compile("".join(".+" if p is None else re.escape(str(p)) for p in parts))


def _examples(name: str) -> set[str]:
    """What the name, or the base that a statistic or a placeholder follows, may look like in the source."""
    filled = {re.sub(r"\{\w+\}", word, name) for word in ("x", "max", "layer_0")}
    bases = {example.rpartition("/")[0] for example in filled}
    return filled | {base for base in bases if "/" in base or "_" in base}


def test_each_metric_is_written_or_marked_as_foreign() -> None:
    texts = list(_texts())
    stages = {f"{kind}_s/{suffix}" for kind in ("timing", "expected") for suffix in STAGES.values()}
    names = {metric.name for metric in catalogue()} - stages  # spans write those
    unwritten = {n for n in names if not any(t.fullmatch(e) for t in texts for e in _examples(n))}
    assert unwritten == {metric.name for metric in catalogue() if metric.owner == ELSEWHERE}
