"""Runs as people describe them in reports: each fault by what was seen in verl's metrics, with sizes told there.

A second source of logs beside `synthetic_runs.py`, written with other assumptions: no mechanism, only series with
plain noise whose levels are changed the way users tell it ("KL grew tenfold within fifty steps and the reward
stalled"). The diagnosis has to be right on both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Table = dict[str, Array]
OFF = "training/off_policy"


class Story:
    """A table of series, and helpers to tell what happened to them from step index `at` on."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(10_000 + seed)
        self.n = int(rng.integers(60, 260))
        self.at = int(self.n * rng.uniform(0.35, 0.7))
        self.end = self.n
        self.is_async = bool(rng.random() < 0.5)
        self.is_agentic = bool(rng.random() < 0.3)
        self.noise = float(rng.uniform(0.01, 0.08))
        self.first_step = 1
        self.nulls: tuple[int, tuple[str, ...]] | None = None
        self.rewound = 0
        """Steps that are logged twice: the run goes on from `at - rewound` after step `at`."""
        self.table: Table = self._base()

    @property
    def t(self) -> Array:
        return np.arange(self.n, dtype=np.float64)

    def wave(self, level: float | Array, noise: float = 1.0) -> Array:
        """A level with multiplicative noise and a rare spike."""
        rng, n = self.rng, self.n
        out = level * np.exp(rng.normal(0, self.noise * noise, n))
        return np.asarray(out * np.where(rng.random(n) < 0.008, rng.uniform(1.2, 2.0, n), 1.0))

    def _base(self) -> Table:
        rng, n, t = self.rng, self.n, self.t
        start, gain = rng.uniform(0.15, 0.45), rng.uniform(0.05, 0.4)
        score = start + gain * (1 - np.exp(-t / (n * rng.uniform(0.2, 1.0))))
        length = rng.uniform(400, 3000) * (1 + rng.uniform(-0.2, 0.8) * t / n)
        gen, train = rng.uniform(25, 200), rng.uniform(20, 120)
        grow = length / length[0]
        m: Table = {
            "actor/entropy": self.wave(rng.uniform(0.25, 0.7) * (1 - rng.uniform(0, 0.5) * t / n), 0.5),
            "actor/grad_norm": self.wave(rng.uniform(0.05, 0.5), 3),
            "actor/pg_loss": rng.normal(0, 0.01, n),
            "actor/pg_clipfrac": self.wave(rng.uniform(5e-4, 4e-3), 2),
            "actor/ppo_kl": rng.normal(2e-4, 1e-4, n),
            "actor/lr": np.full(n, 1e-6),
            "critic/score/mean": np.clip(score + rng.normal(0, 0.015, n), 0, 1),
            "critic/score/max": np.ones(n),
            "critic/score/min": np.zeros(n),
            "response_length/mean": self.wave(length, 0.5),
            "response_length/max": self.wave(length * rng.uniform(2.5, 4), 1.0),
            "response_length/min": self.wave(length * 0.15, 2),
            "response_length/clip_ratio": np.round(np.clip(self.wave(rng.uniform(0.002, 0.04), 3), 0, 1), 4),
            "timing_s/gen": self.wave(gen * grow),
            "timing_s/reward": self.wave(rng.uniform(0.5, 4)),
            "timing_s/old_log_prob": self.wave(train * 0.25 * grow),
            "timing_s/adv": self.wave(rng.uniform(0.1, 0.6), 2),
            "timing_s/update_actor": self.wave(train * grow),
            "timing_s/update_weights": self.wave(rng.uniform(2, 12), 1.5),
            "perf/max_memory_allocated_gb": np.maximum.accumulate(
                rng.uniform(42, 60) * np.exp(rng.normal(0, 0.004, n))
            ),
            "perf/cpu_memory_used_gb": rng.uniform(100, 300) * np.exp(rng.normal(0, 0.01, n)),
            "perf/mfu/actor": self.wave(rng.uniform(0.2, 0.45), 0.3),
            "training/rollout_probs_diff_mean": self.wave(rng.uniform(0.003, 0.013)),
            "training/rollout_probs_diff_max": np.clip(rng.normal(0.6, 0.1, n), 0.2, 1),
            "training/epoch": np.floor(t / (n * 0.6)),
            "training/global_step": t + 1,
        }
        m["critic/rewards/mean"] = m["critic/score/mean"].copy()
        m["perf/max_memory_reserved_gb"] = np.maximum.accumulate(
            m["perf/max_memory_allocated_gb"] + rng.uniform(4, 9) * (1 - 0.5 * np.exp(-t / 10))
        )
        diff = m["training/rollout_probs_diff_mean"]
        m["training/rollout_probs_diff_std"] = diff * 2 * self.wave(1.0)
        m["training/rollout_actor_probs_pearson_corr"] = 1 - 12 * diff**2 * self.wave(1.0, 2)
        kl = rng.uniform(4e-4, 5e-3)
        m["rollout_corr/kl"] = self.wave(kl, 2)
        m["rollout_corr/k3_kl"] = self.wave(kl * 1.1, 2)
        m["rollout_corr/ppl_ratio"] = 1 + self.wave(kl, 2)
        m["rollout_corr/chi2_token"] = self.wave(kl * 3, 5)
        m["rollout_corr/rollout_is_mean"] = rng.normal(1, 0.002, n)
        m["rollout_corr/rollout_is_eff_sample_size"] = np.clip(1 - self.wave(kl * 3, 3), 0, 1)
        if self.is_async:
            self._add_async(m)
        if self.is_agentic:
            self._add_agentic(m)
        for source in ("math", "code", "qa"):
            m[f"val-core/{source}/reward/mean@1"] = np.where(
                t % 10 == 9, np.clip(score * rng.uniform(0.6, 1.2) + rng.normal(0, 0.02, n), 0.03, 1), np.nan
            )
        m["timing_s/save_checkpoint"] = np.where(t % 20 == 19, gen * 0.4, np.nan)
        m["timing_s/testing"] = np.where(t % 10 == 9, gen * 0.6, np.nan)
        return m

    def _add_async(self, m: Table) -> None:
        rng, n = self.rng, self.n
        lag = rng.uniform(0.3, 1.5)
        m[f"{OFF}/trajectory_staleness/mean"] = self.wave(lag, 2)
        m[f"{OFF}/trajectory_staleness/max"] = np.round(lag + 1 + rng.random(n))
        m[f"{OFF}/trajectory_staleness/min"] = np.zeros(n)
        m[f"{OFF}/trajectory_staleness_worst/mean"] = self.wave(lag + 0.3, 2)
        m[f"{OFF}/trajectory_staleness_worst/max"] = m[f"{OFF}/trajectory_staleness/max"] + 1
        m[f"{OFF}/evicted_samples"] = rng.poisson(rng.uniform(0, 2), n).astype(float)

    def _add_agentic(self, m: Table) -> None:
        m["num_turns/mean"] = self.wave(self.rng.uniform(4, 9), 0.5)
        m["num_turns/max"] = np.full(self.n, 20.0)
        m["timing_s/agent_loop/tool_calls/mean"] = self.wave(self.rng.uniform(1, 8), 1.5)
        m["response/aborted_ratio"] = np.clip(self.wave(0.004, 5), 0, 1)
        m["training/rollout_failure/evicted_samples"] = self.rng.poisson(0.5, self.n).astype(float)

    def make_async(self) -> None:
        if not self.is_async:
            self.is_async = True
            self._add_async(self.table)

    def make_agentic(self) -> None:
        if not self.is_agentic:
            self.is_agentic = True
            self._add_agentic(self.table)

    # -- how a series changes from `at` on

    def step_to(self, name: str, factor: float | None = None, level: float | None = None) -> None:
        x = self.table.get(name)
        if x is None:
            return
        after = x * factor if factor is not None else self.wave(float(level or 0.0))
        self.table[name] = np.where(self.t >= self.at, after, x)

    def ramp_to(self, name: str, factor: float, power: float = 1.0, over: int | None = None) -> None:
        """Multiplied by `factor` at the end of the ramp (`over` steps, or the rest of the run)."""
        x = self.table.get(name)
        if x is None:
            return
        progress = np.clip((self.t - self.at) / (over or (self.n - self.at)), 0, 1) ** power
        self.table[name] = x * (1 + (factor - 1) * progress)

    def gap(self, diff: float, kl: float, *, ramp: bool, over: int | None = None) -> None:
        change = (lambda name, f: self.ramp_to(name, f, over=over)) if ramp else self.step_to
        before = self.table["training/rollout_actor_probs_pearson_corr"].copy()
        for name in ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_std"):
            change(name, diff)
        self.table["training/rollout_actor_probs_pearson_corr"] = before
        lost = (1 - before) * np.where(
            self.t >= self.at, (self.table["training/rollout_probs_diff_mean"] / 0.007) ** 1.2, 1.0
        )
        self.table["training/rollout_actor_probs_pearson_corr"] = 1 - np.minimum(lost, 0.9)
        for name in ("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"):
            change(name, kl)
        self.table["rollout_corr/ppl_ratio"] = 1 + self.table["rollout_corr/kl"]
        self.table["rollout_corr/rollout_is_eff_sample_size"] = 1 / (1 + 3 * self.table["rollout_corr/kl"])

    def reward(self, factor: float, *, ramp: bool, over: int | None = None) -> None:
        for name in ("critic/score/mean", "critic/rewards/mean"):
            if ramp:
                self.ramp_to(name, factor, over=over)
            else:
                self.step_to(name, factor)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        stages = [
            k
            for k in self.table
            if k.startswith("timing_s/") and "agent_loop" not in k and k != "timing_s/step"
        ]
        stages = [k for k in stages if k != "timing_s/testing"]
        total = np.sum([np.nan_to_num(self.table[k]) for k in stages], axis=0)
        total = total * 1.01 + self.table.pop("lost", np.zeros(self.n))
        self.table["timing_s/step"] = total
        self.table["perf/time_per_step"] = total
        self.table["perf/throughput"] = 512 * self.table["response_length/mean"] / total / 8
        out = []
        for i in range(self.end):
            data = {k: float(v[i]) for k, v in self.table.items() if np.isfinite(v[i])}
            if self.nulls is not None and i >= self.nulls[0]:
                data.update(dict.fromkeys(self.nulls[1], float("nan")))
            back = self.rewound if i >= self.at else 0
            out.append((i + self.first_step - back, data))
        return out


def missed_weight_sync(s: Story) -> None:
    s.gap(s.rng.uniform(3, 12), s.rng.uniform(8, 120), ramp=True, over=int(s.rng.integers(20, 80)))
    s.reward(s.rng.uniform(0.6, 0.98), ramp=True)
    if s.rng.random() < 0.5:
        s.step_to("timing_s/update_weights", s.rng.uniform(0.02, 0.3))


def stale_samples(s: Story) -> None:
    s.make_async()
    add = s.rng.uniform(2.5, 7)
    for stat in ("mean", "max"):
        for which in ("trajectory_staleness", "trajectory_staleness_worst"):
            name = f"{OFF}/{which}/{stat}"
            if name in s.table:
                s.table[name] = s.table[name] + np.where(s.t >= s.at, add * s.wave(1.0), 0)
    s.gap(s.rng.uniform(1.3, 2.5), s.rng.uniform(1.8, 6), ramp=False)
    s.step_to("actor/pg_clipfrac", s.rng.uniform(1.5, 4))
    s.reward(s.rng.uniform(0.75, 1.0), ramp=True)
    if s.rng.random() < 0.6:
        s.table[f"{OFF}/evicted_samples"] += np.where(s.t >= s.at, s.rng.poisson(40, s.n), 0)


def engine_mismatch(s: Story) -> None:
    if s.rng.random() < 0.5:
        s.at = 0
    target = s.rng.uniform(0.035, 0.12)
    s.gap(
        target / float(np.median(s.table["training/rollout_probs_diff_mean"])),
        s.rng.uniform(12, 60),
        ramp=False,
    )
    if s.at == 0:
        s.table["rollout_corr/kl"] = s.wave(s.rng.uniform(0.04, 0.2), 2)
        s.table["rollout_corr/k3_kl"] = s.wave(s.rng.uniform(0.04, 0.2), 2)
    s.reward(s.rng.uniform(0.85, 1.0), ramp=True)


def dead_sandbox_pool(s: Story) -> None:
    s.make_agentic()
    s.reward(s.rng.uniform(0.05, 0.6), ramp=False)
    kind = s.rng.integers(0, 3)
    if kind == 0:
        s.step_to("num_turns/mean", s.rng.uniform(0.3, 0.6))
        s.step_to("timing_s/agent_loop/tool_calls/mean", s.rng.uniform(0.02, 0.2))
        s.step_to("response_length/mean", s.rng.uniform(0.4, 0.8))
    elif kind == 1:
        s.step_to("timing_s/agent_loop/tool_calls/mean", s.rng.uniform(4, 15))
        s.step_to("timing_s/gen", s.rng.uniform(1.5, 4))
        s.table["response/aborted_ratio"] += np.where(s.t >= s.at, s.rng.uniform(0.2, 0.7), 0)
    else:
        s.step_to("num_turns/mean", s.rng.uniform(0.4, 0.8))
        s.table["training/rollout_failure/evicted_samples"] += np.where(
            s.t >= s.at, s.rng.poisson(150, s.n), 0
        )


def collective_hang(s: Story) -> None:
    s.at = int(s.n * s.rng.uniform(0.4, 0.95))
    s.end = s.at + 1
    name = str(s.rng.choice(["timing_s/update_actor", "timing_s/old_log_prob", "timing_s/update_weights"]))
    s.table[name][s.at] += (
        float(s.rng.choice([600, 1800, 1805.2, 3600])) + 3 * s.table["timing_s/update_actor"][s.at]
    )


def oom_in_sync(s: Story) -> None:
    s.end = min(s.n, s.at + int(s.rng.integers(3, 15)))
    s.step_to("timing_s/update_weights", s.rng.uniform(1.8, 6))
    s.table["perf/max_memory_allocated_gb"] = np.where(
        s.t >= s.at, s.rng.uniform(75, 79), s.table["perf/max_memory_allocated_gb"]
    )
    s.table["perf/max_memory_reserved_gb"] = np.where(
        s.t >= s.at, 79.3, s.table["perf/max_memory_reserved_gb"]
    )


def late_oom_with_length(s: Story) -> None:
    s.at = int(0.2 * s.n)
    s.end = int(0.92 * s.n)
    over = s.end - s.at
    factor = s.rng.uniform(2.2, 4.5)
    for name in ("response_length/mean", "response_length/max", "timing_s/gen", "timing_s/update_actor"):
        s.ramp_to(name, factor, over=over)
    used = s.table["perf/max_memory_allocated_gb"]
    top = s.rng.uniform(76, 79)
    progress = np.clip((s.t - s.at) / over, 0, 1)
    s.table["perf/max_memory_allocated_gb"] = used + (top - used) * progress
    s.table["perf/max_memory_reserved_gb"] = np.minimum(79.5, s.table["perf/max_memory_allocated_gb"] + 4)


def silent_error_after_wake(s: Story) -> None:
    s.gap(s.rng.uniform(25, 60), s.rng.uniform(300, 3000), ramp=False)
    s.table["training/rollout_probs_diff_mean"] = np.minimum(s.table["training/rollout_probs_diff_mean"], 0.6)
    s.reward(s.rng.uniform(0.0, 0.15), ramp=False)
    s.step_to("response_length/mean", s.rng.uniform(2, 4))
    s.table["response_length/clip_ratio"] = np.where(s.t >= s.at, 0.8, s.table["response_length/clip_ratio"])
    s.step_to("actor/grad_norm", s.rng.uniform(2, 20))


def mismatch_to_nan(s: Story) -> None:
    s.at = int(s.n * s.rng.uniform(0.15, 0.5))
    over = int((s.n - s.at) * 0.8)
    s.gap(s.rng.uniform(4, 20), s.rng.uniform(30, 800), ramp=True, over=over)
    s.ramp_to("actor/grad_norm", s.rng.uniform(5, 60), power=3, over=over)
    s.nulls = (s.at + over, ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/entropy"))
    if s.rng.random() < 0.5:
        s.end = min(s.n, s.at + over + int(s.rng.integers(1, 6)))


def sandbox_leak(s: Story) -> None:
    s.make_agentic()
    s.at = int(s.n * s.rng.uniform(0.1, 0.4))
    s.ramp_to("timing_s/agent_loop/tool_calls/mean", s.rng.uniform(3, 12))
    s.ramp_to("perf/cpu_memory_used_gb", s.rng.uniform(1.25, 2.0))
    s.ramp_to("timing_s/gen", s.rng.uniform(1.4, 3.5))
    if s.rng.random() < 0.5:
        s.table["response/aborted_ratio"] += 0.2 * np.clip((s.t - 0.85 * s.n) / (0.15 * s.n), 0, 1)


def object_store_spill(s: Story) -> None:
    s.step_to("perf/cpu_memory_used_gb", s.rng.uniform(1.3, 2.2))
    base = float(np.median(s.table["timing_s/update_actor"]))
    s.table["lost"] = np.where(s.t >= s.at, s.wave(base * s.rng.uniform(0.6, 2.0), 4), 0)
    s.step_to("timing_s/adv", s.rng.uniform(5, 30))
    s.step_to("timing_s/reward", s.rng.uniform(2, 6))


def buffer_never_fills(s: Story) -> None:
    s.make_async()
    s.step_to("timing_s/gen", s.rng.uniform(3, 10))
    if s.rng.random() < 0.6:
        s.table[f"{OFF}/evicted_samples"] += np.where(s.t >= s.at, s.rng.poisson(300, s.n), 0)


def version_drift(s: Story) -> None:
    s.make_async()
    age = np.clip(s.t - s.at, 0, None)
    share = float(s.rng.choice([0.125, 0.25]))
    for which in ("trajectory_staleness", "trajectory_staleness_worst"):
        name = f"{OFF}/{which}/max"
        s.table[name] = np.maximum(s.table[name], age + 1)
        s.table[f"{OFF}/{which}/mean"] = s.table[f"{OFF}/{which}/mean"] + share * age
    s.gap(s.rng.uniform(1.5, 3.5), s.rng.uniform(2, 15), ramp=True)


def discontinuity_after_resume(s: Story) -> None:
    s.reward(s.rng.uniform(0.6, 0.85), ramp=False)
    s.step_to("actor/grad_norm", s.rng.uniform(2, 6))
    warm = np.clip((s.t - s.at + 1) / 10, 0.05, 1)
    s.table["actor/lr"] = np.where(s.t >= s.at, 1e-6 * warm, s.table["actor/lr"])
    s.step_to("actor/entropy", s.rng.uniform(1.2, 1.6))
    if s.rng.random() < 0.5:
        s.table["training/epoch"] = np.where(s.t >= s.at, 0, np.maximum(s.table["training/epoch"], 1))
    if s.rng.random() < 0.4:  # the log still holds the steps that were lost, and they run again
        s.rewound = min(int(s.rng.integers(3, 12)), s.at - 5)


def one_source_all_zero(s: Story) -> None:
    name = "val-core/code/reward/mean@1"
    s.table[name] = np.where((s.t >= s.at) & np.isfinite(s.table[name]), 0.0, s.table[name])
    s.reward(s.rng.uniform(0.55, 0.8), ramp=False)


def filter_starvation(s: Story) -> None:
    s.table["training/filter_groups/evicted_samples"] = np.round(s.wave(s.rng.uniform(40, 200), 2))
    over = int(s.rng.integers(1, 40))
    s.ramp_to("training/filter_groups/evicted_samples", s.rng.uniform(5, 20), over=over)
    s.ramp_to("timing_s/gen", s.rng.uniform(1.8, 6), over=over)


def _flat(s: Story, level: float) -> None:
    for name in ("critic/score/mean", "critic/rewards/mean", "critic/score/max", "critic/score/min"):
        s.table[name] = np.full(s.n, level)
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac"):
        s.table[name] = np.zeros(s.n)
    for name in [k for k in s.table if k.startswith("val-core/")]:
        s.table[name] = np.where(np.isfinite(s.table[name]), level, np.nan)
    if s.rng.random() < 0.3:
        for name in ("critic/score/max", "critic/score/min"):
            del s.table[name]


def all_wrong(s: Story) -> None:
    _flat(s, float(s.rng.choice([0.0, 0.0, -1.0])))


def all_right(s: Story) -> None:
    _flat(s, 1.0)


def tail_burst(s: Story) -> None:
    hit = (s.t >= s.at) & (s.rng.random(s.n) < s.rng.uniform(0.3, 1.0))
    s.table["response_length/max"] = s.table["response_length/max"] * np.where(hit, s.rng.uniform(2.5, 6), 1)
    s.table["timing_s/gen"] = s.table["timing_s/gen"] * np.where(hit, s.rng.uniform(1.6, 4), 1)
    s.table["response_length/clip_ratio"] = s.table["response_length/clip_ratio"] + np.where(hit, 0.01, 0)


def fragmentation(s: Story) -> None:
    s.at = int(s.n * s.rng.uniform(0.05, 0.3))
    kept = s.table["perf/max_memory_reserved_gb"]
    top = s.rng.uniform(75, 79.5)
    s.table["perf/max_memory_reserved_gb"] = kept + (top - kept) * np.clip((s.t - s.at) / (s.n - s.at), 0, 1)


def reward_saturates(s: Story) -> None:
    top = 0.97 - 0.6 * np.exp(-s.t / (0.15 * s.n))
    for name in ("critic/score/mean", "critic/rewards/mean"):
        s.table[name] = np.clip(top + s.rng.normal(0, 0.01, s.n), 0, 1)
    s.ramp_to("actor/grad_norm", 0.3)
    s.ramp_to("actor/entropy", 0.4)


def learning_rate_too_high(s: Story) -> None:
    over = int(s.rng.integers(15, 50))
    s.table["actor/lr"] = np.full(s.n, 1e-5)
    s.ramp_to("actor/grad_norm", s.rng.uniform(6, 50), over=over)
    s.table["actor/ppo_kl"] = np.abs(s.table["actor/ppo_kl"]) + 1e-5
    s.ramp_to("actor/ppo_kl", s.rng.uniform(20, 300), power=2, over=over)
    s.ramp_to("actor/pg_clipfrac", s.rng.uniform(5, 40), over=over)
    s.ramp_to("actor/entropy", float(s.rng.choice([0.1, 4.0])), over=over)
    s.reward(s.rng.uniform(0.05, 0.5), ramp=True, over=over)
    if s.rng.random() < 0.4:
        s.ramp_to("response_length/mean", 2.0, over=over)
        s.ramp_to("timing_s/gen", 2.2, over=over)


def data_exhausted(s: Story) -> None:
    s.table["training/epoch"] = np.floor(s.t / (s.n / 12))
    for name in [k for k in s.table if k.startswith("val-core/")]:
        s.ramp_to(name, 0.85)


def entropy_collapse(s: Story) -> None:
    s.table["actor/entropy"] = s.wave(0.5 * np.exp(-s.t / (0.1 * s.n)) + 0.005, 0.5)
    s.ramp_to("actor/grad_norm", 0.2)
    s.ramp_to("training/rollout_probs_diff_mean", 0.4)


def plateau(s: Story) -> None:
    for name in ("critic/score/mean", "critic/rewards/mean"):
        s.table[name] = np.clip(0.35 + s.rng.normal(0, 0.015, s.n), 0, 1)


FAULTS: dict[str, Callable[[Story], None]] = {
    f.__name__: f
    for f in (
        all_wrong,
        all_right,
        missed_weight_sync,
        stale_samples,
        engine_mismatch,
        dead_sandbox_pool,
        collective_hang,
        oom_in_sync,
        late_oom_with_length,
        silent_error_after_wake,
        mismatch_to_nan,
        sandbox_leak,
        object_store_spill,
        buffer_never_fills,
        version_drift,
        discontinuity_after_resume,
        one_source_all_zero,
        filter_starvation,
        tail_burst,
        fragmentation,
    )
}
STATES: dict[str, Callable[[Story], None]] = {
    f.__name__: f
    for f in (reward_saturates, learning_rate_too_high, data_exhausted, entropy_collapse, plateau)
}


def write_jsonl(name: str, seed: int, path: Path) -> Path:
    """One story in verl's file logger format. "healthy" tells nothing."""
    story = Story(seed)
    if name != "healthy":
        {**FAULTS, **STATES}[name](story)
    with path.open("w", encoding="utf-8") as file:
        for step, data in story.rows():
            file.write(
                json.dumps({"step": step, "data": {k: None if v != v else v for k, v in data.items()}}) + "\n"
            )
    return path
