"""Runs as an outsider would write them from the table of faults alone: a third source of logs for `bench/diagnose.py`.

Each fault has several kinds (how it shows differs by framework, model and luck) over runs of many habits: 30 to 900
steps, logged every step or every few, few metrics or many, a first step that compiles, evaluations and checkpoints
that cost seconds in every n-th step, lengths that grow for good, learning rates that warm up and decay, curricula.
Nothing here was used to tune a rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
OFF = "training/off_policy/"
STALE = OFF + "trajectory_staleness/"


@dataclass
class Run:
    """A table of series, one entry a step, and what else the log says."""

    rng: np.random.Generator
    n: int
    at: int
    table: dict[str, Array] = field(default_factory=dict)
    end: int = 0
    text: list[tuple[int, str]] = field(default_factory=list)
    """(after which row, line)"""
    not_numbers: tuple[int, tuple[str, ...]] | None = None
    back: int = 0
    """Steps from `at` on that had been logged before the restart at `at`: they stand twice."""
    first_time: dict[str, Array] = field(default_factory=dict)
    """The table as it was before the restart, where the two differ."""
    every: int = 1
    """Steps a log call."""
    first_step: int = 1
    is_async: bool = False
    is_agentic: bool = False
    has_filter: bool = False
    device_gb: float = 80.0
    rho: float = 0.3
    only_words: bool = False
    """Nothing but lines of the console tells."""
    keys: tuple[str, ...] = ()
    """Metrics that a log needs for the fault to be told at all; all others may be missing."""

    @property
    def t(self) -> Array:
        return np.arange(self.n, dtype=np.float64)

    @property
    def since(self) -> Array:
        return np.clip(self.t - self.at, 0, None)

    @property
    def on(self) -> NDArray[np.bool_]:
        return self.t >= self.at

    def uni(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def logu(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def pick(self, *options: str) -> str:
        return str(self.rng.choice(list(options)))

    def coin(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def noisy(self, level: float | Array, size: float, *, heavy: float = 0.0) -> Array:
        """A level times autocorrelated noise; `heavy` is the share of steps that stick out."""
        white = self.rng.standard_t(6, self.n) * size * 0.85
        rho, out, state = self.rho, np.zeros(self.n), 0.0
        for i in range(self.n):
            state = rho * state + np.sqrt(1 - rho * rho) * white[i]
            out[i] = state
        spikes = np.where(self.rng.random(self.n) < heavy, self.rng.uniform(1.3, 3.0, self.n), 1.0)
        return np.asarray(level * np.exp(out) * spikes)

    def times(self, name: str, factor: float | Array) -> None:
        if name in self.table:
            self.table[name] = self.table[name] * np.where(self.on, factor, 1.0)

    def plus(self, name: str, amount: float | Array) -> None:
        if name in self.table:
            self.table[name] = self.table[name] + np.where(self.on, amount, 0.0)

    def put(self, name: str, values: float | Array) -> None:
        if name in self.table:
            self.table[name] = np.where(self.on, values, self.table[name])

    def ramp(self, over: float | None = None, power: float = 1.0) -> Array:
        """0 before the fault, 1 after `over` steps (or at the end)."""
        length = over or max(self.n - self.at - 1, 1)
        return np.clip(self.since / length, 0, 1) ** power

    def grow_gap(self, factor: float | Array) -> None:
        """The disagreement of engine and trainer as an amplitude; divergences go with its square."""
        before = self.table["training/rollout_probs_diff_mean"].copy()
        for name in ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_std"):
            self.times(name, factor)
        for name in (
            "rollout_corr/kl",
            "rollout_corr/k3_kl",
            "rollout_corr/chi2_token",
            "rollout_corr/log_ppl_diff",
        ):
            self.times(name, np.asarray(factor) ** 2)
        kl = self.table["rollout_corr/kl"]
        self.put("rollout_corr/ppl_ratio", np.exp(np.minimum(kl, 6)))
        self.put("rollout_corr/rollout_is_eff_sample_size", np.clip(1 / (1 + 2.5 * np.minimum(kl, 30)), 0, 1))
        grown = (self.table["training/rollout_probs_diff_mean"] / before) ** 1.6
        pearson = self.table["training/rollout_actor_probs_pearson_corr"]
        self.put("training/rollout_actor_probs_pearson_corr", np.clip(1 - (1 - pearson) * grown, 0.02, 1))
        self.put(
            "training/rollout_probs_diff_max",
            np.clip(self.table["training/rollout_probs_diff_max"] * 1.2, 0, 1),
        )
        capped = np.minimum(self.table["training/rollout_probs_diff_mean"], 0.7)
        self.table["training/rollout_probs_diff_mean"] = capped

    def scale_reward(self, factor: float | Array) -> None:
        for name in ("critic/score/mean", "critic/rewards/mean"):
            self.times(name, factor)

    def make_async(self) -> None:
        if self.is_async:
            return
        self.is_async = True
        lag = self.uni(0.3, 2.0)
        mean = np.minimum(self.noisy(lag, 0.15), self.t + 0.2)
        self.table[STALE + "mean"] = mean
        self.table[STALE + "max"] = np.minimum(np.ceil(mean + self.rng.random(self.n)), self.t)
        self.table[STALE + "min"] = np.floor(mean * self.rng.uniform(0.2, 0.9, self.n))
        worst = OFF + "trajectory_staleness_worst/"
        self.table[worst + "mean"] = mean * 1.2
        self.table[worst + "max"] = self.table[STALE + "max"] + self.rng.integers(0, 2, self.n)
        self.table[worst + "min"] = self.table[STALE + "min"]
        self.table[OFF + "trajectory_spans/mean"] = 1 + 0.25 * mean
        self.table[OFF + "evicted_samples"] = self.rng.poisson(self.uni(0, 2), self.n).astype(float)

    def make_agentic(self) -> None:
        if self.is_agentic:
            return
        self.is_agentic = True
        self.table["num_turns/mean"] = self.noisy(self.uni(3, 14), 0.04)
        self.table["num_turns/max"] = np.full(self.n, 30.0)
        self.table["num_turns/min"] = np.full(self.n, 2.0)
        self.table["timing_s/agent_loop/tool_calls/mean"] = self.noisy(self.logu(0.6, 30), 0.12, heavy=0.01)
        self.table["timing_s/agent_loop/tool_calls/max"] = (
            self.table["timing_s/agent_loop/tool_calls/mean"] * 6
        )
        self.table["response/aborted_ratio"] = np.clip(self.rng.poisson(1.0, self.n) / 512, 0, 1)
        self.table["training/rollout_failure/evicted_samples"] = self.rng.poisson(0.7, self.n).astype(float)

    def make_filtered(self) -> None:
        if not self.has_filter:
            self.has_filter = True
            level = self.uni(20, 250)
            self.table["training/filter_groups/evicted_samples"] = np.round(self.noisy(level, 0.15))


def base(seed: int) -> Run:
    """A healthy run of some habit."""
    rng = np.random.default_rng(770_000 + seed)
    n = int(np.exp(rng.uniform(np.log(36), np.log(900))))
    r = Run(rng=rng, n=n, at=int(n * rng.uniform(0.3, 0.72)), end=n)
    r.rho = r.uni(0.0, 0.6)
    r.first_step = int(rng.choice([0, 1, 1, 1, 201]))
    r.every = int(rng.choice([1, 1, 1, 1, 2, 5])) if n > 250 else 1
    r.device_gb = float(rng.choice([80, 80, 141, 192, 48]))
    t, size = r.t, r.uni(0.015, 0.09)
    m = r.table
    shape = r.pick("slow", "fast", "late", "wavy")
    start, top = r.uni(0.05, 0.5), r.uni(0.4, 0.92)
    top = max(top, start + 0.02)
    way = {
        "slow": t / n,
        "fast": 1 - np.exp(-t / (0.12 * n)),
        "late": 1 / (1 + np.exp(-(t - 0.6 * n) / (0.08 * n))),
        "wavy": t / n + 0.05 * np.sin(t / n * 9),
    }[shape]
    score = start + (top - start) * way
    r.table["_score"] = score
    m["critic/score/mean"] = np.clip(score + rng.normal(0, r.uni(0.006, 0.03), n), 0, 1)
    m["critic/rewards/mean"] = m["critic/score/mean"].copy()
    for side, level in (("max", 1.0), ("min", 0.0)):
        m[f"critic/score/{side}"] = np.full(n, level)
        m[f"critic/rewards/{side}"] = np.full(n, level)
    m["critic/advantages/mean"] = rng.normal(0, 0.01, n)
    m["critic/advantages/max"] = rng.normal(2.4, 0.1, n)
    m["critic/advantages/min"] = rng.normal(-2.4, 0.1, n)
    grow = r.uni(-0.3, 0.3) if r.coin(0.6) else r.uni(0.5, 2.2)
    length = r.logu(150, 9000) * (1 + grow * (1 - np.exp(-2 * t / n)) / 0.86)
    width = float(2 ** np.ceil(np.log2(length.max() * r.uni(1.8, 8))))
    m["response_length/mean"] = r.noisy(length, 0.5 * size)
    m["response_length/max"] = np.round(np.minimum(width, r.noisy(length * r.uni(2.2, 4.0), size)))
    m["response_length/min"] = np.round(r.noisy(length * 0.12, 2 * size))
    clip = 0.25 * np.clip(length * 2.5 / width - 0.4, 0.004, 1)
    m["response_length/clip_ratio"] = np.round(np.clip(r.noisy(clip, 3 * size), 0, 1) * 512) / 512
    m["prompt_length/mean"] = r.noisy(r.logu(80, 1500), 0.02)
    entropy = r.uni(0.15, 0.5) + r.uni(0.0, 0.8) * np.exp(-t / (n * r.uni(0.15, 1.0)))
    m["actor/entropy"] = r.noisy(entropy, 0.4 * size)
    m["actor/grad_norm"] = r.noisy(r.logu(0.03, 2.0), 2.5 * size, heavy=0.012)
    m["actor/pg_loss"] = rng.normal(0, 0.015, n)
    m["actor/pg_clipfrac"] = np.clip(r.noisy(r.logu(2e-4, 8e-3), 2 * size), 0, 1)
    m["actor/ppo_kl"] = rng.normal(r.logu(5e-5, 5e-4), 6e-5, n)
    if r.coin(0.4):
        m["actor/kl_loss"] = r.noisy(1e-4 + r.logu(0.003, 0.1) * (t + 1) / n, size)
    lr = np.full(n, float(rng.choice([5e-7, 1e-6, 2e-6, 5e-6])))
    if r.coin(0.4):
        lr = lr * np.clip((t + 1) / r.uni(3, 20), 0, 1)
    if r.coin(0.3):
        lr = lr * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * t / n)))
    m["actor/lr"] = lr
    gen, train = r.logu(6, 600), r.logu(4, 500)
    rel = m["response_length/mean"] / length[0]
    m["timing_s/gen"] = r.noisy(gen * rel ** r.uni(0.6, 1.1), size, heavy=0.01)
    m["timing_s/reward"] = r.noisy(r.logu(0.1, 8), 2 * size)
    m["timing_s/old_log_prob"] = r.noisy(0.27 * train * rel, 0.6 * size)
    if r.coin():
        m["timing_s/ref"] = r.noisy(0.26 * train * rel, 0.6 * size)
    m["timing_s/adv"] = r.noisy(r.logu(0.03, 1.0), 2 * size)
    m["timing_s/update_actor"] = r.noisy(train * rel, 0.6 * size)
    m["timing_s/update_weights"] = r.noisy(r.logu(0.8, 30), 1.2 * size, heavy=0.01)
    m["timing_s/gen"][0] *= r.uni(1, 4)
    m["timing_s/update_actor"][0] *= r.uni(1, 3)
    every = int(rng.choice([5, 10, 20, 25]))
    hit = t % every == every - 1
    m["timing_s/testing"] = np.where(hit, r.noisy(gen * r.uni(0.4, 3), 0.05), np.nan)
    saves = t % (2 * every) == 2 * every - 1
    m["timing_s/save_checkpoint"] = np.where(saves, r.noisy(r.logu(5, 200), 0.1), np.nan)
    if r.coin(0.3):  # the caches are cold after an evaluation
        m["timing_s/gen"] = m["timing_s/gen"] * np.where(np.roll(hit, 1), r.uni(1.1, 1.6), 1.0)
    used = r.device_gb * (r.uni(0.4, 0.62) + 0.08 * np.maximum.accumulate(rel) / rel.max())
    m["perf/max_memory_allocated_gb"] = np.maximum.accumulate(used * np.exp(rng.normal(0, 0.003, n)))
    extra = r.device_gb * r.uni(0.03, 0.12) * (1 - 0.6 * np.exp(-t / r.uni(2, 12)))
    extra = extra + np.where(t >= 2 * every, r.device_gb * r.uni(0, 0.03), 0)
    m["perf/max_memory_reserved_gb"] = np.minimum(
        m["perf/max_memory_allocated_gb"] + extra, 0.97 * r.device_gb
    )
    m["perf/max_memory_reserved_gb"] = np.maximum.accumulate(m["perf/max_memory_reserved_gb"])
    m["perf/cpu_memory_used_gb"] = r.noisy(r.uni(60, 700) * (1 + r.uni(0, 0.05) * t / n), 0.006)
    m["perf/mfu/actor"] = r.noisy(r.uni(0.15, 0.5), 0.3 * size)
    diff = r.logu(0.0015, 0.012)
    m["training/rollout_probs_diff_mean"] = r.noisy(diff * (entropy / entropy[0]) ** 0.3, size)
    m["training/rollout_probs_diff_std"] = m["training/rollout_probs_diff_mean"] * r.noisy(2.3, size)
    m["training/rollout_probs_diff_max"] = np.clip(rng.normal(r.uni(0.25, 0.8), 0.1, n), 0.05, 1)
    corr = (diff / 0.1) ** 2 * r.uni(0.5, 1.5)
    m["training/rollout_actor_probs_pearson_corr"] = 1 - r.noisy(min(corr, 0.012), 2 * size)
    kl = min(diff**2 * r.uni(25, 80), 0.008)
    for name, factor in (("kl", 1.0), ("k3_kl", 1.05), ("log_ppl_diff", 1.0), ("chi2_token", 2.5)):
        m[f"rollout_corr/{name}"] = r.noisy(kl * factor, 2 * size, heavy=0.01)
    m["rollout_corr/ppl_ratio"] = 1 + m["rollout_corr/kl"]
    m["rollout_corr/rollout_is_mean"] = rng.normal(1, 0.002, n)
    m["rollout_corr/rollout_is_eff_sample_size"] = np.clip(1 - 2.5 * m["rollout_corr/kl"], 0, 1)
    m["training/epoch"] = np.floor(t / (n * r.uni(0.4, 3)))
    m["training/global_step"] = t * r.every + r.first_step
    m["perf/total_num_tokens"] = 512 * (m["response_length/mean"] + m["prompt_length/mean"])
    for source, tilt in (("openai/gsm8k", 1.2), ("code", 0.8), ("search", 0.6)):
        value = np.clip(score * tilt + rng.normal(0, 0.02, n), 0.02, 1)
        m[f"val-core/{source}/reward/mean@1"] = np.where(hit, value, np.nan)
    if r.coin():
        r.make_async()
    if r.coin(0.3):
        r.make_agentic()
    if r.coin(0.3):
        r.make_filtered()
    return r


# ---- faults ------------------------------------------------------------------------------------------------------


def missed_weight_sync(r: Run) -> None:
    """Engines keep the weights of one step: the distance grows as a walk, or straight, and the labels lie or not."""
    kind = r.pick("silent", "silent", "quick", "told", "empty")
    power = r.uni(0.5, 1.0)
    step = r.uni(0.06, 0.4)  # of the floor, a step
    away = step * r.every * r.since**power
    r.grow_gap(np.sqrt(1 + away**2))
    if kind == "quick":
        r.times("timing_s/update_weights", r.uni(0.005, 0.3))
    if kind == "empty":
        sent = r.noisy(r.logu(500, 60_000), 0.01)
        r.table["checkpoint_engine/payload_mbytes"] = np.where(r.on, sent * r.uni(0, 0.05), sent)
    if kind == "told":
        r.make_async()
        for name in ("mean", "max", "min"):
            r.plus(STALE + name, r.since * r.every)
            r.plus(OFF + f"trajectory_staleness_worst/{name}", r.since * r.every)
    held = float(r.table["critic/score/mean"][max(0, r.at - 5) : r.at].mean())
    for name in ("critic/score/mean", "critic/rewards/mean"):
        r.put(name, np.clip(held + r.rng.normal(0, 0.015, r.n), 0, 1))


def stale_samples(r: Run) -> None:
    """Generation falls behind; the samples say how old they are."""
    r.make_async()
    add = r.uni(2.5, 12)
    rise = 1.0 if r.coin(0.4) else r.ramp(r.uni(0.05, 0.5) * r.n)
    extra = add * rise * r.noisy(1.0, 0.08)
    for name, factor in (("mean", 1.0), ("max", 1.4), ("min", 0.6)):
        r.plus(STALE + name, np.round(extra * factor) if name != "mean" else extra)
        r.plus(
            OFF + f"trajectory_staleness_worst/{name}", np.round(extra * factor) if name != "mean" else extra
        )
    r.grow_gap(np.sqrt(1 + (r.uni(0.1, 0.35) * extra) ** 2))
    r.times("actor/pg_clipfrac", 1 + r.uni(0.1, 0.6) * extra)
    r.plus(OFF + "evicted_samples", r.rng.poisson(r.uni(0, 40), r.n))
    r.scale_reward(1 - r.uni(0, 0.3) * r.ramp())


def engine_mismatch(r: Run) -> None:
    """Other numerics in the engine: from the start, or since a restart with another engine."""
    if r.coin(0.45):
        r.at = 0
    level = r.uni(0.03, 0.13)
    r.grow_gap(max(level / float(np.median(r.table["training/rollout_probs_diff_mean"])), 3.0))
    r.scale_reward(1 - r.uni(0, 0.15) * r.ramp())


def dead_sandbox_pool(r: Run) -> None:
    """The pool is gone: refused at once, or each call waits for its time-out; scored as zero or thrown away."""
    r.make_agentic()
    kind = r.pick("refused", "timeout", "aborted")
    lost = r.uni(0.35, 1.0)
    if kind == "refused":
        r.put("timing_s/agent_loop/tool_calls/mean", r.noisy(r.uni(0.01, 0.08), 0.2))
        r.put("timing_s/agent_loop/tool_calls/max", r.noisy(r.uni(0.1, 0.4), 0.2))
        r.put(
            "num_turns/mean", r.noisy(2 + (float(r.table["num_turns/mean"].mean()) - 2) * r.uni(0, 0.4), 0.03)
        )
        r.scale_reward(1 - lost)
    elif kind == "timeout":
        r.times("timing_s/agent_loop/tool_calls/mean", r.uni(3.5, 30))
        r.times("timing_s/agent_loop/tool_calls/max", r.uni(3.5, 30))
        r.times("timing_s/gen", r.uni(1.3, 5))
        r.scale_reward(1 - lost)
        if r.coin():
            r.plus("response/aborted_ratio", lost * 0.8)
    else:
        r.plus("training/rollout_failure/evicted_samples", r.rng.poisson(512 * lost, r.n))
        r.plus("response/aborted_ratio", lost * 0.7)
        r.times("num_turns/mean", r.uni(0.5, 0.8))
        if r.coin():
            r.scale_reward(1 - 0.8 * lost)


def collective_hang(r: Run) -> None:
    """A stage ends in its time-out, in the log's words, its seconds, or both."""
    r.at = int(r.n * r.uni(0.35, 0.97))
    r.end = r.at + 1
    stage = r.pick("update_actor", "old_log_prob", "update_weights", "ref")
    stage = stage if f"timing_s/{stage}" in r.table else "update_actor"
    kind = r.pick("words", "seconds", "both")
    r.only_words = kind == "words"
    if kind != "words":
        top = float(np.nanmax(r.table[f"timing_s/{stage}"]))
        r.put(f"timing_s/{stage}", max(float(r.rng.choice([600.0, 1800.0, 7200.0])), 8 * top))
    if kind != "seconds":
        ms = int(r.rng.choice([600000, 1800000, 7200000]))
        op = r.pick("ALLREDUCE", "_ALLGATHER_BASE", "BROADCAST", "REDUCE_SCATTER")
        r.text.append(
            (
                r.at,
                f"[rank3]:[E1104 03:12:55.401 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation "
                f"timeout: WorkNCCL(SeqNum=9214, OpType={op}, NumelIn=8192, NumelOut=8192, Timeout(ms)={ms}) ran for "
                f"{ms + 41} milliseconds before timing out.",
            )
        )


def oom_in_sync(r: Run) -> None:
    """The hand-over no longer fits."""
    r.end = min(r.n, r.at + int(r.rng.integers(2, 15)))
    r.only_words = r.coin(0.3)
    if not r.only_words:
        r.put("perf/max_memory_allocated_gb", r.device_gb * r.uni(0.95, 0.99))
        r.put("perf/max_memory_reserved_gb", r.device_gb * 0.992)
        r.times("timing_s/update_weights", r.uni(1.6, 8))
    size = r.uni(0.1, 9)
    where = r.pick(
        'File "/opt/verl/workers/fsdp_workers.py", line 713, in update_weights',
        'File "/opt/verl/workers/sharding_manager/fsdp_vllm.py", line 211, in __enter__',
        'File "/usr/lib/python3.12/site-packages/vllm/device_allocator/cumem.py", line 241, in wake_up',
    )
    r.text += [(r.end - 1, "Traceback (most recent call last):"), (r.end - 1, f"  {where}")]
    r.text.append(
        (
            r.end - 1,
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size:.2f} GiB. GPU 2 has a total "
            f"capacity of {r.device_gb:.2f} GiB of which 81.19 MiB is free.",
        )
    )


def late_oom_with_length(r: Run) -> None:
    r.at = int(r.n * r.uni(0.05, 0.4))
    r.end = int(r.n * r.uni(0.8, 1.0))
    over, factor = r.end - r.at, r.uni(1.9, 6)
    grown = 1 + (factor - 1) * r.ramp(over, r.uni(0.8, 1.6))
    for name in ("mean", "max"):
        r.times(f"response_length/{name}", grown)
    for stage in ("gen", "old_log_prob", "ref", "update_actor"):
        r.times(f"timing_s/{stage}", grown)
    used = r.table["perf/max_memory_allocated_gb"]
    top = r.device_gb * r.uni(0.94, 0.985)
    share = (grown - 1) / max(float(grown[: r.end].max()) - 1, 1e-9)
    r.put("perf/max_memory_allocated_gb", used + (top - used) * np.clip(share, 0, 1))
    reserved = np.minimum(r.table["perf/max_memory_allocated_gb"] + 0.04 * r.device_gb, 0.993 * r.device_gb)
    r.put("perf/max_memory_reserved_gb", np.maximum(reserved, r.table["perf/max_memory_reserved_gb"]))
    if r.coin(0.7):
        r.text += [
            (r.end - 1, '  File "/opt/verl/workers/actor/dp_actor.py", line 505, in update_policy'),
            (
                r.end - 1,
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 11.14 GiB. GPU 5 has a ...",
            ),
        ]


def silent_error_after_wake(r: Run) -> None:
    """Garbage from one step on: to the limit, or cut at once."""
    r.grow_gap(r.uni(15, 60))
    r.put(
        "training/rollout_actor_probs_pearson_corr", np.clip(r.rng.normal(r.uni(0.0, 0.35), 0.03, r.n), -1, 1)
    )
    r.scale_reward(r.uni(0, 0.12))
    if r.coin(0.6):
        width = float(np.nanmax(r.table["response_length/max"]))
        r.put("response_length/mean", r.noisy(width * r.uni(0.6, 1), 0.01))
        r.put("response_length/clip_ratio", np.clip(r.rng.normal(0.8, 0.05, r.n), 0, 1))
        r.times("timing_s/gen", r.uni(1.5, 4))
    else:
        r.times("response_length/mean", r.uni(0.03, 0.3))
    r.times("actor/grad_norm", r.uni(2, 30))
    r.times("actor/entropy", r.uni(1.5, 6))


def mismatch_to_nan(r: Run) -> None:
    r.at = int(r.n * r.uni(0.1, 0.5))
    over = max(int((r.n - r.at) * r.uni(0.5, 0.95)), 8)
    top = r.uni(4, 25)
    way = top ** r.ramp(over) if r.coin() else 1 + (top - 1) * r.ramp(over, r.uni(1, 2.5))
    r.grow_gap(way)
    r.times("actor/grad_norm", way ** r.uni(0.8, 1.6))
    r.scale_reward(1 - r.uni(0, 0.4) * r.ramp(over))
    names = ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/entropy")
    r.not_numbers = (min(r.at + over, r.n - 1), names[: int(r.rng.integers(1, 5))])
    r.end = r.n if r.coin() else min(r.n, r.at + over + int(r.rng.integers(1, 6)))


def sandbox_leak(r: Run) -> None:
    """More and more leases are never returned."""
    r.make_agentic()
    r.at = int(r.n * r.uni(0.05, 0.4))
    way = r.ramp(power=r.uni(0.8, 2))
    r.times("timing_s/agent_loop/tool_calls/mean", 1 + r.uni(2, 12) * way)
    r.times("timing_s/agent_loop/tool_calls/max", 1 + r.uni(2, 12) * way)
    r.times("perf/cpu_memory_used_gb", 1 + r.uni(0.25, 1.2) * way)
    r.times("timing_s/gen", 1 + r.uni(0.3, 2.5) * way)
    if r.coin():
        r.plus("response/aborted_ratio", 0.3 * np.clip(r.ramp() - 0.8, 0, 1) * 5)
    if r.coin():
        r.scale_reward(1 - 0.4 * np.clip(r.ramp() - 0.8, 0, 1) * 5)


def object_store_spill(r: Run) -> None:
    """Batches go over the disk: words, seconds that no stage has, the driver's own stages."""
    train = float(np.median(r.table["timing_s/update_actor"]))
    lost = np.where(r.on, r.noisy(train * r.uni(0.5, 2.5), 0.3), 0.0)
    r.table["_lost"] = lost
    r.times("perf/cpu_memory_used_gb", r.uni(1.25, 2.4))
    step = float(np.median(r.table["timing_s/gen"])) + train
    r.plus("timing_s/adv", r.noisy(0.05 * step * r.uni(0.5, 3), 0.3))
    if r.coin(0.6):
        r.plus("timing_s/reward", r.noisy(0.05 * step * r.uni(0.5, 3), 0.3))
    if r.coin(0.6):
        for i in range(r.at, r.n, 2):
            r.text.append(
                (i, f"(raylet) Spilled {2048 * (i - r.at + 1)} MiB, 96 objects, write throughput 801 MiB/s.")
            )


def buffer_never_fills(r: Run) -> None:
    """The trainer waits: groups go stale before they are full, or workers have vanished."""
    r.make_async()
    usual = float(np.median(r.table["timing_s/gen"])) + 0.5 * float(
        np.median(r.table["timing_s/update_actor"])
    )
    kind = r.pick("evicted", "vanished", "ends")
    r.plus("timing_s/gen", usual * r.uni(2.5, 14) * r.noisy(1.0, 0.2))
    if kind == "evicted":
        r.plus(OFF + "evicted_samples", r.rng.poisson(r.uni(200, 900), r.n))
    if kind == "ends":
        r.end = min(r.n, r.at + int(r.rng.integers(3, 15)))
        r.table["timing_s/gen"][r.end - 1] *= r.uni(3, 8)


def version_drift(r: Run) -> None:
    """A part of the replicas stands still."""
    r.make_async()
    share, age = float(r.rng.choice([0.125, 0.25, 0.33, 0.5])), r.since * r.every
    for name in (STALE + "max", OFF + "trajectory_staleness_worst/max"):
        r.table[name] = np.maximum(r.table[name], np.where(r.on, age + r.uni(0, 2), 0).round())
    for name in (STALE + "mean", OFF + "trajectory_staleness_worst/mean"):
        r.plus(name, share * age)
    r.grow_gap(np.sqrt(1 + (share * r.uni(0.05, 0.3) * age**0.7) ** 2))
    if r.coin():
        r.plus(OFF + "evicted_samples", r.rng.poisson(512 * share * 0.1, r.n))


def discontinuity_after_resume(r: Run) -> None:
    """Taken up again without the weights, the optimizer or the schedule of the checkpoint."""
    r.at = max(r.at, 12)
    kind = r.pick("weights", "optimizer", "both")
    r.first_time = {k: v.copy() for k, v in r.table.items()}
    if r.coin(0.4):
        r.back = int(r.rng.integers(1, min(20, r.n - r.at - 4)))
    if r.coin(0.6) or kind == "optimizer":
        r.text.append((r.at + r.back - 1, f"Resuming from checkpoints/global_step_{r.first_step + r.at - 1}"))
    if kind in ("weights", "both"):
        score = r.table["_score"]
        first, now = float(score[0]), float(score[r.at])
        if now - first < 0.15:  # a run that had learned something
            for name in ("critic/score/mean", "critic/rewards/mean"):
                r.table[name] = np.clip(r.table[name] + 0.3 * (1 - np.exp(-r.t / max(0.4 * r.at, 1))), 0, 1)
                r.first_time[name] = r.table[name].copy()
            first, now = first, now + 0.25
        lost = (now - first) * r.uni(0.45, 0.95)
        back = lost * np.exp(-r.since / r.uni(20, 0.6 * r.n + 21))
        for name in ("critic/score/mean", "critic/rewards/mean"):
            r.plus(name, -back)
            r.table[name] = np.clip(r.table[name], 0, 1)
        r.times("actor/entropy", 1 + r.uni(0.2, 0.6) * np.exp(-r.since / (0.4 * r.n)))
        if "actor/kl_loss" in r.table:
            r.times("actor/kl_loss", r.uni(0.1, 0.5))
    if kind in ("optimizer", "both"):
        r.times("actor/grad_norm", 1 + r.uni(1.5, 8) * np.exp(-r.since / r.uni(8, 25)))
        r.times("actor/lr", np.clip((r.since + 1) / r.uni(8, 20), 0.05, 1))
        r.times("actor/ppo_kl", 1 + r.uni(1, 6) * np.exp(-r.since / 15))


def one_source_all_zero(r: Run) -> None:
    """One scorer returns zero; logged by source in training, or in validation alone."""
    score = r.table["_score"]
    source, share = "code", r.uni(0.2, 0.45)
    val = "val-core/code/reward/mean@1"
    r.table[val] = np.where(r.on & np.isfinite(r.table[val]), 0.0, r.table[val])
    r.scale_reward(1 - share)
    if r.coin():
        for name, tilt in (("gsm8k", 1.2), (source, 0.8), ("search", 0.6)):
            r.table[f"reward/{name}/mean"] = np.clip(score * tilt + r.rng.normal(0, 0.02, r.n), 0.01, 1)
        r.put(f"reward/{source}/mean", 0.0)


def filter_starvation(r: Run) -> None:
    r.make_filtered()
    name = "training/filter_groups/evicted_samples"
    batch = 512.0
    top = batch * r.uni(2.5, 12)
    way = r.ramp(r.uni(0.02, 0.8) * r.n)
    before = float(np.median(r.table[name]))
    r.plus(name, np.round((top - before) * way * r.noisy(1.0, 0.1)))
    r.times("timing_s/gen", (1 + (r.table[name] - before) / (batch + before)).clip(1) ** r.uni(0.7, 1.0))
    if r.coin():
        toward = 0.95 if r.coin() else 0.05
        for m in ("critic/score/mean", "critic/rewards/mean"):
            r.put(m, r.table[m] + (toward - r.table[m]) * 0.7 * way)


def tail_burst(r: Run) -> None:
    """A few endless answers in some steps; every step that has one waits for it."""
    hit = r.on & (r.rng.random(r.n) < r.uni(0.3, 1))
    longest = float(np.nanmax(r.table["response_length/max"])) * r.uni(2.5, 8)
    r.table["response_length/max"] = np.where(
        hit, np.round(longest * r.rng.uniform(0.8, 1, r.n)), r.table["response_length/max"]
    )
    r.table["timing_s/gen"] = r.table["timing_s/gen"] * np.where(hit, r.uni(1.6, 5) * r.noisy(1, 0.1), 1)
    clip = "response_length/clip_ratio"
    r.table[clip] = r.table[clip] + np.where(hit, 4 / 512, 0)


def fragmentation(r: Run) -> None:
    r.at = int(r.n * r.uni(0.0, 0.35))
    kept = r.table["perf/max_memory_reserved_gb"]
    top = r.device_gb * r.uni(0.93, 0.99)
    way = r.ramp(power=r.uni(0.6, 1.4))
    r.put("perf/max_memory_reserved_gb", np.maximum.accumulate(kept + (top - kept).clip(0) * way))
    if r.coin():
        r.times("timing_s/update_actor", 1 + 0.4 * np.clip(way - 0.6, 0, 1))


def all_wrong(r: Run) -> None:
    _flat(r, 0.0)


def all_right(r: Run) -> None:
    _flat(r, 1.0)


def _flat(r: Run, level: float) -> None:
    for kind in ("score", "rewards"):
        for stat in ("mean", "max", "min"):
            r.table[f"critic/{kind}/{stat}"] = np.full(r.n, level)
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"):
        r.table[name] = np.zeros(r.n)
    for stat in ("mean", "max", "min"):
        r.table[f"critic/advantages/{stat}"] = np.zeros(r.n)
    for name in [k for k in r.table if k.startswith("val-core/")]:
        r.table[name] = np.where(np.isfinite(r.table[name]), level, np.nan)


# ---- well --------------------------------------------------------------------------------------------------------


def healthy(r: Run) -> None:
    pass


def longer_answers(r: Run) -> None:
    """Lengths grow threefold for good, the reward with them, and there is room."""
    grown = 1 + r.uni(0.8, 2.2) / (1 + np.exp(-(r.t - 0.5 * r.n) / (0.12 * r.n)))
    for name in ("mean", "max"):
        r.table[f"response_length/{name}"] *= grown
    for stage in ("gen", "old_log_prob", "ref", "update_actor"):
        if f"timing_s/{stage}" in r.table:
            r.table[f"timing_s/{stage}"] *= grown
    r.table["perf/total_num_tokens"] *= grown


def harder_prompts(r: Run) -> None:
    """A curriculum: the mix becomes harder at one step; reward falls a little, lengths grow a little."""
    r.scale_reward(r.uni(0.84, 0.95))
    r.times("response_length/mean", r.uni(1.02, 1.12))
    r.times("actor/entropy", r.uni(1.0, 1.1))


def hiccups(r: Run) -> None:
    """Single steps of a busy cluster: twice to thirty times as slow, one at a time."""
    for _ in range(int(r.rng.integers(1, 6))):
        i = int(r.rng.integers(3, r.n - 3))
        stage = r.pick("gen", "update_actor", "update_weights", "reward")
        r.table[f"timing_s/{stage}"][i] *= r.logu(2, 30 if stage == "reward" else 8)
    for _ in range(int(r.rng.integers(0, 4))):
        r.table["actor/grad_norm"][int(r.rng.integers(3, r.n - 3))] *= r.logu(3, 60)


def clean_resume(r: Run) -> None:
    """Taken up again as it was; some steps run twice."""
    r.at = max(r.at, 12)
    r.back = int(r.rng.integers(1, min(15, r.n - r.at - 4)))
    r.text.append((r.at + r.back - 1, f"Resuming from checkpoints/global_step_{r.first_step + r.at - 1}"))


def slower_hardware(r: Run) -> None:
    """A throttled node: every stage is a little slower from one step on."""
    factor = r.uni(1.05, 1.25)
    for stage in ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "reward", "adv"):
        r.times(f"timing_s/{stage}", factor)


def reward_saturates(r: Run) -> None:
    top = r.uni(0.95, 1.0) - 0.5 * np.exp(-r.t / (r.uni(0.05, 0.3) * r.n))
    for name in ("critic/score/mean", "critic/rewards/mean"):
        r.table[name] = np.clip(top + r.rng.normal(0, 0.008, r.n), 0, 1)
    fade = np.exp(-r.t / (r.uni(0.2, 0.6) * r.n))
    r.table["actor/grad_norm"] *= 0.1 + 0.9 * fade
    r.table["actor/pg_clipfrac"] *= 0.2 + 0.8 * fade
    r.table["actor/entropy"] *= 0.2 + 0.8 * fade
    if r.has_filter:
        name = "training/filter_groups/evicted_samples"
        r.table[name] = np.round(r.table[name] * (1 + 0.5 * (1 - fade)))


def learning_rate_too_high(r: Run) -> None:
    over = r.uni(0.08, 0.5) * r.n
    way = r.ramp(over)
    r.table["actor/lr"] *= float(r.rng.choice([5, 10, 30]))
    moved = np.exp(way * r.uni(1.2, 2.5))
    r.table["actor/ppo_kl"] = np.abs(r.table["actor/ppo_kl"]) * np.where(r.on, moved**2, 1)
    r.times("actor/pg_clipfrac", moved)
    r.times("actor/grad_norm", moved ** r.uni(0.8, 1.5))
    r.times("actor/entropy", np.exp(way * r.uni(0.8, 1.6) * (1 if r.coin() else -1.4)))
    r.scale_reward(1 - r.uni(0.3, 0.95) * way)
    r.grow_gap(moved ** r.uni(0.0, 0.7))


def data_exhausted(r: Run) -> None:
    r.table["training/epoch"] = np.floor(r.t / (r.n / r.uni(6, 40)))
    for name in [k for k in r.table if k.startswith("val-core/")]:
        r.table[name] = r.table[name] * (1 - 0.2 * r.t / r.n)


def plateau(r: Run) -> None:
    level = r.uni(0.1, 0.7)
    for name in ("critic/score/mean", "critic/rewards/mean"):
        r.table[name] = np.clip(level + r.rng.normal(0, 0.015, r.n), 0, 1)


FAULTS: dict[str, Callable[[Run], None]] = {
    f.__name__: f
    for f in (
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
        all_wrong,
        all_right,
    )
}
WELL: dict[str, Callable[[Run], None]] = {
    f.__name__: f
    for f in (
        healthy,
        longer_answers,
        harder_prompts,
        hiccups,
        clean_resume,
        slower_hardware,
        reward_saturates,
        learning_rate_too_high,
        data_exhausted,
        plateau,
    )
}


def make(name: str, seed: int) -> Run:
    r = base(seed)
    {**FAULTS, **WELL}[name](r)
    return r


def rows(r: Run, *, has_gap: bool = False) -> list[tuple[int, dict[str, float]]]:
    """(step, data) as they are logged; metrics that this run's owner does not log are left out, half of those of the
    gap only without `has_gap`."""
    table = {k: v for k, v in r.table.items() if not k.startswith("_")}
    stages = (
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "adv",
        "update_actor",
        "update_weights",
        "save_checkpoint",
    )
    step_s = sum(np.nan_to_num(table[f"timing_s/{s}"]) for s in stages if f"timing_s/{s}" in table)
    step_s = step_s * 1.01 + r.table.get("_lost", 0.0)
    table["timing_s/step"] = np.asarray(step_s)
    table["perf/time_per_step"] = table["timing_s/step"]
    table["perf/throughput"] = table["perf/total_num_tokens"] / table["timing_s/step"] / 16
    length = table["response_length/mean"]
    table["timing_per_token_ms/gen"] = 1000 * table["timing_s/gen"] / (512 * length)
    table["timing_per_token_ms/update_actor"] = (
        1000 * table["timing_s/update_actor"] / table["perf/total_num_tokens"]
    )
    if r.coin(0.2) and not has_gap:
        table = {k: v for k, v in table.items() if not k.startswith("rollout_corr/")}
    elif r.coin(0.2) and not has_gap:
        table = {k: v for k, v in table.items() if not k.startswith("training/rollout_")}
    if r.coin(0.3):
        table = {
            k: v for k, v in table.items() if not k.startswith(("timing_per_token", "perf/mfu", "critic/adv"))
        }
    if r.coin(0.2):
        table = {k: v for k, v in table.items() if not k.startswith("critic/score")}
    order = [(i, False) for i in range(r.end)]
    if r.back:
        order = [*((i, True) for i in range(r.at + r.back)), *((i, False) for i in range(r.at, r.end))]
    out = []
    for i, is_first in order:
        values = {k: r.first_time.get(k, v) if is_first else v for k, v in table.items()}
        data = {k: float(v[i]) for k, v in values.items() if np.isfinite(v[i])}
        if is_first and i >= r.at:
            data = {
                k: v * (1 + 0.004 * r.rng.normal()) if k != "training/global_step" else v
                for k, v in data.items()
            }
        if r.not_numbers is not None and i >= r.not_numbers[0]:
            data.update(dict.fromkeys(r.not_numbers[1], float("nan")))
        out.append((r.first_step + i * r.every, data))
    return out


def write_jsonl(r: Run, path: Path) -> Path:
    """verl's file logger; what it does not write (console lines) is lost."""
    with path.open("w", encoding="utf-8") as file:
        for step, data in rows(r):
            clean = {k: None if np.isnan(v) else v for k, v in data.items()}
            file.write(json.dumps({"step": step, "data": clean}) + "\n")
    return path


def write_console(r: Run, path: Path) -> Path:
    """verl's console as Ray prints it, with the other lines that such logs are full of."""
    style = r.pick("rounded", "numpy", "plain")
    with path.open("w", encoding="utf-8") as file:
        file.write("2026-10-30 21:01:11,402 INFO worker.py:1942 -- Started a local Ray instance.\n")
        for num, (step, data) in enumerate(rows(r)):
            parts = [
                f"{k}:{v:.3f}"
                if style == "rounded"
                else f"{k}:np.float64({v!r})"
                if style == "numpy"
                else f"{k}:{v}"
                for k, v in data.items()
            ]
            who = "\x1b[36m(TaskRunnerV1 pid=9113)\x1b[0m " if style != "plain" else ""
            file.write(f"{who}step:{step} - " + " - ".join(parts) + "\n")
            for at, line in r.text:
                if at == num:
                    file.write(f"\x1b[36m(WorkerDict pid=91{at % 90 + 10})\x1b[0m {line}\n")
            if r.coin(0.2):
                file.write(
                    "(WorkerDict pid=9120) /usr/lib/python3.12/site-packages/torch: UserWarning: slow\n"
                )
    return path
