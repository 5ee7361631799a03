"""What should wake nobody and looks as if it might: the well half of `oncall_runs.py`.

Curricula, a gap by intention, waits that come and go, evaluations and checkpoints that cost steps, a clean restart: on
the jobs of `reported_runs.py`, written before any rule had met them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import reported_runs
from reported_runs import GAP, RECIPES, Log

Array = NDArray[np.float64]
MOVED = (
    "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
)  # fmt: skip
"""Stages that hand the batch on."""


def base(seed: int, recipes: tuple[str, ...] = tuple(RECIPES)) -> Log:
    log = reported_runs.base(seed, recipes, stream=31_173, most_steps=2000)
    log.at = max(log.at, 12)
    return log


def drop(log: Log, *prefixes: str) -> None:
    log.m = {k: v for k, v in log.m.items() if not k.startswith(prefixes)}


def num(log: Log) -> float:
    """Trajectories of a step."""
    return float(np.round(log.m["_prompts"][0] * log.m["_group"][0]))


def step_s(log: Log) -> Array:
    return np.asarray(sum(np.nan_to_num(log.m.get(f"timing_s/{s}", np.zeros(log.n))) for s in MOVED))


def longer_by_curriculum(seed: int) -> Log:
    """Harder problems come in blocks, and answers jump with them; seconds and memory follow, and there is room."""
    log = base(seed)
    log.m["_limit"] = log.m["_limit"] * 4
    gb, used = log.recipe.device_gb, log.m["perf/max_memory_allocated_gb"]
    for share in np.sort(log.rng.uniform(0.2, 0.85, int(log.rng.integers(1, 3)))):
        log.at = int(share * log.n)
        log.longer(log.uni(1.3, 1.9))
        log.fewer_solved(log.uni(0.8, 1.0))
        used = np.where(log.on, np.minimum(used * log.uni(1.03, 1.12), 0.75 * gb), used)
    log.m["perf/max_memory_allocated_gb"] = used
    reserved = np.maximum(log.m["perf/max_memory_reserved_gb"], used + 0.03 * gb)
    log.m["perf/max_memory_reserved_gb"] = np.maximum.accumulate(reserved)
    return log


def harder_by_curriculum(seed: int) -> Log:
    """Every block is harder than the last: the reward falls at each and is learned back a little; nothing tells the
    sources apart."""
    log = base(seed)
    for share in np.sort(log.rng.uniform(0.15, 0.9, int(log.rng.integers(2, 5)))):
        log.at = int(share * log.n)
        lost = log.uni(0.1, 0.3)
        log.fewer_solved(1 - lost * (0.6 + 0.4 * np.exp(-log.since / (0.1 * log.n))))
        log.longer(log.uni(1.0, 1.12))
        log.times("actor/entropy", log.uni(1.0, 1.08))
    drop(log, "val-core", *(f"{log.by_source}/{s}/" for s in log.recipe.sources))
    log.needs = ("critic/", f"{log.by_source}/")
    return log


def fp8_rollout(seed: int) -> Log:
    """The engine computes in eight bits by intention: a gap several times that of bf16 from the first step on,
    always the same, corrected for, and the run learns."""
    log = base(seed)
    log.needs = GAP
    log.m["_gap"] = log.uni(0.014, 0.024) * log.wander(0.05)
    log.m["_gap_noise"] = np.full(log.n, log.log(0.015, 0.05))
    log.write_gap()
    return log


def waits_in_spells(seed: int) -> Log:
    """The trainer is about as fast as its generators: it waits little, and in some spells of long prompts more."""
    log = base(seed, ("async",))
    busy = float(np.median(step_s(log) - log.m["timing_s/gen"]))
    wait = busy * log.uni(0.03, 0.12) * log.rng.lognormal(0, log.uni(0.3, 0.6), log.n)
    log.at = int(log.n * log.uni(0.1, 0.3))
    log.m["timing_s/gen"] = wait * np.where(log.spells(15), log.uni(1.5, 3.0), 1.0)
    return log


def slow_evaluation(seed: int) -> Log:
    """Every n-th step an evaluation of many benchmarks, several steps long; caches are cold after it."""
    log = base(seed)
    tested = log.m["_tested"] > 0
    took = np.median(step_s(log)) * log.log(1.5, 12)
    log.m["timing_s/testing"] = np.where(tested, log.noisy(took, 0.06), np.nan)
    log.times("timing_s/gen", log.uni(1.05, 1.4), np.roll(tested, 1))
    log.needs = ("timing_s/testing",)
    return log


def checkpoint_every_k(seed: int) -> Log:
    """Every k-th step a checkpoint over a slow file system, in the step's seconds."""
    log = base(seed)
    every = int(log.rng.choice([3, 5, 10, 20]))
    took = float(np.median(step_s(log))) * log.log(0.4, 4)
    log.m["timing_s/save_checkpoint"] = np.where(
        log.t % every == every - 1, log.noisy(took, log.uni(0.05, 0.3)), np.nan
    )
    if log.coin(0.3):
        drop(log, "timing_s/save_checkpoint")
        log.lost_s = np.where(log.t % every == every - 1, log.noisy(took, 0.1), 0.0)
    return log


def resume_as_it_was(seed: int) -> Log:
    """Taken up again with its whole state: some steps run twice, the first of them is slow, the schedule goes on."""
    log = base(seed)
    log.at = max(log.at, 20)
    log.earlier = {k: v.copy() for k, v in log.m.items()}
    log.back = int(log.rng.integers(0, max(1, min(20, log.n - log.at - 6))))
    if log.coin():
        log.lines.append((log.at + log.back - 1, f"Resuming from checkpoints/exp/global_step_{log.at}"))
    again = np.asarray(log.on & (log.t < log.at + log.back))
    log.times(
        "actor/grad_norm", np.exp(log.rng.normal(0, 0.15, log.n)), again
    )  # other samples of the same prompts
    for stage in ("gen", "update_actor", "old_log_prob"):
        log.times(f"timing_s/{stage}", log.uni(1.2, 3), np.asarray(log.t == log.at))
    return log


WELL: dict[str, Callable[[int], Log]] = {
    f.__name__: f
    for f in (
        longer_by_curriculum, harder_by_curriculum, fp8_rollout, waits_in_spells, slow_evaluation,
        checkpoint_every_k, resume_as_it_was,
    )
}  # fmt: skip
