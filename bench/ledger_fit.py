"""Fit the numbers of `--assume default` to open measurements, and hold out whole families to see what it is worth.

    python bench/ledger_fit.py decode|train_mfu|weight_sync|rl_step [--rounds 20] [--leave-one-out [--by file]]

Prints the fitted numbers (a person rounds them and writes them into ledger/data/default.toml) and, with
`--leave-one-out`, the errors on each family when it was left out of the fit. Families are near-duplicates, so
holding out single rows would prove nothing. The objective is the mean over families of the mean absolute log error, a
family weighing the root of its cases: neither does a large one drown the others, nor does one odd row count as much as
forty.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from numpy.typing import NDArray

from ledger_cases import Comparison
from ledger_errors import coverage, load_cases, predict_all, quantiles
from ledger_words import Case
from rollbook.ledger.assumptions import Assumptions, load_assumptions

Array = NDArray[np.float64]

FREE: dict[str, dict[str, tuple[float, float, float]]] = {
    "decode": {
        "decode.hbm_frac.default": (0.5, 0.7, 0.9),
        "decode.kv_frac.default": (0.4, 0.7, 0.92),
        "decode.prefill_bytes.dense": (20.0, 75.0, 300.0),
        "decode.prefill_bytes.moe": (5.0, 43.0, 100.0),
        "decode.layer_s.default": (5e-6, 4e-05, 80e-6),
        "decode.young_factor.sglang/B200": (1.0, 1.0, 2.0),
        "decode.moe_layer_s.default": (1e-6, 1.5e-05, 60e-6),
        "decode.expert_frac.MI300X": (0.2, 0.8, 1.0),
        "decode.moe_layer_s.MI300X": (1e-6, 1.5e-05, 6e-4),
        "decode.all_reduce_latency_s": (4e-6, 1e-05, 40e-6),
        "decode.prefill_layer_s": (5e-5, 3e-4, 2e-3),
        "decode.exchange_frac.default": (0.1, 0.5, 1.0),
        "decode.host_s.vllm_v0": (0.3e-3, 1e-3, 4e-3),
    },
    "train_mfu": {
        "stacks.fsdp_primerl.gemm_frac.bfloat16": (0.5, 0.6, 0.75),
        "stacks.fsdp_primerl.attention_frac.default": (0.4, 0.5, 0.75),
        "stacks.fsdp_primerl.attention_frac.B200": (0.08, 0.3, 0.4),
        "stacks.fsdp_primerl.dense_bytes": (500.0, 1000.0, 6000.0),
        "stacks.fsdp_primerl.moe_bytes": (50.0, 100.0, 500.0),
        "stacks.fsdp_primerl.least_s_per_width": (1e-11, 3e-10, 2e-9),
        "stacks.fsdp_plain.dense_bytes": (500.0, 1000.0, 6000.0),
        "stacks.fsdp_plain.least_s_per_width": (1e-11, 3e-10, 2e-9),
        "stacks.megatron_tuned.expert_factor": (0.4, 0.8, 1.0),
        "stacks.megatron_tuned.attention_frac.default": (0.4, 0.5, 0.75),
        "stacks.megatron_tuned.dense_bytes": (50.0, 300.0, 1000.0),
        "stacks.megatron_tuned.moe_bytes": (50.0, 100.0, 400.0),
        "stacks.megatron_tuned.expert_exchange_frac": (0.01, 0.5, 3.0),
        "stacks.megatron_overlap.gemm_frac.bfloat16": (0.4, 0.56, 0.66),
        "stacks.megatron_overlap.moe_bytes": (10.0, 60.0, 200.0),
        "stacks.megatron_overlap.expert_exchange_frac": (0.01, 0.5, 3.0),
        "stacks.fsdp_experts.moe_bytes": (10.0, 60.0, 200.0),
        "stacks.fsdp_experts.expert_exchange_frac": (0.01, 0.5, 5.0),
        "stacks.fsdp_compiled.dense_bytes": (100.0, 500.0, 3000.0),
        "sync.disk_bytes_per_s": (1e9, 2000000000.0, 1e10),
        "flash2_attention_frac": (0.2, 0.35, 0.6),
    },
    "weight_sync": {
        "sync.base_s": (0.02, 0.1, 1.0),
        "sync.near_base_s": (0.02, 0.1, 1.0),
        "sync.slices_base_s": (0.02, 0.4, 2.0),
        "sync.slices_experts_s": (0.02, 0.4, 2.0),
        "sync.far_gather_bytes_per_s": (1e10, 5e10, 4e11),
        "sync.gather_call_s": (1e-5, 3e-4, 3e-3),
        "sync.host_copy_bytes_per_s": (5e8, 1400000000.0, 2e10),
        "sync.delta_bytes_per_s": (2e8, 2e9, 2e10),
        "sync.delta_tensor_s": (1e-5, 0.0005, 5e-3),
        "frameworks.slime.sync.shard_gather_bytes_per_s": (1e10, 5e10, 2e11),
        "sync.handle_base_s": (0.05, 1.0, 10.0),
        "frameworks.verl.sync.handle_base_s": (0.05, 1.0, 10.0),
        "frameworks.skyrl.sync.handle_base_s": (0.05, 1.0, 10.0),
        "sync.expert_load_s": (1e-5, 1e-4, 3e-3),
        "sync.gather_bytes_per_s": (1e10, 5e10, 4e11),
        "sync.quantize_tensor_s": (1e-5, 1e-4, 2e-3),
        "frameworks.verl_checkpoint_engine.sync.base_s": (0.1, 1.0, 5.0),
        "frameworks.verl_checkpoint_engine.sync.near_base_s": (0.1, 1.0, 5.0),
        "frameworks.verl_checkpoint_engine.sync.far_gather_bytes_per_s": (2e9, 1e10, 5e10),
        "frameworks.skyrl.sync.per_tensor_s": (1e-4, 3e-3, 2e-2),
        "frameworks.verl.sync.base_s": (0.02, 0.5, 5.0),
        "frameworks.verl.sync.far_gather_bytes_per_s": (2e9, 10000000000.0, 2e10),
        "frameworks.verl.sync.per_tensor_s": (1e-5, 0.0005, 5e-3),
        "frameworks.vime.sync.handle_tensor_s": (1e-5, 3e-4, 5e-3),
        "frameworks.relax.sync.handle_base_s": (0.05, 1.0, 10),
    },
    "rl_step": {
        "stacks.megatron.gemm_frac.bfloat16": (0.5, 0.56, 0.65),
        "stacks.megatron.dense_bytes": (100.0, 250.0, 2000.0),
        "stacks.megatron.moe_bytes": (50.0, 145.0, 600.0),
        "frameworks.nemo.stacks.megatron.moe_bytes": (50.0, 145.0, 400.0),
        "stacks.megatron.generation_factor.GB200 (per GPU)": (0.4, 1.0, 1.0),
        "stacks.megatron.forward_share": (0.2, 0.3, 0.4),
        "stacks.fsdp.dense_bytes": (200.0, 1000.0, 4000.0),
        "frameworks.verl.step_sequence_s": (1e-5, 1e-3, 5e-3),
        "frameworks.nemo.step_base_s": (0.5, 5.0, 30.0),
        "frameworks.nemo.switch.state_bytes_per_s": (1e9, 1300000000.0, 5e10),
        "frameworks.nemo.switch.base_s": (0.5, 2.0, 20.0),
    },
}
"""Numbers that each category may move: lower bound, what one would guess without any of its cases, upper bound.

Guesses are what other categories or counting say. Launches of a decoded block: 11 kernels of 3.5 µs in a graph, and 4
for its routing; memory traffic of a prompt token: a forward's share of the pre-training recipes'; copies through host
memory: as RL steps move training state; the Megatron stack inside RL: as the same library's recipes.
"""

SHARED: dict[str, str] = {
    # Their engines sleep while the trainer has the devices.
    "frameworks.skyrl.sync.handle_base_s": "frameworks.verl.sync.handle_base_s",
    "frameworks.relax.sync.handle_base_s": "frameworks.verl.sync.handle_base_s",
    "sync.near_base_s": "sync.base_s",
    "frameworks.verl_checkpoint_engine.sync.near_base_s": "frameworks.verl_checkpoint_engine.sync.base_s",
    "stacks.fsdp_primerl.dense_bytes": "stacks.fsdp_plain.dense_bytes",
    "stacks.fsdp_primerl.least_s_per_width": "stacks.fsdp_plain.least_s_per_width",
    "stacks.fsdp_primerl.moe_bytes": "stacks.megatron_tuned.moe_bytes",
    "stacks.fsdp_experts.moe_bytes": "stacks.megatron_overlap.moe_bytes",
    "stacks.fsdp_experts.expert_exchange_frac": "stacks.megatron_overlap.expert_exchange_frac",
    "sync.far_gather_bytes_per_s": "sync.gather_bytes_per_s",
}
"""Numbers of one implementation, and the number of its relative that they are drawn to: one row moves it half of the
way, many rows all of it, and without a row it is the relative's. What is drawn, and what is not fitted at all, was
chosen by the errors on families left out (bench/ledger_results.md)."""
_DRAW = 0.12
_PULL = 0.003
"""Of every number to its guess: what a few cases say about it moves it less than what many do, and where none says
anything it stays."""


def uninformed(assumptions: Assumptions, category: str) -> Assumptions:
    """The same assumptions with the category's numbers at their guesses: no case has been seen."""
    for path, (_, guess, _) in FREE[category].items():
        assumptions = with_value(assumptions, path, guess)
    return assumptions


def value_at(assumptions: Assumptions, path: str) -> float:
    """The number under a dotted path."""
    part: Any = assumptions
    for name in _split(path):
        part = part[name] if isinstance(part, Mapping) else getattr(part, name)
    return float(part)


def with_value(part: Any, path: str, value: float) -> Any:
    """A copy with one number changed."""
    name, *rest = _split(path)
    old = part[name] if isinstance(part, Mapping) else getattr(part, name)
    new = with_value(old, ".".join(rest), value) if rest else value
    return {**part, name: new} if isinstance(part, Mapping) else replace(part, **{name: new})


def _split(path: str) -> list[str]:
    if path.startswith("frameworks."):
        return path.split(".")
    return path.split(".", 3) if path.startswith("stacks.") else path.split(".", 2)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Log errors of the cases' numbers [n], and what each number weighs [n]: families by the root of their cases."""

    errors: Array
    weights: Array

    @property
    def score(self) -> float:
        return float(self.weights @ np.minimum(np.abs(self.errors), _MOST_ERROR))


_MOST_ERROR = 1.0
"""Log error above which a number counts no more: one odd row must not decide what forty say."""


def objective(cases: list[Case], assumptions: Assumptions) -> float:
    """Mean over families of the mean absolute log error, by the root of their cases; each case counts once."""
    return _Problem(cases).at(assumptions).score


class _Problem:
    """Errors of cases at any assumptions. Predictions are remembered while nothing that they read has changed."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def at(self, assumptions: Assumptions) -> _Numbers:
        """All numbers."""
        return self.weighed([self.errors_of(case, assumptions) for case in self.cases])

    def errors_of(self, case: Case, assumptions: Assumptions) -> list[float]:
        """Log errors of one case's numbers; empty where it is not covered."""
        found, _ = predict_all([case], assumptions)
        return [math.log(item.predicted.value / item.measured) for item in found]

    def weighed(self, errors: list[list[float]]) -> _Numbers:
        """`errors` [case][number] in a row, with their weights, which sum to 1."""
        sizes = Counter(str(case["family"]) for case, found in zip(self.cases, errors, strict=True) if found)
        whole = sum(math.sqrt(size) for size in sizes.values())
        weights = [
            1 / (math.sqrt(sizes[str(case["family"])]) * whole * len(found))
            for case, found in zip(self.cases, errors, strict=True)
            for _ in found
        ]
        return _Numbers(np.array([e for found in errors for e in found]), np.array(weights))


def fit(cases: list[Case], start: Assumptions, category: str, rounds: int) -> Assumptions:
    """Gauss-Newton on the logarithms of the category's numbers, absolute errors by reweighting, from `start`.

    A round takes one derivative by each number, of the cases that read it, and halves a step that makes it worse.
    """
    paths = sorted(FREE[category])
    low, high = (np.log([FREE[category][path][i] for path in paths]) for i in (0, 2))
    guess = np.log([value_at(start, path) for path in paths])
    rows = [(paths.index(one), paths.index(shared)) for one, shared in SHARED.items() if one in paths]
    draw = np.zeros((len(rows), len(paths)))
    for row, (one, shared) in enumerate(rows):
        draw[row, one], draw[row, shared] = 1.0, -1.0
    problem = _Problem(cases)
    readers = [_readers(problem, start, path, FREE[category][path]) for path in paths]

    def made(at: Array) -> Assumptions:
        assumptions = start
        for path, value in zip(paths, at, strict=True):
            assumptions = with_value(assumptions, path, math.exp(value))
        return assumptions

    def score_of(found: _Numbers, at: Array) -> float:
        return (
            found.score + _PULL * float(((at - guess) ** 2).sum()) + _DRAW * float(((draw @ at) ** 2).sum())
        )

    at, errors = guess, [problem.errors_of(case, start) for case in cases]
    best = score_of(problem.weighed(errors), at)
    for _ in range(rounds):
        found = problem.weighed(errors)
        slopes = _slopes(problem, made(at), errors, paths, readers)
        size = np.abs(found.errors)
        pace = found.weights / (2 * np.maximum(size, 0.03)) / (1 + (size / _MOST_ERROR) ** 4)
        pull = _PULL * np.eye(len(paths)) + _DRAW * draw.T @ draw
        uphill = slopes.T @ (pace * found.errors) + _PULL * (at - guess) + _DRAW * draw.T @ (draw @ at)
        step = -np.linalg.solve((slopes.T * pace) @ slopes + pull, uphill)
        step = step / max(np.abs(step).max() / _LONGEST_STEP, 1.0)
        for shorter in (1.0, 0.5, 0.25, 0.1):
            trial = np.clip(at + shorter * step, low, high)
            assumptions = made(trial)
            moved = [problem.errors_of(case, assumptions) for case in cases]
            score = score_of(problem.weighed(moved), trial)
            if score < best:
                break
        if score > best - 1e-4:
            break
        at, errors, best = trial, moved, score
    return made(at)


_LONGEST_STEP = 0.7
_NUDGE = 0.03


def _readers(
    problem: _Problem, start: Assumptions, path: str, values: tuple[float, float, float]
) -> list[int]:
    """Cases whose prediction depends on a number, at its guess or at its bounds."""
    ends = [with_value(start, path, value) for value in values]
    found = []
    for index, case in enumerate(problem.cases):
        key = (case["id"], path)
        if key not in _READS:
            low, middle, high = (problem.errors_of(case, end) for end in ends)
            _READS[key] = not low == middle == high
        if _READS[key]:
            found.append(index)
    return found


_READS: dict[tuple[str, str], bool] = {}
"""Whether a case reads a number. It is a trait of the case, whatever else is in the fit."""


def _slopes(
    problem: _Problem,
    assumptions: Assumptions,
    errors: list[list[float]],
    paths: list[str],
    readers: list[list[int]],
) -> Array:
    """Derivative of every number's log error by every logarithm [numbers, paths]."""
    first = np.cumsum([0, *(len(found) for found in errors)])
    slopes = np.zeros((first[-1], len(paths)))
    for column, path in enumerate(paths):
        nudged = with_value(assumptions, path, value_at(assumptions, path) * math.exp(_NUDGE))
        for index in readers[column]:
            moved = problem.errors_of(problem.cases[index], nudged)
            rows = slice(first[index], first[index + 1])
            slopes[rows, column] = (np.array(moved) - errors[index]) / _NUDGE
    return slopes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("category", choices=sorted(FREE))
    parser.add_argument("--path", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--by", choices=("family", "source", "device", "file"), default="family")
    args = parser.parse_args()
    cases = load_cases(args.path, [args.category], "A")
    start = load_assumptions("default")
    assert is_dataclass(start)
    fitted = fit(cases, uninformed(start, args.category), args.category, args.rounds)
    print(
        f"objective {objective(cases, start):.4f} as shipped, {objective(cases, fitted):.4f} fitted from guesses"
    )
    for path in sorted(FREE[args.category]):
        print(f"  {path} = {value_at(fitted, path):.3g}   (shipped {value_at(start, path):.3g})")
    found, _ = predict_all(cases, fitted)
    print(
        "all families in the fit: median {:.1%}, p90 {:.1%}".format(*quantiles([i.error_frac for i in found]))
    )
    if args.leave_one_out:
        print_left_out(leave_one_out(cases, args.category, args.rounds, by=args.by))


def leave_one_out(
    cases: list[Case], category: str, rounds: int, *, by: str = "family"
) -> dict[str, list[Comparison]]:
    """Comparisons of each fold when neither the fit nor the lists of what was measured have seen it.

    Args:
        by: what is left out together: a "family", or the cases of one "source", one "device" or one "file" of
            measurements, which is what a fresh collector brings.
    """
    held: dict[str, list[Comparison]] = {}
    for name in sorted({fold_of(case, by) for case in cases}):
        others = [case for case in cases if fold_of(case, by) != name]
        mine = [case for case in cases if fold_of(case, by) == name]
        if not others:
            continue
        start = uninformed(load_assumptions("default"), category)
        fitted = replace(fit(others, start, category, rounds), measured=evidence_of(others))
        held[name] = predict_all(mine, fitted)[0]
    return held


def fold_of(case: Case, by: str) -> str:
    """Name of the fold that a case falls into."""
    if by in ("family", "file"):
        return str(case[by])
    if by == "source":
        return f"{case['family']}: {case['source'].get('where') or case['source'].get('title')}"
    config = case["config"]
    keys = ("gpu", "system", "device", "hardware")
    return next((str(config[key]) for key in keys if key in config), "no device named")


def print_left_out(held: dict[str, list[Comparison]]) -> None:
    """Errors of each fold, and of all."""
    for name, items in held.items():
        if items:
            median, high = quantiles([item.error_frac for item in items])
            print(
                f"  without {name}: {len(items)} numbers, median {median:.1%}, p90 {high:.1%}, "
                f"in range {coverage(items):.0%}"
            )
    found = [item for items in held.values() for item in items]
    if found:
        median, high = quantiles([item.error_frac for item in found])
        print(f"left out of the fit: median {median:.1%}, p90 {high:.1%}, in range {coverage(found):.0%}")


class _Noted(set[str]):
    """Contains everything, and keeps what it was asked for."""

    def __contains__(self, value: object) -> bool:
        self.add(str(value))
        return True


class _NotedKinds(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        return self.setdefault(key, self.made())

    def made(self) -> Any:
        return _Noted()


class _NotedParts(_NotedKinds):
    def made(self) -> Any:
        return _NotedKinds()


def evidence_of(cases: list[Case]) -> dict[str, dict[str, tuple[str, ...]]]:
    """What these cases have: part of the ledger -> kind of trait -> values. `Assumptions.measured` of a fit on them."""
    found: dict[str, dict[str, set[str]]] = {}
    for case in cases:
        asked = _NotedParts()
        predicted, _ = predict_all([case], replace(load_assumptions("default"), measured=asked))
        for part, kinds in asked.items() if predicted else ():
            for kind, values in kinds.items():
                found.setdefault(part, {}).setdefault(kind, set()).update(values)
    return {
        part: {kind: tuple(sorted(values)) for kind, values in kinds.items()}
        for part, kinds in sorted(found.items())
    }


if __name__ == "__main__":
    main()
