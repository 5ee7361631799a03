"""Predict published measurements under `--assume default` and print the errors by category.

    python bench/ledger_truth.py [measurements.yaml] [--assume FILE] [--category decode] [--all] [--held-out ROUNDS]

`--held-out` refits every category without each of its families in turn, from guesses, with so many rounds of search
(20 are enough; five minutes), and prints the errors on what was left out and how much of it lies inside its range.

The file (or folder of files) is the argument, else $ROLLBOOK_MEASUREMENTS, else bench/data.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ledger_cases import ADAPTERS, Comparison
from ledger_errors import coverage, load_cases, predict_all, quantiles
from ledger_fit import FREE, leave_one_out
from ledger_words import Case
from rollbook.ledger.assumptions import load_assumptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_path = os.environ.get("ROLLBOOK_MEASUREMENTS", str(Path(__file__).parent / "data"))
    parser.add_argument("path", nargs="?", default=default_path)
    parser.add_argument("--assume", default="default")
    parser.add_argument("--grade", default="A")
    parser.add_argument("--category", action="append", choices=sorted(ADAPTERS))
    parser.add_argument("--worst", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="print every comparison")
    parser.add_argument("--held-out", type=int, default=0, metavar="ROUNDS")
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
        inside = coverage(items)
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
    if args.held_out:
        print_held_out([case for case in cases if case["category"] in FREE], args.held_out)


def print_held_out(cases: list[Case], rounds: int) -> None:
    """Errors and coverage of families that the fit has not seen, by category."""
    print(f"\nfamilies left out of the fit, {rounds} rounds")
    print(f"{'category':<12} {'numbers':>7} {'median':>7} {'p90':>6} {'in range':>8}")
    found: list[Comparison] = []
    for category in FREE:
        mine = [case for case in cases if case["category"] == category]
        held = [item for items in leave_one_out(mine, category, rounds).values() for item in items]
        if held:
            median, high = quantiles([i.error_frac for i in held])
            print(f"{category:<12} {len(held):>7} {median:>7.1%} {high:>6.1%} {coverage(held):>8.0%}")
        found += held
    if found:
        median, high = quantiles([i.error_frac for i in found])
        print(f"{'all':<12} {len(found):>7} {median:>7.1%} {high:>6.1%} {coverage(found):>8.0%}")


if __name__ == "__main__":
    main()
