"""Logs of runs that never happened: a small mechanical model of RL training, with faults put into the mechanism.

The model keeps a policy that moves a little each step, engines that hold some version of it, lengths,
environments, memory and stage seconds; metrics are read off that state with noise. A fault changes the state
(an engine keeps its version, sandboxes die, a scorer returns zero), never a metric directly, except where the
metric is the state (a stage that hangs). Nothing here knows the rules of the diagnosis, and the rules were
not fitted to these constants; sizes are drawn over wide ranges.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class World:
    """The state of one run, one entry a step. `on[t]` is True while the fault acts."""

    rng: np.random.Generator
    n: int
    mode: str
    is_moe: bool
    is_agentic: bool
    noise: float
    onset: int
    first_step: int = 1
    sources: list[str] = field(default_factory=list)
    skill: dict[str, Array] = field(default_factory=dict)
    weight: dict[str, float] = field(default_factory=dict)
    """Share of the batch."""
    entropy: Array = field(default_factory=lambda: np.zeros(0))
    length: Array = field(default_factory=lambda: np.zeros(0))
    spread: Array = field(default_factory=lambda: np.zeros(0))
    """Sigma of the log-normal response lengths."""
    tail_tokens: Array = field(default_factory=lambda: np.zeros(0))
    """Extra tokens of a few very long responses."""
    limit: int = 4096
    update: Array = field(default_factory=lambda: np.zeros(0))
    """Movement of the policy in a step, in units of mean probability difference."""
    grad: Array = field(default_factory=lambda: np.zeros(0))
    lag: Array = field(default_factory=lambda: np.zeros(0))
    """[n] mean versions that the sampled tokens are behind, by design."""
    stuck_frac: Array = field(default_factory=lambda: np.zeros(0))
    """[n] share of samples from engines that stand still."""
    stuck_since: Array = field(default_factory=lambda: np.zeros(0))
    """[n] first step of the version those engines hold."""
    labels_lie: bool = False
    """Stuck engines report the version they should hold."""
    floor: Array = field(default_factory=lambda: np.zeros(0))
    """[n] mean probability difference at equal versions: numerics of the two sides."""
    tail_heaviness: Array = field(default_factory=lambda: np.zeros(0))
    garbage: Array = field(default_factory=lambda: np.zeros(0))
    """[n] share of samples from an engine whose weights are noise."""
    failed: Array = field(default_factory=lambda: np.zeros(0))
    failed_as_zero: bool = True
    dead_source: Array = field(default_factory=lambda: np.zeros(0))
    turns: Array = field(default_factory=lambda: np.zeros(0))
    turn_s: Array = field(default_factory=lambda: np.zeros(0))
    env_active: Array = field(default_factory=lambda: np.zeros(0))
    env_queue: Array = field(default_factory=lambda: np.zeros(0))
    env_timeouts: Array = field(default_factory=lambda: np.zeros(0))
    evicted: Array = field(default_factory=lambda: np.zeros(0))
    filtered: Array = field(default_factory=lambda: np.zeros(0))
    has_filter: bool = False
    wait_s: Array = field(default_factory=lambda: np.zeros(0))
    """Extra seconds the trainer waits for samples."""
    extra_s: dict[str, Array] = field(default_factory=dict)
    sync_s: Array = field(default_factory=lambda: np.zeros(0))
    sync_share: Array = field(default_factory=lambda: np.zeros(0))
    """Share of the bytes that a publication carries."""
    allocated: Array = field(default_factory=lambda: np.zeros(0))
    reserved_extra: Array = field(default_factory=lambda: np.zeros(0))
    host_gb: Array = field(default_factory=lambda: np.zeros(0))
    spilled: Array = field(default_factory=lambda: np.zeros(0))
    lr: Array = field(default_factory=lambda: np.zeros(0))
    epoch: Array = field(default_factory=lambda: np.zeros(0))
    nan_from: int | None = None
    ends_at: int | None = None
    repeat_from: tuple[int, int] | None = None
    """(last step of the first part, first step of the second): the log overlaps."""
    text: list[tuple[int, str]] = field(default_factory=list)
    batch: int = 512
    device_gb: float = 80.0
    base_gen_s: float = 60.0
    base_train_s: float = 40.0
    flags: dict[str, bool] = field(default_factory=dict)

    @property
    def t(self) -> Array:
        return np.arange(self.n, dtype=np.float64)

    @property
    def on(self) -> NDArray[np.bool_]:
        return self.t >= self.onset

    @property
    def since(self) -> Array:
        """Steps since the fault began, 0 before."""
        return np.maximum(self.t - self.onset + 1, 0.0)


def ar_noise(rng: np.random.Generator, n: int, size: float, rho: float) -> Array:
    """Autocorrelated noise of standard deviation `size`."""
    out = np.zeros(n)
    white = rng.normal(0.0, size * np.sqrt(1 - rho * rho), n)
    state = rng.normal(0.0, size)
    for i in range(n):
        state = rho * state + white[i]
        out[i] = state
    return out


def healthy(seed: int, *, n: int | None = None, **flags: bool) -> World:
    """A healthy run; its kind, sizes and noise depend on the seed."""
    rng = np.random.default_rng(seed)
    n = n or int(np.exp(rng.uniform(np.log(50), np.log(400))))
    mode = str(rng.choice(["sync", "colocate_async", "separate_async"]))
    is_moe = bool(rng.random() < 0.3)
    w = World(
        rng=rng,
        n=n,
        mode=mode,
        is_moe=is_moe,
        is_agentic=bool(rng.random() < 0.35) or flags.get("agentic", False),
        noise=float(rng.uniform(0.02, 0.10)),
        onset=int(n * rng.uniform(0.3, 0.75)),
        flags=dict(flags),
    )
    t = w.t
    pool = ["openai/gsm8k", "math_dapo", "code_contests", "swe_gym", "aime", "search_qa", "logic"]
    w.sources = [str(s) for s in rng.choice(pool, int(rng.integers(2, 5)), replace=False)]
    shares = rng.dirichlet(np.full(len(w.sources), 4.0))
    for source, share in zip(w.sources, shares, strict=True):
        start, top = rng.uniform(0.08, 0.5), rng.uniform(0.45, 0.98)
        top = max(top, start + 0.05)
        rate = rng.uniform(2.0, 12.0) / n
        middle = rng.uniform(-0.2, 0.8) * n
        curve = 1.0 / (1.0 + np.exp(-rate * (t - middle)))
        curve = (curve - curve[0]) / max(1e-9, 1.0 / (1.0 + np.exp(-rate * (4 * n - middle))) - curve[0])
        w.skill[source] = start + (top - start) * np.clip(curve, 0, 1)
        w.weight[source] = float(share)
    h0, h1 = rng.uniform(0.3, 1.2), rng.uniform(0.1, 0.5)
    w.entropy = h1 + (h0 - h1) * np.exp(-t / (n * rng.uniform(0.2, 1.0)))
    l0 = float(np.exp(rng.uniform(np.log(250), np.log(4000))))
    growth = float(rng.choice([1.0, 1.0, 1.3, 0.8, 2.0, 3.0]))
    w.length = l0 * growth ** (1.0 / (1.0 + np.exp(-(t - n * 0.5) * 8.0 / n)))
    w.spread = np.full(n, rng.uniform(0.35, 0.8))
    w.tail_tokens = np.zeros(n)
    w.limit = int(2 ** np.ceil(np.log2(w.length.max() * rng.uniform(2.0, 6.0))))
    w.batch = int(rng.choice([128, 256, 512, 1024]))
    move = float(np.exp(rng.uniform(np.log(0.0008), np.log(0.004))))
    w.lr = np.full(n, float(rng.choice([5e-7, 1e-6, 2e-6])))
    if rng.random() < 0.3:
        w.lr *= np.clip((t + 1) / max(3, n // 15), 0, 1)
    w.update = (
        move
        * (w.lr / w.lr.max())
        * np.exp(ar_noise(rng, n, 0.1, 0.5))
        * (0.6 + 0.4 * w.entropy / w.entropy[0])
    )
    w.grad = float(np.exp(rng.uniform(np.log(0.05), np.log(1.5)))) * (0.7 + 0.3 * np.exp(-t / n))
    lag = {"sync": 0.0, "colocate_async": rng.uniform(0.1, 0.8), "separate_async": rng.uniform(0.5, 2.5)}[
        mode
    ]
    w.lag = np.minimum(
        t, np.maximum(0.0, lag * np.exp(ar_noise(rng, n, 0.15, 0.6)))
    )  # the pipeline fills first
    w.stuck_frac = np.zeros(n)
    w.stuck_since = np.zeros(n)
    floor = float(np.exp(rng.uniform(np.log(0.002), np.log(0.007)))) * (2.2 if is_moe else 1.0)
    w.floor = np.full(n, floor) * (1.0 + rng.uniform(-0.2, 0.5) * t / n)
    w.tail_heaviness = np.full(n, 1.0)
    w.garbage = np.zeros(n)
    w.failed = np.full(n, rng.uniform(0.0, 0.02) if w.is_agentic else 0.0)
    w.dead_source = np.zeros(n)
    w.turns = np.full(n, rng.uniform(3, 12) if w.is_agentic else 2.0) * (1 + rng.uniform(-0.2, 0.3) * t / n)
    w.turn_s = np.full(n, rng.uniform(0.5, 6.0))
    capacity = float(rng.choice([64, 128, 256]))
    w.env_active = np.full(n, capacity * rng.uniform(0.5, 0.85))
    w.flags["capacity"] = capacity  # type: ignore[assignment]
    w.env_queue = np.full(n, rng.uniform(0, 4))
    w.env_timeouts = rng.poisson(rng.uniform(0, 2.0), n).astype(float)
    w.evicted = rng.poisson(rng.uniform(0, 3.0) if mode == "separate_async" else 0.0, n).astype(float)
    w.has_filter = bool(rng.random() < 0.35)
    mean_skill = sum(w.skill[s] * w.weight[s] for s in w.sources)
    flat = 0.1 + 0.8 * np.abs(mean_skill - 0.5) ** 2 * 2
    w.filtered = w.batch * flat / (1 - np.minimum(flat, 0.8)) if w.has_filter else np.zeros(n)
    w.wait_s = np.zeros(n)
    w.base_gen_s = float(np.exp(rng.uniform(np.log(20), np.log(400))))
    w.base_train_s = w.base_gen_s * float(rng.uniform(0.3, 1.5))
    w.sync_s = np.full(n, float(np.exp(rng.uniform(np.log(1.5), np.log(25)))))
    w.sync_share = np.ones(n)
    w.device_gb = float(rng.choice([80, 80, 96, 141]))
    w.allocated = w.device_gb * (0.45 + 0.12 * (w.length / w.length.max()) ** 1.0) + np.zeros(n)
    w.reserved_extra = w.device_gb * (0.05 + 0.1 * (1 - np.exp(-t / (0.05 * n + 2))))
    w.host_gb = rng.uniform(80, 400) * (1 + rng.uniform(0.0, 0.06) * t / n)
    w.spilled = np.zeros(n)
    w.epoch = np.floor(t / (n * rng.uniform(0.4, 2.0)))
    return w


def _staleness(w: World) -> dict[str, Array]:
    """True age of samples in versions: mean over samples, the stuck engines apart."""
    stuck_age = np.where(w.stuck_frac > 0, np.maximum(w.t - w.stuck_since, 0), 0.0)
    return {
        "fresh": w.lag,
        "stuck": stuck_age,
        "mean": (1 - w.stuck_frac) * w.lag + w.stuck_frac * (stuck_age + w.lag),
    }


def _drift(w: World, age: Array) -> Array:
    """Movement of the policy over the last `age` steps: partly a straight line, partly a random walk."""
    total = np.concatenate([[0.0], np.cumsum(w.update)])
    square = np.concatenate([[0.0], np.cumsum(w.update**2)])
    end = w.t
    begin = np.clip(end - age, 0, None)
    straight = np.interp(end, np.arange(w.n + 1), total) - np.interp(begin, np.arange(w.n + 1), total)
    walk = np.sqrt(
        np.maximum(
            np.interp(end, np.arange(w.n + 1), square) - np.interp(begin, np.arange(w.n + 1), square), 0
        )
    )
    return 0.35 * straight + 0.65 * walk


def metrics(w: World) -> dict[str, Array]:
    """The metrics of the run, in verl's names (extra ones of our own where verl has none), [n] each."""
    rng, n, t = w.rng, w.n, w.t
    jitter = lambda size=1.0, rho=0.3: np.exp(ar_noise(rng, n, w.noise * size, rho))
    m: dict[str, Array] = {}
    age = _staleness(w)
    fresh, stuck = _drift(w, age["fresh"]), _drift(w, age["stuck"] + age["fresh"])
    gap_fresh = np.sqrt(w.floor**2 + fresh**2)
    gap_stuck = np.sqrt(w.floor**2 + stuck**2)
    gap = (1 - w.stuck_frac) * gap_fresh + w.stuck_frac * gap_stuck
    gap = (1 - w.garbage) * gap + w.garbage * 0.45
    gap = np.minimum(gap, 0.6) * (0.75 + 0.25 * w.entropy / w.entropy[0])
    square = (1 - w.stuck_frac) * gap_fresh**2 + w.stuck_frac * gap_stuck**2
    kl = 60.0 * square * w.tail_heaviness + w.garbage * 6.0
    m["training/rollout_probs_diff_mean"] = gap * jitter(0.8)
    m["training/rollout_probs_diff_std"] = gap * 2.2 * np.sqrt(w.tail_heaviness) * jitter(1.2)
    top = 0.35 + 0.1 * np.log10(gap / 0.001) * w.tail_heaviness**0.3
    m["training/rollout_probs_diff_max"] = np.clip(top + rng.normal(0, 0.12, n), 0.05, 1.0)
    spread2 = 0.12 * (0.5 + w.entropy)
    m["training/rollout_actor_probs_pearson_corr"] = np.clip(
        1 - (gap * 2.4) ** 2 * w.tail_heaviness / (spread2 + (gap * 2.4) ** 2) * jitter(1.5), -0.1, 1.0
    )
    m["rollout_corr/kl"] = kl * jitter(1.5)
    m["rollout_corr/k3_kl"] = kl * 1.05 * jitter(1.5)
    m["rollout_corr/log_ppl_diff"] = kl * rng.normal(1.0, 0.2, n) * jitter(2)
    m["rollout_corr/ppl_ratio"] = np.exp(np.minimum(m["rollout_corr/log_ppl_diff"], 8))
    chi2 = (
        kl
        * 2.5
        * w.tail_heaviness
        * jitter(4)
        * np.exp(np.where(rng.random(n) < 0.03, rng.uniform(0.5, 2.5, n), 0))
    )
    m["rollout_corr/chi2_token"] = np.minimum(chi2, 1e6)
    m["rollout_corr/rollout_is_mean"] = 1.0 + rng.normal(0, 0.002, n) - 0.05 * np.minimum(kl, 3)
    m["rollout_corr/rollout_is_std"] = np.sqrt(np.minimum(chi2, 4.0)) * jitter()
    m["rollout_corr/rollout_is_eff_sample_size"] = 1.0 / (1.0 + np.minimum(chi2, 50.0))
    m["rollout_corr/rollout_is_ratio_fraction_high"] = np.minimum(0.3, 0.02 * chi2) * jitter(2)
    if w.mode != "sync":
        m.update(_off_policy(w, age))
    skill = {}
    for source in w.sources:
        p = w.skill[source] * (1 - w.garbage)
        p = (1 - w.dead_source * (source == w.sources[0])) * p
        if w.failed_as_zero and _needs_env(w, source):
            p = p * (1 - w.failed)
        count = max(8, int(w.batch * w.weight[source]))
        noise = ar_noise(rng, n, 1.0, 0.2) * np.sqrt(np.maximum(p * (1 - p), 1e-9) / count * 3.0)
        skill[source] = np.clip(p + np.where(p > 1e-6, noise, 0.0), 0, 1)
        m[f"reward/{source}/mean"] = skill[source]
        m[f"reward/{source}/zero_frac"] = 1 - skill[source]
    reward = sum(skill[s] * w.weight[s] for s in w.sources)
    m["critic/score/mean"] = reward + np.zeros(n)
    m["critic/rewards/mean"] = reward + np.zeros(n)
    m["critic/rewards/max"] = np.where(reward > 1e-6, 1.0, 0.0)
    m["critic/rewards/min"] = np.zeros(n)
    if (level := w.flags.get("flat_reward")) is not None:
        for name in ("critic/score/mean", "critic/rewards/mean", "critic/rewards/max", "critic/rewards/min"):
            m[name] = np.full(n, float(level))
    m["critic/advantages/mean"] = rng.normal(0, 0.01, n)
    every = max(5, n // 20)
    for source in w.sources:
        m[f"val-core/{source}/acc/mean@1"] = np.where(t % every == every - 1, skill[source], np.nan)
    length = w.length * jitter(0.7) * (1 - w.garbage) + w.garbage * w.limit * 0.8
    longest = np.minimum(w.limit, length * np.exp(w.spread * 2.9) * jitter(1.5) + w.tail_tokens)
    z = (np.log(w.limit) - np.log(length)) / w.spread + w.spread / 2
    clip = np.clip(0.5 * np.exp(-0.717 * np.maximum(z, 0) - 0.416 * np.maximum(z, 0) ** 2), 0, 1)
    clip = (1 - w.garbage) * clip + w.garbage * 0.7 + np.where(w.tail_tokens > 0, 0.01, 0)
    m["response_length/mean"] = length
    m["response_length/max"] = np.round(longest)
    m["response_length/min"] = np.round(length * np.exp(-w.spread * 2.5))
    m["response_length/clip_ratio"] = np.round(clip * w.batch) / w.batch
    m["prompt_length/mean"] = np.full(n, 180.0) * jitter(0.3)
    tokens = w.batch * (length + 180.0)
    m["perf/total_num_tokens"] = tokens
    m["global_seqlen/mean"] = tokens / 8
    if w.is_agentic:
        m["num_turns/mean"] = w.turns * jitter(0.5)
        m["num_turns/max"] = np.round(w.turns * 2.5)
        m["num_turns/min"] = np.full(n, 2.0)
        m["env/turn_s/mean"] = w.turn_s * jitter(1.5)
        m["env/turn_s/max"] = w.turn_s * 6 * jitter(2)
        if not w.flags.get("own_names"):
            m["timing_s/agent_loop/tool_calls/mean"] = m["env/turn_s/mean"] * w.turns / 2
            m["timing_s/agent_loop/tool_calls/max"] = m["env/turn_s/max"] * w.turns / 2
        m["env/num_active"] = np.round(w.env_active * jitter(0.5))
        m["env/num_leased"] = np.round(w.env_active * jitter(0.5))
        m["env/capacity"] = np.full(n, float(w.flags["capacity"]))
        m["env/queue_depth"] = np.round(w.env_queue * jitter(2))
        m["env/num_timeouts"] = w.env_timeouts
        failed = np.round(w.failed * w.batch * jitter(2))
        m["failures/num"] = failed
        m["failures/frac"] = failed / w.batch
        m["training/rollout_failure/evicted_samples"] = failed * (0.0 if w.failed_as_zero else 1.0)
        m["response/aborted_ratio"] = np.clip(w.failed * 0.3, 0, 1) * jitter(2)
    relative_len = length / w.length[0]
    relative_max = longest / longest[: max(3, n // 10)].mean()
    tail_s = 0.35 * w.base_gen_s * relative_max
    gen = 0.65 * w.base_gen_s * relative_len + tail_s
    if w.has_filter:
        kept = w.batch / (w.batch + w.filtered)
        gen = gen * (kept[0] / kept) ** 0.8
        m["training/filter_groups/evicted_samples"] = np.round(w.filtered * jitter(1.5))
    if w.is_agentic:
        gen = gen + 0.4 * w.base_gen_s * (w.turn_s * w.turns) / (w.turn_s[0] * w.turns[0])
    train = w.base_train_s * relative_len
    if w.mode != "sync":
        gen = np.maximum(0.15 * w.base_gen_s, gen - 0.7 * train * jitter())
    spikes = np.where(rng.random(n) < 0.01, rng.uniform(1.3, 2.5, n), 1.0)
    stage = {
        "gen": gen * jitter() * spikes + w.wait_s,
        "reward": np.full(n, 0.02 * w.base_gen_s) * jitter(2),
        "old_log_prob": 0.28 * train * jitter(0.7),
        "adv": np.full(n, 0.003 * w.base_gen_s) * jitter(2),
        "update_actor": train * jitter(0.7),
        "update_weights": w.sync_s * (0.1 + 0.9 * w.sync_share) * jitter(1.2),
    }
    if rng.random() < 0.5:
        stage["ref"] = 0.25 * train * jitter(0.7)
    overhead = 0.02 * w.base_gen_s * jitter(3)
    for name, seconds in w.extra_s.items():
        if name == "other":
            overhead = overhead + seconds
        else:
            stage[name] = stage.get(name, np.zeros(n)) + seconds
    save = np.where(t % every == every - 1, 0.5 * w.base_gen_s * jitter(2), np.nan)
    stage["save_checkpoint"] = save
    for name, seconds in stage.items():
        m[f"timing_s/{name}"] = seconds
    step_s = sum(np.nan_to_num(s) for s in stage.values()) + overhead
    m["timing_s/step"] = step_s + np.zeros(n)
    m["timing_s/testing"] = np.where(t % every == every - 1, 0.8 * w.base_gen_s * jitter(2), np.nan)
    m["timing_per_token_ms/gen"] = 1000 * stage["gen"] / (w.batch * length)
    m["timing_per_token_ms/update_actor"] = 1000 * stage["update_actor"] / tokens
    m["perf/time_per_step"] = step_s + np.zeros(n)
    m["perf/throughput"] = tokens / step_s / 16
    m["perf/mfu/actor"] = 0.38 * (w.base_train_s * relative_len) / stage["update_actor"] * jitter(0.3)
    peak = np.maximum.accumulate(w.allocated * jitter(0.1))
    m["perf/max_memory_allocated_gb"] = np.minimum(peak, w.device_gb * 0.995)
    reserved = np.maximum.accumulate(np.minimum(peak + w.reserved_extra, w.device_gb * 0.998))
    m["perf/max_memory_reserved_gb"] = reserved
    m["perf/cpu_memory_used_gb"] = w.host_gb * jitter(0.1)
    if w.flags.get("own_names"):
        m["host/object_store_spilled_bytes"] = w.spilled * 1e9
        m["sync/num_bytes"] = 16e9 * w.sync_share
        m["checkpoint_engine/payload_mbytes"] = 16e3 * w.sync_share
        held = np.where(w.labels_lie, t, t - np.where(w.stuck_frac > 0, age["stuck"], 0))
        for replica in range(4):
            stuck_here = w.stuck_frac > replica / 4 + 1e-9
            m[f"replica/{replica}/weight_version"] = np.where(stuck_here, held, t)
        m["training/weight_version"] = t
        if w.mode != "sync":
            m["buffer/num_running"] = np.round(w.batch / 4 * jitter())
            m["buffer/num_finished"] = np.round(np.maximum(0, 12 - w.wait_s / 10) * jitter())
    grad = w.grad * jitter(3) * np.exp(np.where(rng.random(n) < 0.01, rng.uniform(0.5, 1.5, n), 0))
    grad = grad * (1 + 3.0 * np.minimum(kl - kl[: max(3, n // 20)].mean(), 1.0).clip(0) + 1.5 * w.garbage)
    m["actor/grad_norm"] = grad
    m["actor/entropy"] = w.entropy * jitter(0.4)
    scale = w.update / 0.002
    m["actor/ppo_kl"] = 3e-4 * scale**2 * jitter(3) + rng.normal(0, 3e-5, n)
    m["actor/pg_clipfrac"] = np.clip(2e-3 * scale * jitter(2) + 0.02 * np.minimum(kl, 2), 0, 0.9)
    m["actor/pg_loss"] = rng.normal(0, 0.02, n)
    m["actor/kl_loss"] = 0.25 * np.cumsum(w.update) * jitter(1)
    m["actor/lr"] = w.lr
    m["training/global_step"] = t + w.first_step
    m["training/epoch"] = w.epoch
    if w.nan_from is not None:
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/kl_loss"):
            m[name] = np.where(t >= w.nan_from, np.nan, m[name])
    return m


def _needs_env(w: World, source: str) -> bool:
    return w.is_agentic and (source in ("code_contests", "swe_gym", "search_qa") or source == w.sources[0])


def _off_policy(w: World, age: dict[str, Array]) -> dict[str, Array]:
    rng, n = w.rng, w.n
    told = np.zeros(n) if w.labels_lie else age["stuck"]
    stuck = w.stuck_frac > 0
    mean = age["fresh"] + (0.0 if w.labels_lie else w.stuck_frac * age["stuck"])
    newest = np.floor(age["fresh"] * rng.uniform(0.4, 0.8, n))
    m: dict[str, Array] = {}
    base = "training/off_policy/trajectory_staleness"
    m[f"{base}/mean"] = mean * rng.normal(1.0, 0.05, n)
    m[f"{base}/max"] = np.round(
        np.where(stuck, np.maximum(told, age["fresh"] * 1.5), age["fresh"] * 1.5 + rng.random(n))
    )
    m[f"{base}/min"] = np.where(w.stuck_frac > 0.95, np.round(told), newest)
    m[f"{base}_worst/mean"] = mean * 1.3
    m[f"{base}_worst/max"] = m[f"{base}/max"] + rng.integers(0, 2, n)
    m[f"{base}_worst/min"] = m[f"{base}/min"]
    m["training/off_policy/trajectory_spans/mean"] = 1 + 0.3 * age["fresh"]
    m["training/off_policy/evicted_samples"] = w.evicted
    return m


# ---- faults: each changes the mechanism ------------------------------------------------------------------------


def missed_weight_sync(w: World) -> None:
    """Engines keep the version of the onset; by kind, the labels lie, and the publication is shorter."""
    kind = w.rng.choice(
        ["skipped", "skipped_and_told", "partial", "from_start", "window"], p=[0.35, 0.25, 0.15, 0.1, 0.15]
    )
    if kind == "from_start":
        w.onset = 0
    end = w.onset + int(w.rng.integers(12, 30)) if kind == "window" else w.n
    on = w.on & (w.t < end)
    w.stuck_frac = np.where(on, 0.6 if kind == "partial" else 1.0, 0.0)
    if (
        kind == "partial"
    ):  # a part of the tensors stays old: everything is a mix, the drift is a share of the whole
        w.stuck_frac = np.where(on, 1.0, 0.0)
        w.update = np.where(on, w.update * 0.8, w.update)
    w.stuck_since = np.full(w.n, float(w.onset - 1))
    w.labels_lie = kind != "skipped_and_told"
    if kind != "partial":
        w.sync_share = np.where(on & (w.rng.random() < 0.6), 0.0, 1.0)
    held = {s: w.skill[s][max(0, w.onset - 1)] for s in w.sources}
    for source in w.sources:  # rewards are those of the standing engine
        w.skill[source] = np.where(on, held[source], w.skill[source])
    w.length = np.where(on, w.length[max(0, w.onset - 1)], w.length)


def stale_samples(w: World) -> None:
    """The trainer outruns generation: samples are older by several versions, honestly labelled."""
    _make_async(w)
    extra = w.rng.uniform(3.0, 9.0)
    rise = 1.0 if w.rng.random() < 0.5 else np.clip(w.since / max(5, 0.15 * w.n), 0, 1)
    w.lag = w.lag + np.where(w.on, extra * rise, 0.0) * np.exp(ar_noise(w.rng, w.n, 0.1, 0.4))
    w.evicted = w.evicted + np.where(w.on, w.rng.poisson(w.batch * w.rng.uniform(0.02, 0.3), w.n), 0)
    for source in w.sources:
        w.skill[source] = np.where(w.on, w.skill[source] * np.exp(-0.0008 * extra * w.since), w.skill[source])


def engine_mismatch(w: World) -> None:
    """The engine's numerics differ (quantised, another kernel, another temperature), at once and for good."""
    if w.rng.random() < 0.4:
        w.onset = 0
    factor = w.rng.uniform(4.0, 12.0)
    level = max(float(np.median(w.floor)) * factor, w.rng.uniform(0.03, 0.06))
    w.floor = np.where(w.on, level * (1 + w.rng.uniform(0, 0.5) * w.since / w.n), w.floor)
    w.tail_heaviness = np.where(w.on, w.rng.uniform(1.0, 2.0), 1.0)


def mismatch_to_nan(w: World) -> None:
    """A mismatch that feeds on itself: tails grow, gradients spike, then NaN."""
    w.onset = int(w.n * w.rng.uniform(0.2, 0.5))
    w.floor = np.maximum(w.floor, w.rng.uniform(0.008, 0.03))
    life = (w.n - w.onset) * w.rng.uniform(0.5, 0.9)
    growth = np.exp(np.minimum(w.since / life, 1.2) * w.rng.uniform(1.8, 3.0))
    w.floor = np.minimum(w.floor * growth, 0.4)
    w.tail_heaviness = np.minimum(growth**1.2, 30.0)
    w.grad = w.grad * growth**1.3
    w.nan_from = min(w.n - 1, int(w.onset + life))
    if w.rng.random() < 0.5:
        w.ends_at = min(w.n, w.nan_from + int(w.rng.integers(1, 8)))


def dead_sandbox_pool(w: World) -> None:
    """Sandboxes die: their trajectories fail, as zeros or as failures, quickly (refused) or slowly (timed out)."""
    _make_agentic(w)
    lost = w.rng.uniform(0.5, 1.0)
    w.failed_as_zero = bool(w.rng.random() < 0.75)
    w.failed = np.where(w.on, lost, w.failed)
    w.env_active = np.where(w.on, w.env_active * (1 - lost), w.env_active)
    w.env_timeouts = w.env_timeouts + np.where(w.on, w.rng.poisson(w.batch * lost, w.n), 0)
    if w.rng.random() < 0.6:
        w.turn_s = np.where(w.on, w.turn_s * (1 - lost) + lost * w.rng.uniform(20, 60), w.turn_s)
        w.turns = np.where(w.on, w.turns * w.rng.uniform(0.5, 0.8), w.turns)
    else:
        w.turn_s = np.where(w.on, w.turn_s * (1 - lost) + lost * 0.05, w.turn_s)
        w.turns = np.where(w.on, 2 + (w.turns - 2) * (1 - lost), w.turns)
        w.length = np.where(w.on, w.length * (1 - 0.6 * lost), w.length)
    w.flags["pool"] = True
    w.wait_s = np.zeros(w.n)


def collective_hang(w: World) -> None:
    """A rank stops: one trainer stage runs into its timeout and the log ends there."""
    at = int(w.n * w.rng.uniform(0.5, 0.95))
    stage = str(w.rng.choice(["update_actor", "old_log_prob", "update_weights"]))
    w.onset, w.ends_at = at, at + 1
    w.extra_s[stage] = np.where(
        w.t == at, w.rng.choice([600.0, 1800.0, 3600.0]) * 1.0 + 10 * w.base_train_s, 0.0
    )
    rank = int(w.rng.integers(0, 8))
    w.text.append(
        (
            at,
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(SeqNum=48213, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600012 milliseconds",
        )
    )


def oom_in_sync(w: World) -> None:
    """The hand-over needs more memory than is left: slow retries, then out of memory and a restart or the end."""
    w.sync_s = np.where(w.on, w.sync_s * w.rng.uniform(1.8, 5.0), w.sync_s)
    w.allocated = np.where(
        w.on, np.minimum(w.device_gb * 0.99, w.device_gb * w.rng.uniform(0.94, 0.99)), w.allocated
    )
    w.ends_at = min(w.n, w.onset + int(w.rng.integers(3, 12)))
    w.text.append((w.ends_at - 1, 'File "fsdp_vllm.py", line 204, in update_weights'))
    w.text.append(
        (
            w.ends_at - 1,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has ...",
        )
    )


def late_oom_with_length(w: World) -> None:
    """Responses grow, activations and caches with them, until the device is full."""
    w.onset = int(w.n * w.rng.uniform(0.1, 0.35))
    factor = w.rng.uniform(2.5, 5.0)
    grow = 1 + (factor - 1) * np.clip((w.t - w.onset) / (0.9 * w.n - w.onset), 0, 1.1)
    w.length = w.length[0] * grow
    w.limit = int(w.length.max() * 4)
    end = int(0.9 * w.n)
    share = np.clip((w.length / w.length[0] - 1) / (factor - 1), 0, 1)
    w.allocated = w.device_gb * (0.5 + 0.475 * share)
    w.ends_at = min(w.n, end + 1)
    w.text.append((w.ends_at - 1, 'File "dp_actor.py", line 431, in update_policy'))
    w.text.append(
        (
            w.ends_at - 1,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 3 has ...",
        )
    )


def silent_error_after_wake(w: World) -> None:
    """The engine wakes with broken weights and samples noise."""
    if w.rng.random() < 0.3:
        w.onset = 2
    w.garbage = np.where(w.on, w.rng.uniform(0.85, 1.0), 0.0)


def sandbox_leak(w: World) -> None:
    """Leases are not returned: fewer and fewer are free, turns queue, and in the end fail."""
    _make_agentic(w)
    w.onset = int(w.n * w.rng.uniform(0.15, 0.4))
    progress = np.clip(w.since / (w.n - w.onset), 0, 1)
    w.env_active = w.env_active + progress * float(w.flags["capacity"]) * w.rng.uniform(1.0, 4.0)
    w.env_queue = w.env_queue + progress**1.5 * float(w.flags["capacity"]) * w.rng.uniform(1.0, 3.0)
    w.turn_s = w.turn_s * (1 + progress * w.rng.uniform(3, 10))
    w.host_gb = w.host_gb * (1 + progress * w.rng.uniform(0.3, 1.0))
    w.failed = w.failed + np.clip(progress - 0.85, 0, 1) * w.rng.uniform(0.5, 2.0)
    w.env_timeouts = w.env_timeouts + w.rng.poisson(1 + 40 * np.clip(progress - 0.6, 0, 1))


def object_store_spill(w: World) -> None:
    """Batches no longer fit the object store: transfers go over disk, between and around the stages."""
    slow = np.where(w.on, 0.4 + 0.6 * np.clip(w.since / (0.2 * w.n), 0, 1), 0.0) * w.rng.uniform(0.4, 1.5)
    bursts = np.exp(ar_noise(w.rng, w.n, 0.4, 0.5))
    w.extra_s["other"] = w.base_gen_s * slow * bursts
    w.extra_s["adv"] = 0.15 * w.base_gen_s * slow * bursts
    w.extra_s["reward"] = 0.2 * w.base_gen_s * slow * bursts
    w.host_gb = w.host_gb * np.where(w.on, w.rng.uniform(1.4, 2.2), 1.0)
    w.spilled = np.where(w.on, w.rng.uniform(20, 200) * bursts, 0.0)
    for step in range(w.onset, w.n, 3):
        w.text.append(
            (
                step,
                f"(raylet) Spilled {4096 * (step - w.onset + 1)} MiB, 212 objects, write throughput 612 MiB/s.",
            )
        )


def buffer_never_fills(w: World) -> None:
    """Finished groups leave before they are used, or never come: the trainer waits."""
    _make_async(w)
    w.wait_s = np.where(
        w.on, w.base_gen_s * w.rng.uniform(3.0, 12.0) * np.exp(ar_noise(w.rng, w.n, 0.3, 0.4)), 0.0
    )
    if w.rng.random() < 0.5:
        w.evicted = w.evicted + np.where(w.on, w.rng.poisson(w.batch * w.rng.uniform(0.8, 2.0), w.n), 0)
    if w.rng.random() < 0.4:
        w.ends_at = min(w.n, w.onset + int(w.rng.integers(2, 12)))
        w.wait_s = w.wait_s * np.where(w.t >= w.ends_at - 2, 4.0, 1.0)


def version_drift(w: World) -> None:
    """One of the replicas no longer takes new versions; its samples go on arriving."""
    _make_async(w)
    share = float(w.rng.choice([0.125, 0.25, 0.25, 0.5]))
    w.stuck_frac = np.where(w.on, share, 0.0)
    w.stuck_since = np.full(w.n, float(w.onset - 1))
    w.evicted = w.evicted + np.where(w.since > 8, w.rng.poisson(w.batch * share * 0.2, w.n), 0)


def discontinuity_after_resume(w: World) -> None:
    """The run is taken up without a part of its state: older weights, no optimizer state, schedule or data position."""
    back = int(w.rng.integers(5, 25)) if w.rng.random() < 0.6 else 0
    w.onset = max(w.onset, 30)
    if back:
        w.repeat_from = (w.onset, w.onset - min(back, w.onset - 10))
    loss = w.rng.uniform(0.35, 0.8)
    keep = np.where(w.on, 1 - loss * np.exp(-w.since / (0.4 * w.n)), 1.0)
    for source in w.sources:
        first = w.skill[source][0]
        w.skill[source] = np.where(w.on, first + (w.skill[source] - first) * keep, w.skill[source])
        w.skill[source] = np.where(
            w.on, w.skill[source] * (1 - 0.25 * loss * np.exp(-w.since / (0.3 * w.n))), w.skill[source]
        )
    w.grad = w.grad * np.where(w.on, 1 + w.rng.uniform(1.5, 5) * np.exp(-w.since / 15), 1.0)
    w.lr = np.where(w.on, w.lr.max() * np.clip(w.since / 12, 0.08, 1), w.lr)
    w.entropy = np.where(
        w.on, w.entropy + (w.entropy[0] - w.entropy) * loss * np.exp(-w.since / (0.4 * w.n)), w.entropy
    )
    w.epoch = np.where(w.on, 0.0, np.maximum(w.epoch, 1.0)) if w.rng.random() < 0.6 else w.epoch
    kl_keep = np.where(w.on, 0.2, 1.0)
    w.update = w.update * np.where(w.on, 0.4 + 0.6 * np.clip(w.since / 12, 0, 1), 1.0)
    w.flags["kl_reset"] = bool(kl_keep.min() < 1)
    w.text.append((w.onset - 1, f"Resuming from checkpoint /ckpt/global_step_{w.onset}"))


def one_source_all_zero(w: World) -> None:
    """The scorer of one source returns zero for everything."""
    w.dead_source = np.where(w.on, 1.0, 0.0)
    order = sorted(w.sources, key=lambda s: -w.weight[s])
    w.sources = order


def filter_starvation(w: World) -> None:
    """Most groups are flat: the filter drops them and generation repeats."""
    w.has_filter = True
    base = w.batch * w.rng.uniform(0.1, 0.4)
    ramp = 1.0 if w.rng.random() < 0.4 else np.clip(w.since / (0.3 * w.n), 0.15, 1)
    w.filtered = np.where(w.on, base + w.batch * w.rng.uniform(2.5, 8.0) * ramp, base)
    extreme = w.rng.random() < 0.6
    for source in w.sources:
        target = 0.97 if extreme else 0.03
        w.skill[source] = np.where(
            w.on, w.skill[source] + (target - w.skill[source]) * 0.5 * ramp, w.skill[source]
        )


def all_wrong(w: World) -> None:
    """No answer is ever right, from the first step on."""
    w.flags["flat_reward"] = False
    w.grad = np.zeros(w.n)
    w.update = w.update * 0.05
    for source in w.sources:
        w.skill[source] = np.zeros(w.n)


def all_right(w: World) -> None:
    """Every answer is right, from the first step on."""
    w.flags["flat_reward"] = True
    w.grad = np.zeros(w.n)
    w.update = w.update * 0.05
    for source in w.sources:
        w.skill[source] = np.ones(w.n)


def tail_burst(w: World) -> None:
    """A few responses run to the limit in bursts; every step that has one waits for it."""
    w.limit = int(max(w.limit, w.length.max() * 12))
    w.spread = np.minimum(w.spread, 0.45)
    chance = w.rng.uniform(0.35, 1.0)
    hit = (w.rng.random(w.n) < chance) & w.on
    w.tail_tokens = np.where(hit, w.limit * w.rng.uniform(0.6, 1.0, w.n), 0.0)


def fragmentation(w: World) -> None:
    """The allocator holds ever more that nobody uses; retries make the update slower."""
    w.onset = int(w.n * w.rng.uniform(0.05, 0.4))
    progress = np.clip(w.since / (w.n - w.onset), 0, 1)
    room = w.device_gb - w.allocated.max() - w.reserved_extra.max()
    w.reserved_extra = w.reserved_extra + progress * room * w.rng.uniform(0.75, 1.0)
    w.extra_s["update_actor"] = w.base_train_s * np.clip(progress - 0.7, 0, 1) * w.rng.uniform(0.2, 1.0)


# ---- states of the algorithm: nothing is wrong with the system -------------------------------------------------


def reward_saturates(w: World) -> None:
    for source in w.sources:
        w.skill[source] = 1 - (1 - w.skill[source][0]) * np.exp(-w.t / (0.15 * w.n)) * 0.97
    w.update = w.update * np.exp(-w.t / (0.5 * w.n))
    w.grad = w.grad * np.exp(-w.t / (0.4 * w.n))
    w.has_filter = False


def learning_rate_too_high(w: World) -> None:
    w.lr = w.lr * 10
    grow = np.exp(np.clip(w.since / (0.25 * w.n), 0, 3.0) * w.rng.uniform(0.8, 1.2))
    w.update = w.update * 2.0 * grow
    w.grad = w.grad * grow**1.5
    up = w.rng.random() < 0.5
    w.entropy = w.entropy * (np.minimum(grow, 6) if up else 1 / grow)
    for source in w.sources:
        w.skill[source] = w.skill[source] / grow**1.2
    if up and w.rng.random() < 0.6:
        w.length = np.minimum(w.length * np.minimum(grow, 3), w.limit * 0.7)
    if w.rng.random() < 0.3:
        w.nan_from = w.n - int(w.rng.integers(2, max(3, w.n // 10)))


def data_exhausted(w: World) -> None:
    w.epoch = np.floor(w.t / (w.n / w.rng.uniform(6, 20)))
    w.flags["val_falls"] = True


def entropy_collapse(w: World) -> None:
    w.entropy = w.entropy[0] * np.exp(-w.t / (0.12 * w.n)) + 0.004
    w.update = w.update * (0.1 + 0.9 * w.entropy / w.entropy[0])
    w.grad = w.grad * (0.15 + 0.85 * w.entropy / w.entropy[0])
    for source in w.sources:
        level = w.skill[source][min(w.n - 1, int(0.3 * w.n))]
        w.skill[source] = np.minimum(w.skill[source], level)


def plateau(w: World) -> None:
    for source in w.sources:
        w.skill[source] = np.full(w.n, w.skill[source][0])


def _make_async(w: World) -> None:
    if w.mode == "sync":
        w.mode = "separate_async"
        w.lag = np.minimum(
            w.t, np.maximum(0.0, w.rng.uniform(0.5, 2.0) * np.exp(ar_noise(w.rng, w.n, 0.15, 0.6)))
        )


def _make_agentic(w: World) -> None:
    if not w.is_agentic:
        w.is_agentic = True
        w.turns = np.full(w.n, w.rng.uniform(3, 12))
        w.failed = np.full(w.n, w.rng.uniform(0, 0.02))


Change = Callable[[World], None]
FAULTS: dict[str, Change] = {
    "all_wrong": all_wrong,
    "all_right": all_right,
    "missed_weight_sync": missed_weight_sync,
    "stale_samples": stale_samples,
    "engine_mismatch": engine_mismatch,
    "dead_sandbox_pool": dead_sandbox_pool,
    "collective_hang": collective_hang,
    "oom_in_sync": oom_in_sync,
    "late_oom_with_length": late_oom_with_length,
    "silent_error_after_wake": silent_error_after_wake,
    "mismatch_to_nan": mismatch_to_nan,
    "sandbox_leak": sandbox_leak,
    "object_store_spill": object_store_spill,
    "buffer_never_fills": buffer_never_fills,
    "version_drift": version_drift,
    "discontinuity_after_resume": discontinuity_after_resume,
    "one_source_all_zero": one_source_all_zero,
    "filter_starvation": filter_starvation,
    "tail_burst": tail_burst,
    "fragmentation": fragmentation,
}
STATES: dict[str, Change] = {
    "reward_saturates": reward_saturates,
    "learning_rate_too_high": learning_rate_too_high,
    "data_exhausted": data_exhausted,
    "entropy_collapse": entropy_collapse,
    "plateau": plateau,
}

OWN_ONLY = (
    "env/",
    "reward/",
    "failures/",
    "host/",
    "sync/",
    "replica/",
    "buffer/",
    "training/weight_version",
)


def make(name: str, seed: int, *, own_names: bool = False, n: int | None = None) -> World:
    """A world by name: "healthy", a fault, or a state of the algorithm."""
    w = healthy(seed, n=n, own_names=own_names)
    if name != "healthy":
        {**FAULTS, **STATES}[name](w)
    return w


def rows(w: World, *, own_names: bool = False) -> list[tuple[int, dict[str, float]]]:
    """(step, data) in the order in which a logger would write them; some metrics are missing, as in life."""
    rng = w.rng
    table = metrics(w)
    if w.flags.get("val_falls"):
        for name, values in table.items():
            if name.startswith("val-core/"):
                table[name] = values * np.linspace(1.0, 0.8, w.n)
    if not own_names:
        table = {k: v for k, v in table.items() if not k.startswith(OWN_ONLY)}
    hidden: set[str] = set()
    if rng.random() < 0.25:
        hidden |= {k for k in table if k.startswith("rollout_corr/")}
    elif rng.random() < 0.1:
        hidden |= {k for k in table if k.startswith("training/rollout_")}
    hidden |= {
        k
        for k in table
        if k.startswith(("perf/mfu", "timing_per_token_ms", "prompt_length")) and rng.random() < 0.3
    }
    end = min(w.n, w.ends_at or w.n)
    order = list(range(end))
    if w.repeat_from is not None:
        last, first = w.repeat_from
        order = [*range(min(last, end)), *range(first, end)]
    out: list[tuple[int, dict[str, float]]] = []
    written: set[int] = set()
    for i in order:
        data: dict[str, float] = {}
        again = i in written
        written.add(i)
        for name, values in table.items():
            value = float(values[i])
            if name in hidden or (np.isnan(value) and not (w.nan_from is not None and i >= w.nan_from)):
                continue
            if np.isnan(value) and not name.startswith("actor/"):
                continue
            if again and not name.startswith(("timing_s/save", "actor/lr", "training/")):
                value *= 1 + 0.01 * rng.normal()
            if rng.random() < 0.002:
                continue
            data[name] = value
        out.append((i + w.first_step, data))
    return out


def write_jsonl(w: World, path: Path, *, own_names: bool = False) -> Path:
    """verl's file logger format (and, with `own_names`, our metrics.jsonl)."""
    with path.open("w", encoding="utf-8") as file:
        for step, data in rows(w, own_names=own_names):
            clean = {k: (None if np.isnan(v) else v) for k, v in data.items()}
            file.write(json.dumps({"step": step, "data": clean}) + "\n")
    return path


def write_console(w: World, path: Path) -> Path:
    """verl's console log as a scheduler captured it: prefixes, colours, numpy values, other lines, trouble in words."""
    rng = w.rng
    style = int(rng.integers(0, 3))
    with path.open("w", encoding="utf-8") as file:
        file.write("2026-11-01 09:12:01,123\tINFO worker.py:1879 -- Started a local Ray instance.\n" * 3)
        for step, data in rows(w):
            index = step - w.first_step
            parts = []
            for key, value in data.items():
                if style == 0:
                    text = f"{value:.3f}"
                elif style == 1:
                    text = f"np.float64({value!r})"
                else:
                    text = repr(float(value))
                parts.append(f"{key}:{text}")
            prefix = "\x1b[36m(TaskRunnerV1 pid=4821)\x1b[0m " if style else "(TaskRunner pid=77) "
            file.write(f"{prefix}step:{step} - " + " - ".join(parts) + "\n")
            if rng.random() < 0.3:
                file.write(
                    f"\x1b[36m(WorkerDict pid={rng.integers(1000, 9999)})\x1b[0m INFO:2026-11-01 micro batch 3/12\n"
                )
            for at, line in w.text:
                if at == index:
                    file.write(f"(WorkerDict pid=5544) {line}\n")
    return path
