"""Each metric of the catalogue is written by some part of rollbook, or marked as one of other systems' logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.controller.expectation import FORWARDS
from rollbook.observe.catalogue import ELSEWHERE, STAGES, STAGES_ELSEWHERE, catalogue

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
FROM_A_CALLER = "(?:actor|critic|rollout_corr|warmup)"
"""First words of names that a function is given: every other one must be spelled out where the name is made."""


def _texts() -> Iterator[re.Pattern[str]]:
    """Every string of the parts that write metrics; what an f-string fills in may be anything, but its beginning."""
    for path in sorted(SOURCE.rglob("*.py")):
        if any(str(path.relative_to(SOURCE)).startswith(part) for part in READERS):
            continue
        yield from _texts_of(ast.parse(path.read_text(encoding="utf-8")), {})


def _texts_of(scope: ast.AST, known: dict[str, ast.expr]) -> Iterator[re.Pattern[str]]:
    nodes = list(_own_nodes(scope))
    known = known | {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _texts_of(node, known)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and " " not in (text := _pattern(node, known)):
            spelled = text.replace(FROM_A_CALLER, "").replace(".+", "")
            if isinstance(node, ast.Constant) or len(spelled) >= LEAST_TEXT:
                yield re.compile(text)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """What stands in a scope, and not in the functions within it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_nodes(node)


def _pattern(text: ast.expr, known: dict[str, ast.expr]) -> str:
    if isinstance(text, ast.Constant):
        return re.escape(text.value) if isinstance(text.value, str) else " "
    assert isinstance(text, ast.JoinedStr)
    pattern = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            pattern += re.escape(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            name = part.value.id if isinstance(part.value, ast.Name) else ""
            is_first = part is text.values[0]
            pattern += _pattern(known[name], {}) if name in known else FROM_A_CALLER if is_first else ".+"
    return pattern


def _examples(name: str) -> set[str]:
    """What the name, or the base that a statistic or a placeholder follows, may look like in the source."""
    filled = {re.sub(r"\{\w+\}", word, name) for word in ("x", "max", "layer_0")}
    bases = {example.rpartition("/")[0] for example in filled}
    return filled | {base for base in bases if "/" in base or "_" in base}


def test_each_metric_is_written_or_marked_as_foreign() -> None:
    texts = list(_texts())
    stages = {f"{kind}_s/{suffix}" for kind in ("timing", "expected") for suffix in STAGES.values()}
    names = {metric.name for metric in catalogue()} - stages  # spans write those: the next test
    unwritten = {n for n in names if not any(t.fullmatch(e) for t in texts for e in _examples(n))}
    assert unwritten == {metric.name for metric in catalogue() if metric.owner == ELSEWHERE} - stages


def test_each_stage_is_named_where_the_loop_opens_its_span_or_marked_as_foreign() -> None:
    """`span("sync")`, or the table of forward passes."""
    calls = set[str]()
    for path in (SOURCE / "controller").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "span"
            ):
                calls |= _first_word(node.args)
    assert STAGES.keys() - calls - set(FORWARDS) == STAGES_ELSEWHERE


def _first_word(nodes: list[ast.expr]) -> set[str]:
    first = nodes[0] if nodes else None
    return {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
