"""Cases of a file of measurements, the ledger's predictions of them, and quantiles of the errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml

from ledger_cases import Comparison, compare
from ledger_words import Case, NotCovered
from rollbook.ledger.assumptions import Assumptions


def predict_all(
    cases: Iterable[Case], assumptions: Assumptions
) -> tuple[list[Comparison], list[tuple[str, str, str]]]:
    """Comparisons of every case, and (category, id, reason) of those that are not covered."""
    found: list[Comparison] = []
    left_out: list[tuple[str, str, str]] = []
    for case in cases:
        try:
            found += compare(case, assumptions)
        except NotCovered as reason:
            left_out.append((case["category"], case["id"], str(reason)))
    return found, left_out


def load_cases(path: Path, categories: Iterable[str], grade: str) -> list[Case]:
    """Cases of these categories and this grade, of one file or of all in a folder; each knows its "file"."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = [
        {**row, "file": file.stem} for file in files for row in yaml.load(file.read_text(), Loader=loader)
    ]
    return [row for row in rows if row["category"] in categories and row["grade"] == grade]


def quantiles(errors: list[float]) -> tuple[float, float]:
    """Median and 90th percentile of absolute relative errors."""
    values = np.abs(errors)
    return float(np.median(values)), float(np.quantile(values, 0.9))


def coverage(found: list[Comparison]) -> float:
    """Share of the measurements that lie inside their stated range."""
    return float(np.mean([item.is_in_range for item in found]))
