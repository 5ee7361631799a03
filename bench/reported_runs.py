"""Runs by recipe: a fourth source of logs for `bench/diagnose.py`, from what users of such systems report in public.

A run is one of eleven recipes (a small maths run, DAPO at 32B, PPO with a critic, MoE, search, software engineering
with sandboxes, code scored in sandboxes, LoRA with tiny batches, tools, pictures, separated asynchronous) with that
recipe's seconds, lengths, batch and rewards, told by an older or a newer verl, with nearly all metrics or a third of
them. Beside the other three generators it assumes: noise that comes from the size of the batch, levels that wander
for the whole run, seconds that belong to a busy cluster, 30 to 5,000 steps, validations inside or outside the step,
faults that come at once, slowly, or again and again, barely or heavily.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Range = tuple[float, float]
OFF = "training/off_policy/"
AGE, WORST = OFF + "trajectory_staleness/", OFF + "trajectory_staleness_worst/"
DIFF, CORR = "training/rollout_probs_diff_", "rollout_corr/"


@dataclass(frozen=True)
class Recipe:
    """What kind of job it is, at the scale that such jobs have."""

    steps: Range
    gen_s: Range
    train_s: Range
    sync_s: Range
    tokens: Range
    """Mean response length at first."""
    room: Range
    """Longest response allowed, in mean lengths at first."""
    prompts: Range
    group: Range
    solved: tuple[Range, Range]
    """Share of right answers at first and at last."""
    gap: Range
    """Mean difference of the probabilities of engine and trainer."""
    sources: tuple[str, ...]
    reward: Range = (0.0, 1.0)
    """Of a wrong and of a right answer."""
    turns: Range | None = None
    tool_s: Range = (0.5, 5.0)
    reward_s: Range = (0.05, 2.0)
    growth: Range = (0.7, 1.6)
    """Mean length at last over that at first."""
    device_gb: float = 80.0
    has_critic: bool = False
    is_async: bool = False
    is_moe: bool = False
    has_filter: bool = False


RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(
        (30, 210), (8, 35), (9, 40), (0.6, 4), (150, 380), (2.5, 6), (64, 1024), (4, 8),
        ((0.25, 0.6), (0.72, 0.93)), (0.002, 0.008), ("openai/gsm8k",),
    ),
    "dapo": Recipe(
        (90, 2500), (250, 1500), (120, 600), (8, 30), (700, 2500), (8, 25), (256, 512), (8, 16),
        ((0.06, 0.25), (0.4, 0.65)), (0.004, 0.012), ("math_dapo", "aime24", "aime25"),
        reward=(-1.0, 1.0), growth=(1.5, 4.0), device_gb=141.0, has_filter=True,
    ),
    "ppo": Recipe(
        (100, 1500), (15, 90), (20, 110), (1.5, 8), (250, 900), (2, 4), (128, 1024), (1, 4),
        ((0.2, 0.5), (0.55, 0.85)), (0.003, 0.01), ("math", "gsm8k"), has_critic=True,
    ),
    "moe": Recipe(
        (60, 800), (60, 400), (80, 500), (10, 60), (800, 5000), (3, 12), (128, 512), (8, 16),
        ((0.2, 0.5), (0.45, 0.75)), (0.008, 0.0155), ("math", "code", "stem"), device_gb=141.0, is_moe=True,
    ),
    "search": Recipe(
        (100, 1000), (40, 160), (20, 90), (2, 8), (300, 900), (3, 8), (128, 512), (4, 8),
        ((0.15, 0.3), (0.35, 0.5)), (0.003, 0.011), ("nq", "triviaqa", "hotpotqa", "2wikimultihopqa"),
        turns=(2.4, 4.5), tool_s=(0.2, 3),
    ),
    "swe": Recipe(
        (30, 250), (500, 2600), (200, 900), (5, 40), (6000, 22000), (2, 4), (16, 64), (4, 16),
        ((0.08, 0.2), (0.18, 0.42)), (0.003, 0.011), ("swe-gym", "r2e"), turns=(14, 50), tool_s=(2, 20),
        reward_s=(20, 200), growth=(0.8, 1.5), device_gb=141.0,
    ),
    "code": Recipe(
        (60, 900), (50, 400), (40, 250), (2, 12), (900, 5000), (3, 8), (64, 512), (8, 16),
        ((0.12, 0.3), (0.3, 0.55)), (0.003, 0.011), ("taco", "apps", "codeforces"), reward_s=(6, 60),
    ),
    "lora": Recipe(
        (60, 600), (6, 40), (5, 40), (0.4, 6), (150, 700), (2, 5), (8, 32), (4, 8),
        ((0.2, 0.5), (0.4, 0.75)), (0.003, 0.012), ("local",), reward=(0.0, 1.1), device_gb=48.0,
    ),
    "tools": Recipe(
        (60, 600), (60, 300), (40, 200), (2, 12), (900, 4000), (3, 8), (64, 512), (8, 16),
        ((0.15, 0.4), (0.4, 0.7)), (0.004, 0.012), ("math_dapo", "aime24"), reward=(-1.0, 1.0),
        turns=(2.6, 8), tool_s=(0.5, 4),
    ),
    "pictures": Recipe(
        (45, 400), (25, 90), (30, 120), (2, 8), (200, 600), (3, 8), (128, 512), (5, 8),
        ((0.25, 0.45), (0.45, 0.65)), (0.004, 0.012), ("geo3k", "clevr"), reward=(0.0, 1.0),
    ),
    "async": Recipe(
        (100, 5000), (20, 240), (20, 200), (1.5, 20), (500, 6000), (3, 10), (64, 512), (8, 16),
        ((0.1, 0.4), (0.4, 0.75)), (0.003, 0.012), ("math", "code"), growth=(0.8, 2.5), is_async=True,
    ),
}  # fmt: skip
AGENTIC = tuple(name for name, recipe in RECIPES.items() if recipe.turns)
SEVERAL = tuple(name for name, recipe in RECIPES.items() if len(recipe.sources) > 1)


@dataclass
class Log:
    """A run as a table of series, one entry a step, and the lines beside it."""

    rng: np.random.Generator
    recipe: Recipe
    n: int
    at: int
    m: dict[str, Array] = field(default_factory=dict)
    end: int = 0
    lines: list[tuple[int, str]] = field(default_factory=list)
    """(after which entry, text)"""
    nulls: tuple[int, tuple[str, ...]] | None = None
    back: int = 0
    """Steps logged twice: the run stopped at `at + back` and goes on at `at`."""
    earlier: dict[str, Array] = field(default_factory=dict)
    """The table of the part before a restart."""
    needs: tuple[str, ...] = ()
    """Prefixes of what the log must hold for the fault to be told at all."""
    needs_digits: bool = False
    """Whether three decimals would show nothing of the fault."""
    is_only_words: bool = False
    """Told by lines of a console alone."""
    lost_s: Array | None = None
    """Seconds that no stage has."""
    is_v1: bool = True
    share: float = 1.0
    """How many of the groups of metrics are logged."""
    by_source: str = "reward"
    """What a reward by source is called."""

    @property
    def t(self) -> Array:
        return np.arange(self.n, dtype=np.float64)

    @property
    def on(self) -> Mask:
        return np.asarray(self.t >= self.at)

    @property
    def since(self) -> Array:
        return np.clip(self.t - self.at, 0.0, None)

    def uni(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def log(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def coin(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *options: str) -> str:
        return str(self.rng.choice(list(options)))

    def wander(self, size: float) -> Array:
        """A factor that wanders slowly for the whole run, `size` its standard deviation in the logarithm."""
        keep = np.exp(-1.0 / max(self.n / 5, 8))
        out, state = np.zeros(self.n), 0.0
        for i, push in enumerate(self.rng.normal(0, 1, self.n)):
            state = keep * state + np.sqrt(1 - keep * keep) * push
            out[i] = state
        return np.exp(size * out)

    def noisy(self, level: float | Array, noise: float, drift: float = 0.0, spikes: float = 0.0) -> Array:
        out = level * np.exp(self.rng.normal(0, noise, self.n))
        if drift:
            out = out * self.wander(drift)
        if spikes:
            out = out * np.where(self.rng.random(self.n) < spikes, 1 + self.rng.exponential(1.0, self.n), 1.0)
        return np.asarray(out)

    def ramp(self, over: float | None = None, power: float = 1.0) -> Array:
        """0 until the fault begins, 1 after `over` steps (or at the end)."""
        return np.asarray(np.clip(self.since / max(over or self.n - self.at - 1, 1), 0, 1) ** power)

    def spells(self, longest: float = 30) -> Mask:
        """Three spells or so of being there, from `at` on; between them it is gone."""
        out, i = np.zeros(self.n, bool), self.at
        while i < self.n:
            on, off = int(self.uni(8, longest)), int(self.uni(8, 1.5 * longest))
            out[i : i + on] = True
            i += on + off
        return out

    def times(self, name: str, factor: float | Array, where: Mask | None = None) -> None:
        if name in self.m:
            self.m[name] = self.m[name] * np.where(self.on if where is None else where, factor, 1.0)

    def plus(self, name: str, amount: float | Array, where: Mask | None = None) -> None:
        if name in self.m:
            self.m[name] = self.m[name] + np.where(self.on if where is None else where, amount, 0.0)

    def put(self, name: str, values: float | Array, where: Mask | None = None) -> None:
        if name in self.m:
            self.m[name] = np.where(self.on if where is None else where, values, self.m[name])

    # -- groups of metrics that move together

    def set_solved(self, solved: Array, *, noise: bool = True) -> None:
        """The share of right answers, and every reward that follows from it."""
        self.m["_solved"] = solved = np.clip(solved, 0.0, 1.0)
        wrong, right = self.recipe.reward
        measured = solved
        if noise:
            draws = self.m["_prompts"][0] * 2
            measured = np.clip(
                solved + self.rng.normal(0, 1, self.n) * np.sqrt(solved * (1 - solved) / draws), 0, 1
            )
        reward = wrong + (right - wrong) * measured
        for kind in ("score", "rewards"):
            self.m[f"critic/{kind}/mean"] = reward.copy()
            self.m[f"critic/{kind}/max"] = np.full(self.n, right)
            self.m[f"critic/{kind}/min"] = np.full(self.n, wrong)
        if self.recipe.has_critic:  # the KL is in the reward
            self.m["critic/rewards/mean"] = reward - self.m["_kl_paid"]
            self.m["critic/rewards/min"] = np.full(self.n, wrong - 0.1) - self.m["_kl_paid"]
        for i, source in enumerate(self.recipe.sources):
            tilt = self.m["_tilts"][i]
            name = f"val-core/{source}/{'acc' if wrong else 'reward'}/mean@{self.recipe.group[0]:.0f}"
            self.m[name] = np.where(
                self.m["_tested"] > 0,
                np.clip(solved * tilt + self.rng.normal(0, 0.015, self.n), 0.01, 1),
                np.nan,
            )
            own = np.clip(solved * tilt + self.rng.normal(0, 0.05, self.n), 0.005, 1)
            self.m[f"{self.by_source}/{source}/mean"] = wrong + (right - wrong) * own

    def fewer_solved(self, factor: float | Array, where: Mask | None = None) -> None:
        self.set_solved(self.m["_solved"] * np.where(self.on if where is None else where, factor, 1.0))

    def longer(self, factor: float | Array, where: Mask | None = None, *, longest: bool = True) -> None:
        """Responses and all seconds that follow from them."""
        mask = self.on if where is None else where
        for name in ("response_length/mean", *(("response_length/max",) if longest else ())):
            self.times(name, factor, mask)
        self.m["response_length/max"] = np.minimum(self.m["response_length/max"], self.m["_limit"])
        self.m["response_length/mean"] = np.minimum(self.m["response_length/mean"], 0.98 * self.m["_limit"])
        for stage in ("gen", "old_log_prob", "ref", "values", "update_actor", "update_critic"):
            self.times(f"timing_s/{stage}", factor, mask)

    def grow_gap(self, amplitude: float | Array, where: Mask | None = None) -> None:
        """Engine and trainer differ `amplitude` times as much: probabilities by it, divergences by its square."""
        a = np.where(self.on if where is None else where, amplitude, 1.0)
        floor = self.m["_gap"]
        self.m["_gap"] = floor * a
        self.write_gap()

    def write_gap(self) -> None:
        n, rng, a = self.n, self.rng, self.m["_gap"]
        mean = 0.75 * np.tanh(a / 0.75) * np.exp(rng.normal(0, self.m["_gap_noise"][0], n))
        kl = 36.0 * a**2 / (1 + 4 * a) * np.exp(rng.normal(0, 2 * self.m["_gap_noise"][0], n))
        self.m[DIFF + "mean"] = mean
        self.m[DIFF + "std"] = np.minimum(mean * np.exp(rng.normal(0.8, 0.04, n)), 0.5)
        self.m[DIFF + "max"] = np.clip(1 - (1 - self.m["_gap_max"]) * np.exp(-6 * (a - a[0]).clip(0)), 0, 1)
        self.m[DIFF + "valid"] = np.ones(n)
        r = np.clip(
            1 - 20.0 * a**2 * self.m["_pearson"], -0.02, 1
        )  # of a spread of 2.2 a, where probabilities vary by 0.12
        self.m["training/rollout_actor_probs_pearson_corr"] = np.clip(r + rng.normal(0, 3e-4, n), -0.1, 1)
        self.m[CORR + "kl"] = kl * rng.uniform(0.6, 1.1, n)
        self.m[CORR + "k3_kl"] = kl
        self.m[CORR + "log_ppl_diff"] = kl * rng.uniform(0.3, 1.0, n) * np.sign(self.m["_ppl_sign"])
        self.m[CORR + "ppl_ratio"] = np.exp(np.clip(self.m[CORR + "log_ppl_diff"], -6, 6))
        chi2 = np.expm1(np.clip(6.0 * kl, 0, 12)) * np.exp(rng.normal(0, 0.5, n))
        self.m[CORR + "chi2_token"] = chi2
        self.m[CORR + "rollout_is_mean"] = 1 + rng.normal(0, 0.002, n) - 0.2 * np.minimum(kl, 1)
        self.m[CORR + "rollout_is_std"] = np.sqrt(np.minimum(chi2, 3))
        self.m[CORR + "rollout_is_max"] = np.full(n, 2.0)
        self.m[CORR + "rollout_is_eff_sample_size"] = 1 / (1 + np.minimum(chi2, 20))

    def make_async(self) -> None:
        if AGE + "mean" in self.m:
            return
        lag = self.uni(0.4, 3.0)
        mean = np.minimum(self.noisy(lag, 0.08, 0.15), self.t)
        top = np.ceil(mean + self.rng.exponential(0.7, self.n))
        for prefix, more in ((AGE, 0.0), (WORST, self.uni(0.0, 0.5))):
            self.m[prefix + "mean"] = mean + more
            self.m[prefix + "max"] = np.minimum(top + np.ceil(more), self.t)
            self.m[prefix + "min"] = np.floor(np.minimum(mean * 0.5, self.t))
        self.m[OFF + "trajectory_spans/mean"] = 1 + mean * self.uni(0.1, 0.5)
        self.m[OFF + "evicted_samples"] = self.rng.poisson(self.log(0.05, 6), self.n).astype(float)
        # the trainer waits only for what is not there yet: sometimes nothing, sometimes long
        gen = self.m["timing_s/gen"]
        wait = gen * self.uni(0.1, 0.6) * self.rng.lognormal(0, self.uni(0.15, 0.5), self.n)
        self.m["timing_s/gen"] = np.maximum(wait, 0.05)

    def older(self, extra: float | Array) -> None:
        """Samples are `extra` versions older: mean, youngest and oldest."""
        for prefix in (AGE, WORST):
            self.plus(prefix + "mean", extra)
            self.plus(prefix + "max", np.ceil(np.asarray(extra) * 1.3))
            self.plus(prefix + "min", np.floor(np.asarray(extra) * 0.6))


def base(
    seed: int, recipes: tuple[str, ...] = tuple(RECIPES), *, stream: int = 90_417, most_steps: int = 5000
) -> Log:
    """A healthy run of one of the recipes; `stream` keeps the draws of one generator from those of another."""
    rng = np.random.default_rng([stream, seed])
    recipe = RECIPES[str(rng.choice(list(recipes)))]
    n = min(int(np.exp(rng.uniform(*np.log(recipe.steps)))), most_steps)
    log = Log(rng, recipe, n, at=int(n * rng.uniform(0.3, 0.7)), end=n)
    log.is_v1 = recipe.is_async or log.coin(0.6)
    log.share = 1.0 if log.coin(0.4) else log.uni(0.3, 0.9)
    log.by_source = log.pick("reward", "critic/rewards", "critic/score")
    t, m, uni = log.t, log.m, log.uni
    m["_prompts"] = np.full(n, log.log(*recipe.prompts))
    group = round(log.log(*recipe.group))
    m["_group"] = np.full(n, float(group))
    m["_tilts"] = rng.uniform(0.5, 1.15, max(n, len(recipe.sources)))
    every = int(rng.choice([5, 10, 20, 25, 50]))
    tested = t % every == every - 1
    m["_tested"] = tested.astype(float)
    first, last = uni(*recipe.solved[0]), uni(*recipe.solved[1])
    shape = log.pick("steady", "early", "late", "steps")
    way = {
        "steady": t / n,
        "early": 1 - np.exp(-t / (uni(0.05, 0.25) * n)),
        "late": 1 / (1 + np.exp(-(t - 0.55 * n) / (0.09 * n))),
        "steps": np.floor(4 * t / n) / 8 + 0.5 * t / n,
    }[shape]
    m["_kl_paid"] = 0.002 + uni(0.01, 0.05) * t / n
    log.set_solved(first + (last - first) * way + 0.015 * np.log(log.wander(1.0)))
    grown = 1 + (uni(*recipe.growth) - 1) * (way if log.coin() else t / n)
    length = log.log(*recipe.tokens) * grown
    m["_limit"] = np.full(
        n, 2.0 ** np.round(np.log2(length[0] * uni(*recipe.room))) * (3 / 4 if log.coin() else 1)
    )
    m["_limit"] = np.maximum(m["_limit"], 1.3 * length.max())
    m["response_length/mean"] = log.noisy(length, 0.25 / np.sqrt(m["_prompts"][0]) + 0.01, 0.06)
    spread = uni(2.2, 4.5)
    top = log.noisy(m["response_length/mean"] * spread, 0.09)
    m["response_length/max"] = np.round(np.minimum(top, m["_limit"]))
    m["response_length/min"] = np.round(log.noisy(length * uni(0.05, 0.3), 0.2))
    over = np.clip(uni(0.2, 0.6) * (spread * length / m["_limit"] - 0.5), 0.001, 0.4)
    num = m["_prompts"] * m["_group"]
    m["response_length/clip_ratio"] = rng.binomial(num.astype(int), np.clip(over, 0, 1)) / num
    m["prompt_length/mean"] = log.noisy(log.log(90, 1500), 0.015)
    m["prompt_length/max"] = np.round(m["prompt_length/mean"] * uni(2, 6))
    m["prompt_length/clip_ratio"] = np.zeros(n)
    direction = log.pick("falls", "falls", "stands", "rises")
    entropy = (
        uni(0.12, 0.8)
        * {
            "falls": uni(0.25, 0.6) + (1 - uni(0.25, 0.6)) * np.exp(-t / (uni(0.1, 0.6) * n)),
            "stands": np.ones(n),
            "rises": 1 + uni(0.1, 0.6) * t / n,
        }[direction]
    )
    m["actor/entropy"] = log.noisy(entropy, 0.03, 0.08)
    m["actor/grad_norm"] = log.noisy(log.log(0.03, 1.2), 0.18, 0.2, 0.01)
    m["actor/pg_loss"] = rng.normal(uni(-0.01, 0.02), 0.02, n)
    m["actor/pg_clipfrac"] = np.clip(log.noisy(log.log(1e-4, 8e-3), 0.25, 0.2), 0, 1)
    m["actor/pg_clipfrac_lower"] = m["actor/pg_clipfrac"] * 0.02
    m["actor/ppo_kl"] = rng.normal(0, 1, n) * log.log(5e-5, 6e-4) + log.log(1e-5, 3e-4)
    if log.coin(0.45):
        m["actor/kl_loss"] = log.noisy(2e-4 + log.log(0.002, 0.2) * ((t + 1) / n) ** uni(0.5, 1), 0.04, 0.1)
        m["actor/kl_coef"] = np.full(n, 0.001)
    lr = np.full(n, float(rng.choice([1e-6, 1e-6, 5e-7, 2e-6, 1e-5])))
    if log.coin(0.5):
        lr = lr * np.clip((t + 1) / uni(5, 20), 0, 1)
    if log.coin(0.25):
        lr = lr * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * t / n)))
    m["actor/lr"] = lr
    m["critic/advantages/mean"] = rng.normal(0, 0.02, n)
    m["critic/advantages/max"] = log.noisy(np.sqrt(max(group - 1, 1)), 0.05)
    m["critic/advantages/min"] = -log.noisy(np.sqrt(max(group - 1, 1)), 0.05)
    busy = log.wander(0.05) if log.coin(0.4) else np.ones(n)  # other jobs on the hosts
    rel = m["response_length/mean"] / length[0]
    longest = m["response_length/max"] / m["response_length/max"][0]
    noise = log.log(0.015, 0.12)
    gen = log.log(*recipe.gen_s) * rel**0.5 * longest**0.4
    m["timing_s/gen"] = log.noisy(gen * busy, noise, 0.03, 0.008)
    train = log.log(*recipe.train_s) * rel * busy
    m["timing_s/update_actor"] = log.noisy(train, 0.4 * noise)
    m["timing_s/old_log_prob"] = log.noisy(train * uni(0.2, 0.35), 0.5 * noise)
    if "actor/kl_loss" in m or recipe.has_critic:
        m["timing_s/ref"] = log.noisy(train * uni(0.2, 0.3), 0.5 * noise)
    m["timing_s/reward"] = log.noisy(log.log(*recipe.reward_s) * busy, 2 * noise, 0.05, 0.01)
    m["timing_s/adv"] = log.noisy(log.log(0.03, 0.9), 2 * noise)
    if log.is_v1 or log.coin(0.3):
        m["timing_s/update_weights"] = log.noisy(log.log(*recipe.sync_s) * busy, 1.5 * noise, 0.03, 0.006)
    if recipe.has_critic:
        m["timing_s/values"] = log.noisy(train * 0.25, 0.5 * noise)
        m["timing_s/update_critic"] = log.noisy(train * uni(0.8, 1.2), 0.4 * noise)
        m["critic/vf_loss"] = log.noisy(uni(0.02, 0.2) * (0.4 + 0.6 * np.exp(-t / (0.2 * n))), 0.12, 0.1)
        m["critic/vf_explained_var"] = np.clip(0.7 - np.exp(-t / (0.1 * n)) + rng.normal(0, 0.03, n), -1, 1)
    m["timing_s/testing"] = np.where(tested, log.noisy(np.median(gen) * uni(0.3, 2.0), 0.05), np.nan)
    saved = t % (every * int(rng.choice([1, 2, 5]))) == every - 1
    m["timing_s/save_checkpoint"] = np.where(saved, log.noisy(log.log(5, 300), 0.15), np.nan)
    for stage in ("gen", "update_actor", "old_log_prob", "reward"):
        m[f"timing_s/{stage}"][0] *= uni(1.0, 3.5)
    peak = np.maximum.accumulate(rel * np.exp(rng.normal(0, 0.01, n)))
    used = recipe.device_gb * (uni(0.3, 0.6) + uni(0.02, 0.15) * peak / peak[-1])
    m["perf/max_memory_allocated_gb"] = used
    slack = recipe.device_gb * uni(0.02, 0.1) * (1 - 0.7 * np.exp(-t / uni(1, 10)))
    m["perf/max_memory_reserved_gb"] = np.maximum.accumulate(
        np.minimum(used + slack, 0.98 * recipe.device_gb)
    )
    host = uni(80, 900) * (1 + uni(0.0, 0.12) * t / n)
    m["perf/cpu_memory_used_gb"] = log.noisy(host, 0.004, 0.02) + np.where(saved, 0.03 * host, 0.0)
    m["perf/mfu/actor"] = log.noisy(uni(0.12, 0.5), 0.3 * noise)
    m["_gap"] = log.log(*recipe.gap) * (entropy / entropy[0]) ** 0.5 * (length / length[0]) ** 0.1
    m["_gap"] = np.minimum(m["_gap"] * log.wander(0.08), 0.0158)
    m["_gap_noise"] = np.full(n, log.log(0.015, 0.12))
    m["_gap_max"] = np.clip(rng.normal(uni(0.3, 0.95), 0.07, n), 0.1, 1.0)
    m["_pearson"] = np.exp(rng.normal(0, 0.25)) * np.exp(rng.normal(0, 0.1, n))
    m["_ppl_sign"] = np.full(n, 1.0 if log.coin(0.7) else -1.0)
    log.write_gap()
    m["training/epoch"] = np.floor(t / (n / uni(0.6, 3.5)))
    m["training/global_step"] = t + 1
    if recipe.turns:
        m["num_turns/mean"] = log.noisy(uni(*recipe.turns), 0.02, 0.08)
        m["num_turns/min"], m["num_turns/max"] = np.full(n, 2.0), np.ceil(m["num_turns/mean"] * 1.8)
        tool = log.log(*recipe.tool_s)
        for stat, factor in (("mean", 1.0), ("max", uni(4, 12)), ("min", 0.05)):
            m[f"timing_s/agent_loop/tool_calls/{stat}"] = log.noisy(tool * factor * busy, 0.1, 0.08, 0.01)
        m["response/aborted_ratio"] = rng.binomial(num.astype(int), uni(0.0, 0.02)) / num
        if log.is_v1:
            m["training/rollout_failure/evicted_samples"] = rng.poisson(uni(0.0, 2.0), n).astype(float)
    if recipe.is_moe:
        for stat, level in (("max", 1.5), ("min", -0.7), ("avg", 0.35)):
            m[f"rollout/moe/{stat}_vio/avg"] = log.noisy(level, 0.04, 0.08)
    if recipe.is_async:
        log.make_async()
    if recipe.has_filter:
        make_filtered(log)
    return log


def make_filtered(log: Log) -> None:
    """DAPO's filter: an older verl counts how often it generates for a batch, a newer one what it drops."""
    if log.is_v1:
        level = log.m["_prompts"][0] * log.m["_group"][0] * log.uni(0.1, 0.7)
        log.m["training/filter_groups/evicted_samples"] = np.round(log.noisy(level, 0.12, 0.1))
    else:
        more = np.round(log.noisy(log.uni(1.0, 2.4), 0.1))
        log.m["train/num_gen_batches"] = np.maximum(more, 1.0)


# ---- faults ------------------------------------------------------------------------------------------------------

GAP = (DIFF, CORR, "training/rollout_actor")


def missed_weight_sync(seed: int) -> Log:
    """Engines go on with old weights: all of them, from the first step, now and then, adapters only, a part of each."""
    log = base(seed)
    log.needs = GAP
    kind = log.pick("frozen", "frozen", "never", "now and then", "part", "quick")
    if kind == "never":
        log.at = 1
    far = log.log(2.6, 14.0)  # amplitude at the end, or after a hundred steps
    over = float(min(log.n - log.at, log.uni(30, 150)))
    rate = (far - 1) / over ** (power := log.uni(0.6, 1.0))
    age = log.since
    if kind == "now and then":
        spells, age = log.spells(40), np.zeros(log.n)
        for i in range(1, log.n):
            age[i] = age[i - 1] + 1 if spells[i] else 0.0
        rate = (far - 1) / float(max(age.max(), 1)) ** power
    amplitude = np.sqrt(1 + (rate * age**power) ** 2)
    log.grow_gap(1 + (amplitude - 1) * (log.uni(0.4, 0.7) if kind == "part" else 1.0))
    if kind == "quick":
        log.m.setdefault("timing_s/update_weights", log.noisy(log.log(*log.recipe.sync_s), 0.08))
        log.needs += ("timing_s/update_weights",)
        log.times("timing_s/update_weights", log.uni(0.01, 0.25))
    if kind in ("frozen", "never", "quick"):  # what is sampled no longer learns
        solved = log.m["_solved"]
        log.set_solved(np.where(log.on, solved[log.at] - 0.1 * solved[log.at] * log.ramp(), solved))
        log.times("actor/pg_clipfrac", amplitude ** log.uni(0.0, 0.4))
    return log


def stale_samples(seed: int) -> Log:
    """Samples grow old, and say so: a wider bound, longer answers, load that comes and goes, or from the start."""
    log = base(seed)
    log.make_async()
    log.needs = (AGE, WORST, *GAP)
    kind = log.pick("bound", "slow", "comes and goes", "always")
    add = log.log(2.5, 14.0)
    if kind == "always":
        log.at, add = 0, log.uni(5.0, 14.0)
    extra = (
        add
        * {
            "bound": np.ones(log.n),
            "slow": log.ramp(log.uni(0.3, 1.0) * (log.n - log.at)),
            "comes and goes": log.spells(60).astype(float),
            "always": np.clip(log.t / add, 0, 1),
        }[kind]
    )
    log.older(extra * log.noisy(1.0, 0.05))
    each = log.uni(0.5, 0.9) if kind == "always" else log.uni(0.12, 0.4)
    log.grow_gap(np.sqrt(1 + (each * extra) ** 2))
    log.times("actor/pg_clipfrac", 1 + log.uni(0.05, 0.4) * extra)
    if log.coin():
        log.plus(OFF + "evicted_samples", log.rng.poisson(log.log(3, 80), log.n), np.asarray(extra > 1))
    log.fewer_solved(1 - log.uni(0.0, 0.25) * log.ramp())
    return log


def engine_mismatch(seed: int) -> Log:
    """Other numbers at the same weights: from the start, since a restart, or on a host that comes and goes."""
    log = base(seed)
    log.needs = GAP
    kind = log.pick("start", "start", "restart", "comes and goes")
    level = log.log(0.032, 0.14)
    where = log.spells(40) if kind == "comes and goes" else log.on
    if kind == "start":
        log.at, where = 0, np.ones(log.n, bool)
    if kind == "restart" and log.coin():
        log.lines.append((log.at - 1, f"Resuming from checkpoints/exp/global_step_{log.at}"))
    log.grow_gap(np.maximum(level / log.m["_gap"], 2.5), where)
    log.fewer_solved(1 - log.uni(0, 0.12) * log.ramp(), where)
    return log


def dead_sandbox_pool(seed: int) -> Log:
    """Sandboxes refuse, time out, are half gone, come and go; tools of an agent or the scorer of code."""
    log = base(seed, (*AGENTIC, "code"))
    log.needs = (
        "critic/",
        "num_turns",
        "timing_s/agent_loop",
        "timing_s/reward",
        "response/aborted",
        "training/rollout_fail",
    )
    where = log.spells(25) if log.coin(0.25) else log.on
    kind = log.pick("refused", "timeout", "failed")
    lost = log.uni(0.3, 1.0)
    calls = [f"timing_s/agent_loop/tool_calls/{s}" for s in ("mean", "max", "min")]
    if log.recipe.turns is None:  # code: the scorer runs in sandboxes
        log.times("timing_s/reward", log.uni(0.02, 0.3) if kind == "refused" else log.uni(3, 15), where)
        log.fewer_solved(1 - max(lost, 0.4), where)
        return log
    if kind == "refused":
        for name in calls:
            log.times(name, log.log(0.01, 0.3), where)
        turns = log.m["num_turns/mean"]
        log.put("num_turns/mean", 2 + (turns - 2) * (1 - lost * log.uni(0.6, 1.0)), where)
        log.longer(log.uni(0.4, 0.9), where, longest=False)
        log.fewer_solved(1 - lost, where)
    elif kind == "timeout":
        for name in calls[:2]:
            log.times(name, log.log(3, 25), where)
        log.times("timing_s/gen", log.uni(1.2, 4), where)
        log.fewer_solved(1 - lost, where)
    else:
        num = float(log.m["_prompts"][0] * log.m["_group"][0])
        log.plus("response/aborted_ratio", lost * log.uni(0.5, 0.9), where)
        log.plus("training/rollout_failure/evicted_samples", log.rng.poisson(num * lost, log.n), where)
        log.times("num_turns/mean", log.uni(0.5, 0.9), where)
        log.fewer_solved(1 - lost * log.uni(0.2, 0.9), where)
    return log


def collective_hang(seed: int) -> Log:
    """One rank does not come: the last stage ends in its time-out, or only the watchdog's words are left."""
    log = base(seed)
    log.at = max(8, int(log.n * log.uni(0.3, 0.98)))
    log.end = min(log.at + 1, log.n)
    at = log.end - 1
    kind = log.pick("words", "seconds", "both")
    stages = [
        s
        for s in ("update_actor", "old_log_prob", "ref", "update_critic", "values")
        if f"timing_s/{s}" in log.m
    ]
    name = f"timing_s/{log.pick(*stages)}"
    log.needs, log.is_only_words = (name,), kind == "words"
    if kind != "words":
        wait = float(log.rng.choice([600.0, 1800.0, 3600.0]))
        log.m[name][at] = wait + max(log.m[name][at], 7 * float(np.nanmax(log.m[name])))
    if kind != "seconds":
        log.lines.append(
            (
                at,
                log.pick(
                    "[rank5]:[E1121 02:14:31.118 ProcessGroupNCCL.cpp:685] [Rank 5] Watchdog caught collective "
                    "operation timeout: WorkNCCL(SeqNum=48213, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
                    "Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
                    "[rank0]:[E1121 02:14:31.118 ProcessGroupNCCL.cpp:1895] [PG ID 2 PG GUID 3 Rank 0] Process group "
                    "watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation timeout: "
                    "WorkNCCL(SeqNum=911, OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=64, Timeout(ms)=1800000) ran for "
                    "1800057 milliseconds before timing out.",
                    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
                    "1800000ms for recv operation to complete",
                ),
            )
        )
    return log


def _oom(log: Log, frames: tuple[str, ...], more: str = "") -> None:
    """A traceback through one of the frames, after the last step."""
    gb = log.recipe.device_gb
    log.lines += [
        (log.end - 1, "Traceback (most recent call last):"),
        (log.end - 1, "  " + log.pick(*frames)),
    ]
    log.lines.append(
        (
            log.end - 1,
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {log.uni(0.2, 14):.2f} GiB. GPU 0 has a "
            f"total capacity of {gb:.2f} GiB of which {log.uni(10, 900):.2f} MiB is free.{more}",
        )
    )


def oom_in_sync(seed: int) -> Log:
    """Weights change hands, and both copies do not fit: in words, or as a brim in memory and slow syncs."""
    log = base(seed)
    log.end = min(log.n, log.at + int(log.rng.integers(2, 20)))
    gb = log.recipe.device_gb
    log.is_only_words = log.coin(0.4)
    if not log.is_only_words:
        log.m.setdefault("timing_s/update_weights", log.noisy(log.log(*log.recipe.sync_s), 0.08))
        log.needs = ("perf/max_memory", "timing_s/update_weights")
        log.put("perf/max_memory_allocated_gb", gb * log.uni(0.95, 0.985))
        log.put("perf/max_memory_reserved_gb", gb * log.uni(0.988, 0.994))
        log.times("timing_s/update_weights", log.log(1.7, 8))
    _oom(
        log,
        (
            'File "/opt/verl/verl/workers/engine_workers.py", line 655, in update_weights',
            'File "/opt/verl/verl/workers/fsdp_workers.py", line 702, in rollout_mode',
            'File "/opt/verl/verl/workers/sharding_manager/fsdp_vllm.py", line 248, in __enter__',
            'File "/usr/local/lib/python3.12/dist-packages/vllm/device_allocator/cumem.py", line 230, in wake_up',
            'File "/opt/sglang/python/sglang/srt/managers/scheduler.py", line 2430, in resume_memory_occupation',
        ),
    )
    return log


def late_oom_with_length(seed: int) -> Log:
    """Answers grow for hours until one batch no longer fits; also after the limit was raised."""
    log = base(seed)
    log.needs = ("perf/max_memory", "response_length/mean", "response_length/max")
    log.at = int(log.n * log.uni(0.05, 0.35))
    log.end = int(log.n * log.uni(0.75, 1.0))
    over, factor = log.end - log.at, log.log(1.9, 5)
    way = log.ramp(over, log.uni(0.6, 2.2))
    grown = 1 + (factor - 1) * way
    log.m["_limit"] = log.m["_limit"] * np.where(log.on, factor, 1.0)
    log.longer(grown)
    gb, used = log.recipe.device_gb, log.m["perf/max_memory_allocated_gb"]
    top = gb * log.uni(0.93, 0.985)
    steps = np.maximum.accumulate(way * np.exp(log.rng.normal(0, 0.03, log.n)))
    used = np.maximum.accumulate(used + (top - used) * np.clip(steps / max(steps[log.end - 1], 1e-9), 0, 1))
    log.m["perf/max_memory_allocated_gb"] = used
    reserved = np.minimum(np.maximum(log.m["perf/max_memory_reserved_gb"], used + 0.02 * gb), 0.994 * gb)
    log.m["perf/max_memory_reserved_gb"] = np.maximum.accumulate(reserved)
    if log.coin(0.6):
        _oom(
            log,
            (
                'File "/opt/verl/verl/workers/actor/dp_actor.py", line 522, in update_policy',
                'File "/opt/verl/verl/workers/engine/fsdp/transformer_impl.py", line 611, in forward_backward_batch',
                'File "/opt/verl/verl/utils/torch_functional.py", line 155, in entropy_from_logits',
            ),
        )
    return log


def silent_error_after_wake(seed: int) -> Log:
    """Engines sample noise since a hand-over: all or a share of them, for good or until a restart, loud or mute."""
    log = base(seed)
    log.needs = ("critic/", "response_length", *GAP)
    if log.coin(0.25):
        log.at = int(log.rng.integers(1, 4))
    share = 1.0 if log.coin(0.6) else float(log.rng.choice([0.5, 0.75]))
    where = (
        log.on if log.coin(0.75) or log.at < 4 else np.asarray(log.on & (log.t < log.at + log.uni(10, 40)))
    )
    log.grow_gap((0.25 + 0.5 * log.rng.random()) * share / log.m["_gap"], where)
    log.fewer_solved(1 - share * log.uni(0.9, 1.0), where)
    if log.coin(0.6):
        mean, limit = log.m["response_length/mean"], log.m["_limit"]
        log.longer((1 - share) + share * limit * log.uni(0.7, 0.98) / mean, where)
        log.put("response_length/max", limit, where)
        log.plus("response_length/clip_ratio", share * log.uni(0.6, 0.9), where)
    else:
        log.longer(1 - share * log.uni(0.6, 0.95), where)
    log.times("actor/entropy", 1 + share * log.uni(0.5, 6), where)
    log.times("actor/grad_norm", log.log(1.5, 30), where)
    return log


def mismatch_to_nan(seed: int) -> Log:
    """Numerics that part further and further until a loss is no number: slowly, or within thirty steps."""
    log = base(seed)
    log.needs = (*GAP, "actor/")
    log.at = max(10, int(log.n * log.uni(0.15, 0.6)))
    over = max(8, int(min(log.n - log.at - 1, log.log(15, 400))))
    top = log.log(3.5, 25)
    way = np.exp(np.log(top) * log.ramp(over, log.uni(0.8, 2)))
    log.grow_gap(way)
    log.times("actor/grad_norm", way ** log.uni(0.6, 1.4) * np.exp(log.rng.normal(0, 0.4, log.n)))
    log.fewer_solved(1 - log.uni(0, 0.5) * log.ramp(over, 2))
    names = ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/loss")
    broken = min(log.at + over, log.n - 1)
    log.nulls = (broken, names[: int(log.rng.integers(1, 6))])
    log.end = min(log.n, broken + int(log.rng.integers(1, 30)))
    return log


def not_finite(seed: int) -> Log:
    """A batch whose gradient is no number, out of nothing: one loss, or all that follow, until somebody looks."""
    log = base(seed)
    log.needs = ("actor/",)
    names = ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/kl_loss")
    log.nulls = (log.at, names[: int(log.rng.integers(1, 6))])
    log.end = min(log.n, log.at + int(log.rng.integers(3, 60)))
    return log


def sandbox_leak(seed: int) -> Log:
    """Containers that nobody stops: calls, host memory and generation grow for hours, failures come last."""
    log = base(seed, AGENTIC)
    log.needs = ("timing_s/agent_loop", "perf/cpu_memory", "timing_s/gen", "num_turns")
    log.at = int(log.n * log.uni(0.0, 0.4))
    way = log.ramp(None, log.uni(0.7, 1.8))
    for stat in ("mean", "max"):
        log.times(f"timing_s/agent_loop/tool_calls/{stat}", 1 + log.log(1.0, 10) * way)
    log.times("perf/cpu_memory_used_gb", 1 + log.log(0.25, 1.5) * way)
    log.times("timing_s/gen", 1 + log.log(0.25, 2.5) * way)
    late = np.clip(way - 0.8, 0, 1) * 5
    if log.coin():
        log.plus("response/aborted_ratio", log.uni(0.05, 0.4) * late)
        log.fewer_solved(1 - 0.5 * late)
    return log


def slow_environment(seed: int) -> Log:
    """Half of a pool has gone or a service throttles: calls queue from one step on, for good or for a while."""
    log = base(seed, AGENTIC)
    log.needs = ("timing_s/agent_loop", "timing_s/gen", "num_turns", "response_length/mean")
    times, calls = log.log(2.8, 9), "timing_s/agent_loop/tool_calls/mean"
    way = log.on.astype(float)
    if log.coin(0.3):
        way[log.at + max(12, (log.n - log.at) // 2) :] = 0.0
    more_s = log.m[calls] * (times - 1) * way
    for stat in ("mean", "max"):
        log.times(f"timing_s/agent_loop/tool_calls/{stat}", 1 + (times - 1) * way)
    log.plus("timing_s/gen", np.maximum(more_s * log.m["num_turns/mean"], 0.25 * log.m["timing_s/gen"] * way))
    return log


def slow_generation(seed: int) -> Log:
    """Engines lost their graphs, half of their replicas or most of their KV pool: the same tokens take many times as
    long from a step on, and the log has nothing but the seconds."""
    log = base(seed, tuple(name for name, recipe in RECIPES.items() if not recipe.is_async))
    log.needs = ("timing_s/gen", "response_length/mean")
    log.times("timing_s/gen", np.where(log.on, log.log(2.6, 6), 1.0))
    return log


def object_store_spill(seed: int) -> Log:
    """Batches go over the disk: at once when they outgrow the store, slowly, or in the steps with long answers."""
    log = base(seed)
    log.needs = ("timing_s", "perf/cpu_memory")
    step = float(np.nanmedian(log.m["timing_s/gen"] + log.m["timing_s/update_actor"]))
    kind = log.pick("at once", "slow", "now and then")
    way = {"at once": log.on.astype(float), "slow": log.ramp(), "now and then": log.spells(40).astype(float)}[
        kind
    ]
    log.lost_s = way * log.noisy(step * log.log(0.3, 1.5), 0.25)
    log.plus("timing_s/adv", way * log.noisy(step * log.log(0.03, 0.3), 0.25))
    if log.coin():
        log.plus("timing_s/reward", way * log.noisy(step * log.log(0.03, 0.3), 0.25))
    log.times("perf/cpu_memory_used_gb", 1 + log.uni(0.25, 1.0) * (way if kind != "now and then" else 1.0))
    if log.coin(0.6) or kind == "now and then":
        for i in np.flatnonzero(way > 0.3)[:: int(log.rng.integers(1, 5))]:
            size = 4096 * (int(i) - log.at + 1)
            log.lines.append(
                (
                    int(i),
                    f"(raylet) Spilled {size} MiB, {size // 30} objects, write throughput 912 MiB/s. Set "
                    "RAY_verbose_spill_logs=0 to disable this message.",
                )
            )
        log.is_only_words = kind == "now and then"
    return log


def buffer_never_fills(seed: int) -> Log:
    """The trainer waits: for groups that are evicted, for workers that have gone, more and more, or for ever."""
    log = base(seed)
    log.make_async()
    log.needs = ("timing_s/gen", "timing_s/step", "response_length/mean", OFF)
    kind = log.pick("evicted", "gone", "slow", "for ever")
    usual = float(np.median(log.m["timing_s/gen"])) + 0.5 * float(np.median(log.m["timing_s/update_actor"]))
    way = log.ramp(log.uni(0.3, 0.8) * (log.n - log.at)) if kind == "slow" else log.on.astype(float)
    log.plus("timing_s/gen", usual * log.log(2.5, 15) * way * log.noisy(1.0, 0.2))
    if kind == "evicted":
        log.plus(OFF + "evicted_samples", log.rng.poisson(log.log(100, 1500), log.n))
    if kind == "for ever":
        log.end = min(log.n, log.at + int(log.rng.integers(3, 12)))
        log.m["timing_s/gen"][log.end - 1] *= log.uni(3, 8)
    return log


def version_drift(seed: int) -> Log:
    """A share of the replicas keeps its version; perhaps until somebody restarts it."""
    log = base(seed)
    log.make_async()
    log.needs = (AGE, WORST)
    share = float(log.rng.choice([0.0625, 0.125, 0.25, 0.5]))
    until = log.n if log.coin(0.7) else log.at + log.uni(20, 80)
    age = np.where(log.t < until, log.since, 0.0)
    for prefix in (AGE, WORST):
        log.m[prefix + "max"] = np.maximum(log.m[prefix + "max"], np.round(age + log.uni(0, 2) * (age > 0)))
        log.m[prefix + "mean"] = log.m[prefix + "mean"] + share * age
    log.grow_gap(np.sqrt(1 + (share * log.uni(0.03, 0.25) * age**0.8) ** 2))
    return log


def discontinuity_after_resume(seed: int) -> Log:
    """Taken up again without weights, moments, or schedule; steps run twice or not; the log says it or not."""
    log = base(seed)
    log.at = max(log.at, 14)
    log.needs = ("critic/", "actor/")
    log.earlier = {k: v.copy() for k, v in log.m.items()}
    kind = log.pick("weights", "moments", "both")
    if log.coin(0.5):
        log.back = int(log.rng.integers(1, max(2, min(30, log.n - log.at - 6))))
    if log.back == 0 or log.coin():
        log.lines.append((log.at + log.back - 1, f"Resuming from checkpoints/exp/global_step_{log.at}"))
        log.is_only_words = log.back == 0 and kind == "moments"
    if kind != "moments":
        solved, begin = log.m["_solved"], int(log.uni(0, 0.3) * log.at)
        lost = max(float(solved[log.at] - solved[begin]), 0.25 * float(solved[log.at]))
        log.set_solved(
            solved - np.where(log.on, lost * np.exp(-log.since / log.uni(15, 0.5 * log.n + 16)), 0.0)
        )
        for name in [k for k in log.m if k.startswith(("critic/", "val-core", log.by_source))]:
            log.m[name] = np.where(log.on, log.m[name], log.earlier[name])
        back = np.exp(-log.since / (0.3 * log.n))
        log.times("actor/entropy", 1 + log.uni(0.2, 0.7) * back * (1 if log.coin(0.8) else -0.6))
        log.times("actor/kl_loss", 1 - log.uni(0.5, 0.95) * back)
        log.times("response_length/mean", 1 - log.uni(0.1, 0.4) * back)
    if kind != "weights":
        fade = np.exp(-log.since / log.uni(6, 25))
        log.times("actor/grad_norm", 1 + log.log(1.5, 9) * fade)
        log.times("actor/ppo_kl", 1 + log.log(1.5, 8) * fade)
        if log.coin(0.6):
            log.times("actor/lr", np.clip((log.since + 1) / log.uni(8, 25), 0, 1))
    return log


def one_source_all_zero(seed: int) -> Log:
    """One scorer says zero: from one step on, or for a while; logged by source, or seen in validation alone."""
    log = base(seed, SEVERAL)
    wrong = log.recipe.reward[0]
    i = int(log.rng.integers(0, len(log.recipe.sources)))
    source, share = log.recipe.sources[i], log.uni(0.2, 0.5)
    is_by_source = log.coin(0.6)
    where = (
        np.asarray(log.on & (log.t < log.at + log.uni(12, 60))) if is_by_source and log.coin(0.25) else log.on
    )
    log.fewer_solved(1 - share, where)
    kept = 1 - share
    for other in log.recipe.sources:  # the others are what they were
        name = f"{log.by_source}/{other}/mean"
        log.m[name] = np.where(where, wrong + (log.m[name] - wrong) / kept, log.m[name])
        val = next(k for k in log.m if k.startswith(f"val-core/{other}/"))
        log.m[val] = np.where(where, log.m[val] / kept, log.m[val])
    log.put(f"{log.by_source}/{source}/mean", wrong, where)
    val = next(k for k in log.m if k.startswith(f"val-core/{source}/"))
    log.m[val] = np.where(where & np.isfinite(log.m[val]), 0.0, log.m[val])
    log.needs = (f"{log.by_source}/" if is_by_source else "val-core", "critic/", "val-core")
    if not is_by_source and np.isfinite(log.m[val][log.at :]).sum() < 2:
        log.needs = (f"{log.by_source}/", "critic/")
    return log


def filter_starvation(seed: int) -> Log:
    """Nearly all groups are flat: batches are generated again and again, slowly more so or since the mix changed."""
    log = base(seed)
    if not any(k in log.m for k in ("training/filter_groups/evicted_samples", "train/num_gen_batches")):
        make_filtered(log)
    name = next(k for k in ("training/filter_groups/evicted_samples", "train/num_gen_batches") if k in log.m)
    log.needs = (name, "timing_s/gen", "response_length/mean", "perf/total", "prompt_length/mean")
    way = log.ramp(log.log(0.05, 1.0) * (log.n - log.at))
    rounds = 1 + (log.log(3.5, 14) - 1) * way
    num = float(log.m["_prompts"][0] * log.m["_group"][0])
    before = float(np.median(log.m[name]))
    if name.startswith("train/"):
        log.put(name, np.round(np.maximum(log.m[name], before * rounds * log.noisy(1.0, 0.08))))
        log.times("timing_s/gen", rounds ** log.uni(0.8, 1.0))
    else:
        log.put(name, np.round(((num + before) * rounds - num) * log.noisy(1.0, 0.06)))
        log.times("timing_s/gen", rounds ** log.uni(0.7, 1.0))
    toward = log.pick("right", "wrong", "neither")
    if toward != "neither":
        goal = 0.93 if toward == "right" else 0.04
        solved = log.m["_solved"]
        log.set_solved(solved + (goal - solved) * 0.75 * way)
    return log


def tail_burst(seed: int) -> Log:
    """A few answers never end, in some steps or in all: those steps wait for them, a little or many times longer."""
    log = base(seed)
    log.needs = ("response_length/", "timing_s/gen")
    mean = log.m["response_length/mean"]
    usual = np.minimum(log.m["response_length/max"], log.noisy(mean * log.uni(2.2, 3.5), 0.08))
    log.m["_limit"] = np.maximum(log.m["_limit"], 2.6 * usual.max())  # there is room for a tail
    log.m["response_length/max"] = np.round(usual)
    num = float(log.m["_prompts"][0] * log.m["_group"][0])
    log.m["response_length/clip_ratio"] = log.rng.poisson(0.02, log.n) / num
    hit = np.asarray(log.on & (log.rng.random(log.n) < log.uni(0.25, 1.0)))
    log.put("response_length/max", log.m["_limit"], hit)
    log.plus("response_length/clip_ratio", log.rng.integers(1, 6, log.n) / num, hit)
    slow = log.log(1.6, 6)
    noise = float(np.std(np.diff(np.log(log.m["timing_s/gen"])))) / np.sqrt(2)
    log.times("timing_s/gen", max(slow, 1 + 6 * noise) * log.noisy(1.0, 0.06), hit)
    return log


def fragmentation(seed: int) -> Log:
    """What is held and not used grows to the brim; perhaps to the end that PyTorch's own message describes."""
    log = base(seed)
    log.needs = ("perf/max_memory",)
    log.at = int(log.n * log.uni(0.0, 0.4))
    gb, used = log.recipe.device_gb, log.m["perf/max_memory_allocated_gb"]
    log.m["perf/max_memory_allocated_gb"] = used = np.minimum(used, 0.62 * gb)
    kept = np.minimum(log.m["perf/max_memory_reserved_gb"], used + 0.1 * gb)
    way = (
        np.floor(log.ramp(None, log.uni(0.6, 1.5)) * log.uni(8, 60))
        if log.coin(0.3)
        else log.ramp(None, log.uni(0.6, 1.5))
    )
    way = way / max(way.max(), 1e-9)
    kept = np.maximum.accumulate(kept + (gb * log.uni(0.9, 0.985) - kept) * way)
    log.m["perf/max_memory_reserved_gb"] = kept
    if log.coin(0.35):
        held = kept[-1] - used[-1]
        _oom(
            log,
            ('File "/opt/verl/verl/workers/actor/dp_actor.py", line 522, in update_policy',),
            f" Of the allocated memory {used[-1]:.2f} GiB is allocated by PyTorch, and {held:.2f} GiB is reserved by "
            "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        )
    return log


def no_update(seed: int) -> Log:
    """Rewards differ and nothing is learned: groups of one, frozen weights, or a schedule that has ended."""
    log = base(seed)
    kind = log.pick("one by one", "frozen", "rate")
    if kind == "rate":
        log.needs, log.needs_digits = ("actor/lr",), True
        log.at = int(log.n * log.uni(0.0, 0.7))
        log.put("actor/lr", 0.0)
    else:
        log.needs = ("actor/grad_norm", "critic/score")
        log.at = 0
        log.put("actor/grad_norm", 0.0)
        if kind == "one by one":
            for name in ("critic/advantages", "critic/returns"):
                for end in ("mean", "max", "min"):
                    log.put(f"{name}/{end}", 0.0)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        log.put(name, 0.0)
    score = log.m["critic/score/mean"]
    still = score[max(0, log.at - 1)] + (score - np.median(score)) * 0.3
    log.put("critic/score/mean", np.clip(still, log.recipe.reward[0], 0.8 * log.recipe.reward[1]))
    return log


def absurd_gradient(seed: int) -> Log:
    """A term of the loss explodes in some steps, or has been summed instead of averaged from the first on."""
    log = base(seed)
    log.needs = ("actor/grad_norm",)
    if log.coin(0.3):
        log.at = 0
        log.times("actor/grad_norm", log.log(3e7, 3e10))
        return log
    where = log.on & (log.rng.random(log.n) < log.uni(0.02, 0.2))
    where[log.at] = True
    log.put("actor/grad_norm", np.exp(log.rng.uniform(np.log(3e5), np.log(3e9), log.n)), where)
    return log


def all_rejected(seed: int) -> Log:
    """Rejection leaves out nearly all tokens or sequences: its bound is too narrow for lengths or numerics that are
    usual, from the first step or since the answers became longer."""
    log = base(seed)
    left = log.uni(0.0, 0.08)
    if log.coin():
        log.at = 0
    before = log.noisy(log.uni(0.001, 0.06), 0.2)
    now = np.clip(log.rng.normal(1 - left, 0.02, log.n), 0, 1)
    way = log.ramp(log.uni(10, 80)) if log.at and log.coin() else log.on.astype(float)
    masked = before + (now - before) * way
    log.m[CORR + "rollout_rs_masked_fraction"] = np.clip(masked, 0, 1)
    log.m[CORR + "rollout_rs_seq_masked_fraction"] = np.clip(masked * log.uni(0.97, 1.03), 0, 1)
    log.needs = (CORR,)
    log.times("actor/grad_norm", np.clip(1 - masked, 0.02, 1))
    solved = log.m["_solved"]
    log.set_solved(np.where(log.on, solved[log.at], solved))
    return log


def all_wrong(seed: int) -> Log:
    return _flat(seed, 0.0)


def all_right(seed: int) -> Log:
    return _flat(seed, 1.0)


def _flat(seed: int, solved: float) -> Log:
    log = base(seed)
    log.needs = ("critic/", "actor/grad_norm")
    log.set_solved(np.full(log.n, solved), noise=False)
    for name in [k for k in log.m if k.startswith(("critic/score/m", "critic/rewards/m"))]:
        log.m[name] = np.full(
            log.n, log.recipe.reward[0] + (log.recipe.reward[1] - log.recipe.reward[0]) * solved
        )
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"):
        log.m[name] = np.zeros(log.n)
    for stat in ("mean", "max", "min"):
        log.m[f"critic/advantages/{stat}"] = np.zeros(log.n)
    return log


# ---- well --------------------------------------------------------------------------------------------------------


def healthy(seed: int) -> Log:
    return base(seed)


def longer_answers(seed: int) -> Log:
    """A run that learns to think: answers three times as long, memory and seconds with them, and there is room."""
    log = base(seed, ("dapo", "moe", "code", "async", "gsm8k"))
    log.m["_limit"] = log.m["_limit"] * 4
    log.at = 0
    log.longer(1 + log.uni(1.2, 2.4) / (1 + np.exp(-(log.t - log.uni(0.3, 0.7) * log.n) / (0.1 * log.n))))
    return log


def higher_limit(seed: int) -> Log:
    """The second stage of a run: the limit of the response is doubled after a clean restart, and lengths follow."""
    log = base(seed, ("dapo", "code", "gsm8k", "moe"))
    log.at = max(log.at, 14)
    log.m["_limit"] = log.m["_limit"] * np.where(log.on, 2.0, 1.0)
    log.times("response_length/clip_ratio", log.uni(0.1, 0.6))
    grown = 1 + log.uni(0.2, 0.9) * log.ramp(log.uni(20, 100))
    log.longer(grown)
    log.lines.append((log.at - 1, f"Resuming from checkpoints/stage1/global_step_{log.at}"))
    return log


def curriculum(seed: int) -> Log:
    """The mix of prompts changes at one step: harder or easier, and lengths and entropy with it."""
    log = base(seed)
    factor = log.uni(0.8, 0.93) if log.coin(0.7) else log.uni(1.05, 1.2)
    log.fewer_solved(factor)
    log.longer(log.uni(1.03, 1.2) if factor < 1 else log.uni(0.85, 0.98))
    log.times("actor/entropy", log.uni(1.03, 1.15) if factor < 1 else log.uni(0.88, 0.98))
    return log


def clean_resume(seed: int) -> Log:
    """Taken up again as it was, once or twice; the first step after it is slow."""
    log = base(seed)
    log.at = max(log.at, 14)
    log.back = int(log.rng.integers(0, max(1, min(30, log.n - log.at - 6))))
    log.lines.append((log.at + log.back - 1, f"Resuming from checkpoints/exp/global_step_{log.at}"))
    for stage in ("gen", "update_actor", "old_log_prob"):
        log.m[f"timing_s/{stage}"][log.at] *= log.uni(1.2, 3)
    return log


def new_reference(seed: int) -> Log:
    """The reference policy is replaced by the current one: the distance to it begins at nothing again."""
    log = base(seed)
    log.m["actor/kl_loss"] = log.noisy(2e-4 + log.log(0.01, 0.2) * ((log.t + 1) / log.n), 0.04)
    log.m["actor/kl_loss"] = np.where(
        log.on,
        2e-4 + (log.m["actor/kl_loss"] - log.m["actor/kl_loss"][log.at]).clip(0),
        log.m["actor/kl_loss"],
    )
    return log


def busy_cluster(seed: int) -> Log:
    """Hosts are shared: stages are slower by day, single steps many times, validation and checkpoints cost minutes."""
    log = base(seed)
    day = 1 + log.uni(0.1, 0.35) * (np.sin(log.t / log.n * 2 * np.pi * log.uni(1, 4)) > 0)
    for stage in (
        "gen",
        "update_actor",
        "old_log_prob",
        "ref",
        "values",
        "update_critic",
        "reward",
        "adv",
        "update_weights",
    ):
        log.times(f"timing_s/{stage}", day, np.ones(log.n, bool))
    for _ in range(int(log.rng.integers(1, 8))):
        i, stage = int(log.rng.integers(2, log.n - 4)), log.pick("gen", "update_actor", "reward", "adv")
        log.m[f"timing_s/{stage}"][i] *= log.log(2, 12)
    return log


def bigger_batch(seed: int) -> Log:
    """Twice the batch since a restart: every stage takes longer, and nothing else changes."""
    log = base(seed)
    log.at = max(log.at, 14)
    factor = log.uni(1.6, 2.1)
    for stage in ("gen", "update_actor", "old_log_prob", "ref", "values", "update_critic", "reward", "adv"):
        log.times(f"timing_s/{stage}", factor)
    log.m["_batch"] = np.where(log.on, factor, 1.0)
    log.lines.append((log.at - 1, f"Resuming from checkpoints/exp/global_step_{log.at}"))
    return log


def small_batches(seed: int) -> Log:
    """Eight prompts a step: rewards, lengths, clip fraction and gradients are mostly noise."""
    log = base(seed, ("lora", "swe", "gsm8k", "tools"))
    log.m["_prompts"] = np.full(log.n, log.uni(4, 10))
    log.set_solved(log.m["_solved"])
    for name, noise in (
        ("response_length/mean", 0.15),
        ("response_length/max", 0.3),
        ("actor/grad_norm", 0.5),
    ):
        log.m[name] = np.minimum(log.m[name] * np.exp(log.rng.normal(0, noise, log.n)), log.m["_limit"])
    log.m["response_length/max"] = np.maximum(
        log.m["response_length/max"], log.m["response_length/mean"] * 1.1
    )
    log.m["timing_s/gen"] *= (log.m["response_length/max"] / log.m["response_length/max"].mean()) ** 0.7
    return log


def a_dip(seed: int) -> Log:
    """The reward wavers: lost by a tenth or two over a while, and found again."""
    log = base(seed)
    middle, width = log.uni(0.3, 0.7) * log.n, log.uni(0.05, 0.12) * log.n
    dip = log.uni(0.08, 0.25) * np.exp(-0.5 * ((log.t - middle) / width) ** 2)
    log.set_solved(log.m["_solved"] * (1 - dip))
    log.m["actor/entropy"] *= 1 + 0.5 * dip
    return log


def reward_saturates(seed: int) -> Log:
    """Everything is solved before half of the run: gradients and entropy fade, the filter drops more."""
    log = base(seed)
    half = log.uni(0.05, 0.3) * log.n
    top = log.uni(0.94, 0.995)
    log.set_solved(top - (top - log.m["_solved"][0]) * np.exp(-log.t / half))
    fade = np.exp(-log.t / (log.uni(0.2, 0.7) * log.n))
    for name, least in (("actor/grad_norm", 0.1), ("actor/pg_clipfrac", 0.1), ("actor/entropy", 0.15)):
        log.m[name] *= least + (1 - least) * fade
    log.m["_gap"] *= (0.15 + 0.85 * fade) ** 0.5
    log.write_gap()
    if "training/filter_groups/evicted_samples" in log.m:
        log.m["training/filter_groups/evicted_samples"] *= 1.6 - 0.6 * fade
    return log


def learning_rate_too_high(seed: int) -> Log:
    """The policy runs away: entropy explodes or dies, step KL and clip fraction grow, the reward goes; perhaps NaN."""
    log = base(seed)
    log.needs = ("actor/", "critic/")
    log.at = int(log.n * log.uni(0.05, 0.5))
    log.m["actor/lr"] *= float(log.rng.choice([5.0, 10.0, 50.0]))
    kind = log.pick("explodes", "dies", "swings")
    way = log.ramp(log.log(0.08, 0.8) * (log.n - log.at), log.uni(0.8, 2))
    if kind == "swings":
        way = way * (0.6 + 0.4 * np.sin(log.since / max(log.n / 20, 4)))
    moved = np.exp(way * log.uni(1.1, 2.6))
    log.m["actor/ppo_kl"] = np.abs(log.m["actor/ppo_kl"]) * np.where(log.on, moved**2, 1.0)
    log.times("actor/pg_clipfrac", moved)
    log.times("actor/grad_norm", moved ** log.uni(0.7, 1.4))
    log.times("actor/kl_loss", moved**1.5)
    if kind == "dies":
        log.times("actor/entropy", np.exp(-way * log.uni(1.5, 3.5)))
        log.grow_gap(np.exp(-0.4 * way))
    else:
        log.times("actor/entropy", moved ** log.uni(0.4, 1.0))
        log.grow_gap(moved ** log.uni(0.1, 0.6))
        if log.coin():
            log.longer(1 + log.uni(0.2, 2.0) * way)
            log.plus("response_length/clip_ratio", log.uni(0.05, 0.5) * way)
    log.fewer_solved(1 - log.uni(0.35, 0.97) * way)
    if kind == "explodes" and log.coin(0.25):
        log.nulls = (
            log.n - int(log.rng.integers(1, 4)),
            ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl"),
        )
    return log


def data_exhausted(seed: int) -> Log:
    """Many epochs: the reward on known prompts goes up, the held-out score stands or falls."""
    log = base(seed)
    log.m["training/epoch"] = np.floor(log.t / (log.n / log.uni(6, 60)))
    solved = log.m["_solved"]
    log.set_solved(solved[0] + (0.93 - solved[0]) * (1 - np.exp(-log.t / (0.4 * log.n))))
    fall = 1 - log.uni(0.0, 0.3) * np.clip(log.t / log.n - 0.3, 0, 1)
    for name in [k for k in log.m if k.startswith("val-core/")]:
        held = (
            float(np.nanmedian(log.m[name][: max(3, log.n // 3)])) if np.isfinite(log.m[name]).any() else 0.3
        )
        log.m[name] = np.where(
            np.isfinite(log.m[name]), held * fall + log.rng.normal(0, 0.012, log.n), np.nan
        )
    log.m["actor/entropy"] *= 1 - 0.6 * log.t / log.n
    return log


def plateau(seed: int) -> Log:
    """The reward stands still, low or in the middle, from the start or after it rose."""
    log = base(seed)
    level, rise = log.uni(0.06, 0.7), log.uni(0.0, 0.3)
    log.set_solved(level * (1 - rise * np.exp(-log.t / (0.1 * log.n))))
    return log


FAULTS: dict[str, Callable[[int], Log]] = {
    f.__name__: f
    for f in (
        missed_weight_sync, stale_samples, engine_mismatch, dead_sandbox_pool, collective_hang, oom_in_sync,
        late_oom_with_length, silent_error_after_wake, mismatch_to_nan, sandbox_leak, slow_environment,
        slow_generation, object_store_spill, buffer_never_fills, version_drift, discontinuity_after_resume,
        one_source_all_zero, filter_starvation,
        tail_burst, fragmentation, all_rejected, all_wrong, all_right, not_finite,
        no_update, absurd_gradient,
    )
}  # fmt: skip
WELL: dict[str, Callable[[int], Log]] = {
    f.__name__: f
    for f in (
        healthy, longer_answers, higher_limit, curriculum, clean_resume, new_reference, busy_cluster, bigger_batch,
        small_batches, a_dip, reward_saturates, learning_rate_too_high, data_exhausted, plateau,
    )
}  # fmt: skip


def make(name: str, seed: int) -> Log:
    return {**FAULTS, **WELL}[name](seed)


GROUPS: tuple[tuple[str, ...], ...] = (
    ("critic/score",),
    ("critic/adv", "critic/returns"),
    ("critic/v",),
    ("actor/entropy",),
    ("actor/grad_norm",),
    ("actor/pg_", "actor/ppo_kl"),
    ("actor/kl_",),
    ("actor/lr",),
    ("response_length/min", "prompt_length"),
    ("response_length/max", "response_length/clip_ratio"),
    ("timing_s/reward", "timing_s/adv"),
    ("timing_s/old_log_prob", "timing_s/ref"),
    ("timing_s/update_weights",),
    ("timing_s/testing", "timing_s/save"),
    ("timing_per_token",),
    ("perf/max_memory",),
    ("perf/cpu_memory",),
    ("perf/mfu",),
    ("perf/total", "perf/throughput", "perf/time"),
    ("global_seqlen",),
    (DIFF, "training/rollout_actor"),
    (CORR,),
    (AGE, WORST, OFF),
    ("training/epoch", "training/global_step"),
    ("num_turns",),
    ("timing_s/agent_loop",),
    ("response/aborted", "training/rollout_failure"),
    ("training/filter_groups", "train/num_gen"),
    ("rollout/moe",),
    ("val-core",),
)
"""Metrics that a run logs or does not log together."""


def table(log: Log) -> dict[str, Array]:
    """What this run logs, under the names of its verl."""
    m = {k: v for k, v in log.m.items() if not k.startswith("_")}
    stages = (
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "update_weights",
    )
    inside = (*stages, "save_checkpoint") if log.is_v1 else (*stages, "save_checkpoint", "testing")
    step = sum(np.nan_to_num(m[f"timing_s/{s}"]) for s in inside if f"timing_s/{s}" in m)
    step = np.asarray(step) * 1.012 + log.uni(0.05, 2.0) + (0.0 if log.lost_s is None else log.lost_s)
    m["timing_s/step"] = m["perf/time_per_step"] = step
    num = log.m["_prompts"] * log.m["_group"] * log.m.get("_batch", np.ones(log.n))
    m["perf/total_num_tokens"] = np.round(num * (m["response_length/mean"] + m["prompt_length/mean"]))
    m["perf/throughput"] = m["perf/total_num_tokens"] / step / 8
    for stage, per in (
        ("gen", num * m["response_length/mean"]),
        ("update_actor", m["perf/total_num_tokens"]),
    ):
        m[f"timing_per_token_ms/{stage}"] = 1000 * m[f"timing_s/{stage}"] / per
    mean = m["perf/total_num_tokens"] / 8
    for stat, factor in (
        ("mean", 1.0),
        ("max", 1.12),
        ("min", 0.88),
        ("balanced_min", 0.995),
        ("balanced_max", 1.005),
    ):
        m[f"global_seqlen/{stat}"] = np.round(log.noisy(mean * factor, 0.01))
    m["global_seqlen/minmax_diff"] = m["global_seqlen/max"] - m["global_seqlen/min"]
    names_by_source = [f"{log.by_source}/{source}/mean" for source in log.recipe.sources]
    if f"{log.by_source}/" not in log.needs and log.coin(0.75):
        m = {k: v for k, v in m.items() if k not in names_by_source}
    spared = (
        log.pick(DIFF, CORR) if log.share < 1 and set(GAP) <= set(log.needs) else ""
    )  # one family is enough
    for group in GROUPS:
        is_needed = any(
            need.startswith(part) or part.startswith(need) for part in group for need in log.needs
        )
        if log.rng.random() < log.share or (is_needed and group[0] != spared):
            continue
        m = {k: v for k, v in m.items() if not k.startswith(group) or k in names_by_source}
    if log.is_v1 and log.coin():
        m = {
            k.replace("perf/m", "actor/perf/m", 1) if k.startswith("perf/max_mem") else k: v
            for k, v in m.items()
        }
    return m


def rows(log: Log) -> list[tuple[int, dict[str, float]]]:
    """(step, data) in the order of the file; a validation before the first step has a line of its own."""
    m = table(log)
    order = [(i, False) for i in range(log.end)]
    if log.back:
        order = [
            *((i, True) for i in range(log.at + log.back)),
            *((i, False) for i in range(log.at, log.end)),
        ]
    out: list[tuple[int, dict[str, float]]] = []
    held_out = {k: v for k, v in m.items() if k.startswith("val-core/") and np.isfinite(v).any()}
    if held_out and log.coin(0.6):
        out.append((0, {k: float(v[np.isfinite(v)][0]) * 0.9 for k, v in held_out.items()}))
    for i, is_first in order:
        data = {}
        for k, v in m.items():
            value = float((log.earlier.get(k, v) if is_first else v)[i])
            if np.isfinite(value):
                data[k] = value * (1 + 0.003 * float(log.rng.normal())) if is_first and i >= log.at else value
        for k in ("training/global_step", "training/epoch"):
            if k in data:
                data[k] = float(m[k][i])
        if log.nulls is not None and i >= log.nulls[0]:
            data.update(dict.fromkeys(log.nulls[1], float("nan")))
        out.append((i + 1, data))
    return out


def write_jsonl(log: Log, path: Path) -> Path:
    """verl's file logger. Lines of a console are lost."""
    with path.open("w", encoding="utf-8") as file:
        for step, data in rows(log):
            clean = {k: None if np.isnan(v) else v for k, v in data.items()}
            file.write(json.dumps({"step": step, "data": clean}) + "\n")
    return path


_CHATTER = (
    "(WorkerDict pid=40{:02d}) INFO 11-21 02:10:11 [executor_base.py:227] It took 1.31 seconds to wake up tags "
    "['weights'].",
    "(WorkerDict pid=40{:02d}) /usr/local/lib/python3.12/dist-packages/torch/utils/checkpoint.py:85: UserWarning: None "
    "of the inputs have requires_grad=True. Gradients will be None",
    "(TaskRunner pid=39{:02d}) [ground_truth] 72",
    "(TaskRunner pid=39{:02d}) [response] The program prints 'Error: timed out after {} seconds', so the answer is 72.",
    "(TaskRunner pid=39{:02d}) [score] 1.0",
    "(vLLMHttpServer pid=38{:02d}) INFO 11-21 02:10:12 [loggers.py:123] Engine 000: Avg generation throughput: 2103.4 "
    "tokens/s, Running: 117 reqs, Waiting: 0 reqs, GPU KV cache usage: 31.2%",
)
"""What stands between the steps of a console log."""


def write_console(log: Log, path: Path) -> Path:
    """verl's console as Ray carries it, with progress bars, engine lines and samples of a validation."""
    style = log.pick("old", "numpy", "plain")
    style = "plain" if log.needs_digits and style == "old" else style
    by_row: dict[int, list[str]] = {}
    for at, line in log.lines:
        by_row.setdefault(at, []).append(line)
    with path.open("w", encoding="utf-8") as file:
        file.write("2026-11-21 02:00:01,133\tINFO worker.py:1951 -- Started a local Ray instance.\n")
        file.write("(TaskRunner pid=3911) Total training steps: " + str(log.n) + "\n")
        entry = -1
        for step, data in rows(log):
            value = {"old": "{:.3f}", "numpy": "np.float64({!r})", "plain": "{!r}"}[style]
            text = " - ".join(f"{k}:{value.format(v)}" for k, v in data.items())
            who = "" if style == "plain" else "\x1b[36m(TaskRunner pid=3911)\x1b[0m "
            file.write(f"{who}step:{step} - {text}\n")
            entry += step > 0
            for line in by_row.get(entry, ()) if step > 0 else ():
                file.write(
                    line + "\n" if line.startswith("(") else f"\x1b[36m(WorkerDict pid=4011)\x1b[0m {line}\n"
                )
            if log.coin(0.3):
                file.write(log.pick(*_CHATTER).format(*log.rng.integers(10, 99, 2)) + "\n")
            if log.coin(0.5):
                done = f"{step}/{log.n}"
                file.write(
                    f"(TaskRunner pid=3911) Training Progress: {100 * step // log.n}%|#   | {done} [01:02<3:04]\n"
                )
    return path
