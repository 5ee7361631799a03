"""Predict published measurements under `--assume default` and print the errors by category.

    python bench/ledger_truth.py [measurements.yaml] [--assume FILE] [--category decode] [--all]

The file is the argument, else $ROLLBOOK_MEASUREMENTS, else bench/data/measurements.yaml.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from ledger_cases import ADAPTERS, Case, Comparison, NotCovered, compare
from rollbook.ledger.assumptions import Assumptions, load_assumptions


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
    """Cases of these categories and this grade."""
    rows = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [row for row in rows if row["category"] in categories and row["grade"] == grade]


def quantiles(errors: list[float]) -> tuple[float, float]:
    """Median and 90th percentile of absolute relative errors."""
    values = np.abs(errors)
    return float(np.median(values)), float(np.quantile(values, 0.9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_path = os.environ.get(
        "ROLLBOOK_MEASUREMENTS", str(Path(__file__).parent / "data/measurements.yaml")
    )
    parser.add_argument("path", nargs="?", default=default_path)
    parser.add_argument("--assume", default="default")
    parser.add_argument("--grade", default="A")
    parser.add_argument("--category", action="append", choices=sorted(ADAPTERS))
    parser.add_argument("--worst", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="print every comparison")
    args = parser.parse_args()
    categories = args.category or sorted(ADAPTERS)
    cases = load_cases(Path(args.path), categories, args.grade)
    found, left_out = predict_all(cases, load_assumptions(args.assume))
    by_category: dict[str, list[Comparison]] = defaultdict(list)
    for item in found:
        by_category[item.category].append(item)
    print(
        f"{'category':<12} {'cases':>5} {'numbers':>7} {'median':>7} {'p90':>6} {'in range':>8}   not covered"
    )
    for category in categories:
        items = by_category[category]
        skipped = sum(1 for c, _, _ in left_out if c == category)
        if not items:
            print(f"{category:<12} {0:>5} {0:>7} {'-':>7} {'-':>6} {'-':>8}   {skipped}")
            continue
        median, high = quantiles([i.error_frac for i in items])
        inside = np.mean([i.is_in_range for i in items])
        num_cases = len({i.case_id for i in items})
        print(
            f"{category:<12} {num_cases:>5} {len(items):>7} {median:>7.1%} {high:>6.1%} {inside:>8.0%}   {skipped}"
        )
    if found:
        median, high = quantiles([i.error_frac for i in found])
        print(f"{'all':<12} {len({i.case_id for i in found}):>5} {len(found):>7} {median:>7.1%} {high:>6.1%}")
    ranked = sorted(found, key=lambda item: -abs(item.error_frac))
    shown = found if args.all else ranked[: args.worst]
    print("\n" + ("every comparison" if args.all else "worst"))
    for item in shown:
        print(
            f"  {item.error_frac:+7.1%}  {item.case_id}  {item.metric}: measured {item.measured:.4g}, "
            f"predicted {item.predicted.value:.4g} ({item.predicted.low:.3g} to {item.predicted.high:.3g})"
        )
    if left_out:
        print("\nnot covered")
        for _, case_id, reason in left_out:
            print(f"  {case_id}: {reason}")


if __name__ == "__main__":
    main()
