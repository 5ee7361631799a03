"""What a metric's name says in its words: `avg_reward`, `train/mean_return` and `rewards` are all the mean reward.

A trainer of somebody's own follows nobody's naming, but few words say what is meant. A name is taken for a metric of
the catalogue only if it has that metric's words and no other word that might mean something else: `mean_reward` is the
reward, `mean_length_easy` is nothing known. What was read so is told under "about the log".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|@")
_SAME = {
    "rewards": "reward", "rew": "reward", "average": "mean", "avg": "mean", "means": "mean", "maximum": "max",
    "minimum": "min", "gradient": "grad", "gradnorm": "grad_norm", "lens": "length", "len": "length",
    "lengths": "length", "completions": "completion", "responses": "response", "outputs": "output", "weights": "weight",
    "answers": "answer", "tokens": "token", "fraction": "ratio", "frac": "ratio", "share": "ratio", "rate": "ratio",
    "seconds": "s", "secs": "s", "sec": "s", "second": "s", "time": "s", "duration": "s", "training": "train",
    "trainer": "train", "learner": "train", "validation": "eval", "val": "eval", "test": "eval", "dev": "eval",
    "heldout": "eval", "evaluation": "eval", "testing": "eval", "mem": "memory", "gib": "gb", "probs": "prob",
    "logprobs": "logprob", "logp": "logprob", "logps": "logprob", "corr": "correlation", "pearson": "correlation",
    "generation": "gen", "generate": "gen", "generated": "gen", "generating": "gen", "rollouts": "rollout",
    "sampling": "gen", "sampler": "engine", "vllm": "engine", "sglang": "engine", "inference": "engine",
    "generator": "engine", "updates": "update", "returns": "return", "scores": "score",
    "acc": "accuracy", "seq": "sequence", "correctness": "accuracy", "truncation": "truncated",
    "advantages": "advantage", "adv": "advantage",
    "clipfrac": "clip_ratio", "approxkl": "approx_kl", "iteration": "step", "iter": "step",
    "groups": "group", "stddev": "std", "variance": "std", "var": "std", "difference": "diff", "gap": "diff",
    "abs": "diff", "steps": "step", "scoring": "score", "flat": "zero", "losses": "loss",
    "episodic": "episode", "resp": "response", "timing": "s", "timings": "s", "timer": "s", "timers": "s",
    "timeperf": "s", "latency": "s", "infer": "engine", "params": "param", "parameter": "param", "parameters": "param",
    "checkpointing": "checkpoint", "saving": "save", "samples": "sample",
}  # fmt: skip
"""Word -> the one that stands for it below; `a_b` are two words in one."""

_SAYS_NOTHING = frozenset({"charts", "metrics", "metric", "stats", "scalars"})

_RUN = {"train", "mean", "all", "total", "overall", "batch", "rollout", "episode", "ep", "env", "group", "step", "raw",
        "current", "grpo", "ppo", "rl"}  # fmt: skip
"""Words that say where or how, and change nothing about what a mean is."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A metric of the catalogue, the words that a name of it has, and those that it may have beside them."""

    metric: str
    has: tuple[frozenset[str], ...]
    """One word of each."""
    may_have: frozenset[str]
    rank: int = 0
    """Of two names of one log the lower stands."""


def _meaning(metric: str, has: str, may_have: str = "", *, rank: int = 0) -> _Meaning:
    words = tuple(frozenset(word.split("|")) for word in has.split())
    return _Meaning(metric, words, frozenset(may_have.split()), rank)


_PLAIN = " ".join(sorted(_RUN))
_ANSWER = "response|completion|output|gen|answer|sequence"
_OF_KL = "ref reference mean train divergence loss penalty estimate actor policy grpo"
_HAND_OVER = "prepare for gen engine and transfer update to"
_DEVICE = "cuda gpu actor train torch perf stats device"
_SECONDS = "s mean train perf timing timings total stats rl step per"
_MEANINGS: tuple[_Meaning, ...] = (
    _meaning("critic/rewards/mean", "reward", _PLAIN),
    _meaning("critic/rewards/mean", "return", _PLAIN, rank=1),
    _meaning("critic/rewards/mean", "score", _PLAIN, rank=2),
    _meaning("critic/rewards/mean", "accuracy", _PLAIN, rank=3),
    _meaning("critic/rewards/mean", "success|solve|correct|pass ratio", _PLAIN, rank=3),
    _meaning("critic/rewards/max", "reward max", _PLAIN),
    _meaning("critic/rewards/min", "reward min", _PLAIN),
    _meaning("critic/advantages/mean", "advantage mean", "train"),
    _meaning("critic/advantages/max", "advantage max", "train"),
    _meaning("critic/advantages/min", "advantage min", "train"),
    _meaning("val/all/reward", "eval reward", "mean all total overall"),
    _meaning("val/all/reward", "eval accuracy", "mean all total overall", rank=1),
    _meaning("val/all/reward", "eval score", "mean all total overall", rank=1),
    _meaning("response_length/mean", f"{_ANSWER} length", "mean token train rollout"),
    _meaning("response_length/mean", f"{_ANSWER}|sample token mean", "train rollout per engine", rank=1),
    _meaning("response_length/max", f"{_ANSWER} length max", "token train rollout"),
    _meaning("response_length/max", f"{_ANSWER}|sample token max", "train rollout per", rank=1),
    _meaning("response_length/min", f"{_ANSWER} length min", "token train rollout"),
    _meaning(
        "response_length/clip_ratio", "truncated|clipped ratio", "response completion rollout mean train output gen"
    ),
    _meaning("response_length/clip_ratio", "is truncated|clipped mean", "response completion rollout train output all"),
    _meaning("actor/grad_norm", "grad norm", "actor policy train mean total global optim optimizer"),
    _meaning("actor/entropy", "entropy", "actor policy token mean train optim loss approx"),
    _meaning("actor/kl_loss", "kl", _OF_KL),
    _meaning("actor/ppo_kl", "approx|old|step kl", "mean train policy ppo actor policy loss"),
    _meaning("actor/pg_clipfrac", "clip ratio", "mean train actor policy pg ppo loss"),
    _meaning("actor/pg_loss", "policy|pg|actor|grpo|ppo|proxy loss", "mean train"),
    _meaning("actor/loss", "loss", "mean train total", rank=1),
    _meaning("actor/lr", "lr", "actor policy train optim optimizer"),
    _meaning("actor/lr", "learning ratio", "actor policy train optim optimizer", rank=1),
    _meaning("timing_s/step", "step s", _SECONDS),
    _meaning("timing_s/gen", "rollout|gen s", f"{_SECONDS} exposed completion response trajectory trajectories"),
    _meaning("timing_s/update_actor", "update|backward|optimizer|policy s", f"{_SECONDS} actor model forward"),
    _meaning("timing_s/update_weights", "weight sync|update|transfer|publish|broadcast s", f"{_SECONDS} {_HAND_OVER}"),
    _meaning("timing_s/update_weights", "param sync|transfer|publish|broadcast s", f"{_SECONDS} {_HAND_OVER}"),
    _meaning("timing_s/update_weights", "prepare gen s", f"{_SECONDS} {_HAND_OVER}", rank=1),
    _meaning("timing_s/update_weights", "sync s", _SECONDS),
    _meaning("timing_s/old_log_prob", "old logprob s", f"{_SECONDS} compute"),
    _meaning("timing_s/old_log_prob", "logprob s", f"{_SECONDS} compute policy actor and ref reference", rank=1),
    _meaning("timing_s/ref", "ref|reference s", f"{_SECONDS} logprob compute"),
    _meaning("timing_s/reward", "reward s", f"{_SECONDS} score compute execution calculation"),
    _meaning("timing_s/adv", "advantage s", f"{_SECONDS} compute calculation"),
    _meaning("timing_s/testing", "eval s", _SECONDS),
    _meaning("timing_s/save_checkpoint", "checkpoint|save s", f"{_SECONDS} checkpoint save model checkpointing"),
    _meaning("perf/max_memory_allocated_gb", "memory max|peak gb", f"{_DEVICE} allocated"),
    _meaning("perf/max_memory_reserved_gb", "memory reserved gb", f"{_DEVICE} max peak"),
    _meaning("perf/max_memory_allocated_gb", "max|peak allocated gb", _DEVICE),
    _meaning("perf/max_memory_allocated_gb", "memory allocated gb", _DEVICE, rank=1),
    _meaning("perf/max_memory_reserved_gb", "max|peak reserved gb", _DEVICE),
    _meaning("training/rollout_probs_diff_mean", "rollout|engine train prob diff mean", ""),
    _meaning("training/rollout_probs_diff_max", "rollout|engine train prob diff max", ""),
    _meaning("training/logprob_gap/mean", "rollout|engine train logprob diff", "mean"),
    _meaning("training/rollout_actor_probs_pearson_corr", "rollout|engine train prob correlation", "logprob"),
    _meaning("rollout_corr/kl", "rollout|engine train kl", "mean"),
    _meaning("rollout_corr/kl", "kl mismatch|error", f"{_PLAIN} engine gen", rank=1),
    _meaning("training/logprob_gap/mean", "token mult prob error", "train mean", rank=1),
    _meaning("training/logprob_gap/mean", "logprob mismatch|error", f"{_PLAIN} engine gen token", rank=1),
    _meaning("training/off_policy/trajectory_staleness/mean", "staleness", "mean policy step sample train rollout"),
    _meaning("training/off_policy/trajectory_staleness/max", "staleness max", "policy step sample train rollout"),
    _meaning("training/off_policy/trajectory_staleness/mean", "off policy level", "mean all train rollout"),
    _meaning("training/off_policy/trajectory_staleness/max", "off policy level max", "all train rollout"),
    _meaning("batch/effective_frac", "zero|no std|signal ratio", "group reward", rank=0),
    _meaning("batch/effective_frac", "effective ratio", "signal group", rank=1),
)  # fmt: skip


IN_WORDS = {
    "critic/rewards/mean": "the reward", "critic/rewards/max": "the best reward",
    "critic/rewards/min": "the worst reward", "val/all/reward": "the held-out reward",
    "response_length/mean": "the length of the answers", "response_length/max": "the longest answer",
    "response_length/min": "the shortest answer", "response_length/clip_ratio": "the share of answers cut off",
    "actor/grad_norm": "the gradient norm", "actor/entropy": "the entropy", "actor/kl_loss": "the KL to the reference",
    "actor/ppo_kl": "the KL of a step", "actor/pg_clipfrac": "the clipped share", "actor/pg_loss": "the policy's loss",
    "actor/loss": "the loss", "actor/lr": "the learning rate", "timing_s/step": "the seconds of a step",
    "timing_s/gen": "those of generation", "timing_s/update_actor": "those of the update",
    "timing_s/update_weights": "those of the weight sync", "timing_s/old_log_prob": "those of the old logprobs",
    "timing_s/ref": "those of the reference", "timing_s/adv": "those of the advantages",
    "timing_s/reward": "those of scoring", "timing_s/testing": "those of "
    "validation", "timing_s/save_checkpoint": "those of saving", "perf/max_memory_allocated_gb": "the memory in use",
    "perf/max_memory_reserved_gb": "the memory reserved",
    "training/rollout_probs_diff_mean": "the mean gap of probabilities",
    "training/rollout_probs_diff_max": "the largest gap of probabilities",
    "training/logprob_gap/mean": "the gap of logprobs",
    "training/rollout_actor_probs_pearson_corr": "the correlation of engine and trainer",
    "rollout_corr/kl": "the KL of engine and trainer",
    "training/off_policy/trajectory_staleness/mean": "the staleness",
    "training/off_policy/trajectory_staleness/max": "the largest staleness",
    "batch/effective_frac": "the share of groups that differ", "critic/advantages/mean": "the mean advantage",
    "critic/advantages/max": "the largest advantage", "critic/advantages/min": "the smallest advantage",
}  # fmt: skip
"""What is meant, in words: a diagnosis shows the names of the log."""

RESULTS = frozenset(IN_WORDS) - {
    "actor/lr", "response_length/max", "response_length/min", "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb", "actor/pg_clipfrac",
}  # fmt: skip
"""What only a run can tell: a config holds learning rates, limits and clips as well."""


def word_set(text: str) -> frozenset[str]:
    """Of words with blanks between them."""
    return frozenset(text.split())


def pieces_in(name: str) -> list[str]:
    """The words of a name in their order, in small letters.

    >>> pieces_in("env/numTurns@4")
    ['env', 'num', 'turns', '@', '4']
    """
    return [piece.lower() for piece in _PIECE.findall(name)]


@lru_cache(maxsize=4096)
def pieces_of(name: str) -> frozenset[str]:
    """The words of a name as they stand there, in small letters.

    >>> sorted(pieces_of("env/numTurns@4"))
    ['4', '@', 'env', 'num', 'turns']
    """
    return frozenset(pieces_in(name))


@lru_cache(maxsize=4096)
def words_of(name: str) -> frozenset[str]:
    """The words of a name, each as the one that stands for it.

    >>> sorted(words_of("Avg Response Len")), sorted(words_of("cuda_max_memory_allocated_gib"))
    (['length', 'mean', 'response'], ['allocated', 'cuda', 'gb', 'max', 'memory'])
    """
    found: list[str] = []
    for word in pieces_of(name):
        found += _SAME.get(word, word).split("_")
    words = frozenset(found) - _SAYS_NOTHING
    return words - {"log", "prob"} | {"logprob"} if words >= {"log", "prob"} else words


_IS_RATE = re.compile(r"(?:/|per[_ ]?)s(?:ec(?:ond)?)?$", re.IGNORECASE)
"""What is done in a second, where the same words the other way round are seconds."""


@lru_cache(maxsize=4096)
def meant(name: str) -> tuple[str, int] | None:
    """(metric of the catalogue, rank) that a name's words mean; None for none. Of names that mean the same the lowest
    rank stands.

    >>> [meant(n) for n in ("mean_reward", "train/accuracy", "t_rollout", "reward_std", "total_steps")]
    [('critic/rewards/mean', 0), ('critic/rewards/mean', 3), ('timing_s/gen', 0), None, None]
    """
    if _IS_RATE.search(name):
        return None
    words = set(words_of(name))
    if "t" in words and len(words) > 1:  # t_rollout
        words = (words - {"t"}) | {"s"}
    found: tuple[int, int, str] | None = None
    for meaning in _MEANINGS:
        if all(words & choices for choices in meaning.has):
            left = words - meaning.may_have - frozenset().union(*meaning.has)
            key = (-len(meaning.has), meaning.rank, meaning.metric)
            if not left and (found is None or key < found):
                found = key
    return (found[2], found[1]) if found is not None else None


def tells_a_run(name: str) -> bool:
    """Whether a name means one of `RESULTS`."""
    found = meant(name)
    return found is not None and found[0] in RESULTS


def is_share_of_nothing(name: str) -> bool:
    """Whether a name is the share of groups whose rewards do not differ: one minus the catalogue's share.

    >>> is_share_of_nothing("zero_var_ratio"), is_share_of_nothing("effective_signal_fraction")
    (True, False)
    """
    return bool(words_of(name) & {"zero", "no"})


@lru_cache(maxsize=4096)
def is_length(name: str) -> bool:
    """Whether a name is a length and does not say of what: beside a reward it is that of the answers.

    >>> [is_length(n) for n in ("len", "avg_len", "train/mean_length", "max_len", "episode_length", "prompt_len")]
    [True, True, True, False, False, False]
    """
    words = words_of(name)
    return "length" in words and words <= {"length", "mean", "token", "train", "rollout"}


def is_mean_of_exp(name: str) -> bool:
    """Whether a name is the mean of exp() of a gap of logprobs, as NeMo-RL logs it: its logarithm is the gap.

    >>> is_mean_of_exp("train/token_mult_prob_error"), is_mean_of_exp("train/logprob_error")
    (True, False)
    """
    return words_of(name) >= {"mult", "prob"}


_OF_PAIRS = frozenset({"chosen", "rejected", "reject", "margin", "margins", "accuracies"})


def is_of_pairs(name: str) -> bool:
    """Whether a name is a reward of preference training (DPO, KTO and their kin), where it is the policy's log ratio to
    its reference on an answer of the data, and no score: that of rejected answers is meant to fall below zero.

    >>> [is_of_pairs(n) for n in ("rewards/rejected", "eval_rewards/margins", "chosen_reward", "rewards/format/mean")]
    [True, True, True, False]
    """
    words = words_of(name)
    return "reward" in words and bool(words & _OF_PAIRS)


def are_of_a_reward_model(names: Iterable[str]) -> bool:
    """Whether names are those of the training of a reward model: how often and by how much the chosen answer of a pair
    scores higher, and nothing that was sampled.

    >>> pairs = ("loss", "mean_reward", "accuracy", "margin")
    >>> are_of_a_reward_model(pairs), are_of_a_reward_model((*pairs, "response_length"))
    (True, False)
    """
    words = [words_of(name) for name in names]
    told = frozenset[str]().union(*words)
    is_of_pairs = bool(told & {"margin", "margins"}) and "accuracy" in told and "loss" in told
    return is_of_pairs and not told & {
        "response",
        "completion",
        "length",
        "rollout",
        "gen",
        "kl",
        "clip",
        "policy",
    }


def source_of(name: str) -> str | None:
    """The source whose reward a name is: what stands before or after the word, if nothing else does.

    >>> [source_of(n) for n in ("mean_format_reward", "reward/code", "mean_reward", "reward_std")]
    ['format', 'code', None, None]
    """
    words = words_of(name)
    if "reward" not in words or is_of_pairs(name):
        return None
    left = words - {"reward", "mean", "train"}
    if len(left) != 1 or left & (_RUN | _NOT_SOURCES):
        return None
    return next(iter(left))


_HOW = r"(?:mean|avg|raw|task)_"
_FRAMES = (
    re.compile(rf"(?P<where>(?:\w+/)*)(?:{_HOW})?rewards?[_/.](?P<source>[\w.-]+?)(?:[_/](?:mean|avg))?"),
    re.compile(
        rf"(?P<where>(?:\w+/)*)(?!{_HOW})(?P<source>[\w.-]+?)[_/.](?:{_HOW})?rewards?(?:[_/](?:mean|avg))?"
    ),
    re.compile(r"(?P<where>(?:\w+/)*)(?:scores?|acc|accuracy)/(?P<source>[\w.-]+?)(?:/(?:mean|avg))?"),
)


def sources_in(names: Iterable[str]) -> dict[str, str]:
    """Name -> the source whose reward it is, of the names of one log. A source of several words is one where another
    name of the same frame is of a source, too.

    >>> sources_in(["rollout/reward_gsm8k_hard", "rollout/reward_code", "reward_function_s", "format_quality_reward"])
    {'rollout/reward_gsm8k_hard': 'gsm8k_hard', 'rollout/reward_code': 'code'}
    """
    found: dict[str, tuple[object, str]] = {}
    for name in names:
        if (by_source := _by_source(name)) is not None:
            found[name] = by_source
            continue
        if (source := source_of(name)) is not None:
            found[name] = (name, source)
        for frame in _FRAMES:
            if (match := frame.fullmatch(name)) is None or is_of_pairs(name):
                continue
            words = words_of(match["source"])
            if (
                words_of(match["where"]) <= _RUN | {"critic"}
                and 0 < len(words) <= 4
                and not words & (_RUN | _NOT_SOURCES)
            ):
                found[name] = ((frame, match["where"]), match["source"])
                break
    families = Counter(frame for frame, _ in found.values())
    return {
        name: source
        for name, (frame, source) in found.items()
        if families[frame] > 1 or len(words_of(source)) == 1
    }


_SOURCES = frozenset(
    {"source", "sources", "dataset", "datasets", "domain", "benchmark", "subset", "task", "env"}
)
_BY = frozenset({"by", "per", "data", "each"})
_OF_REWARDS = frozenset({"reward", "score", "accuracy"})
_BETWEEN = re.compile(r"[/.]")
_LAST_PART = re.compile(r"(.+)[/.]([^/.]+)")


def _by_source(name: str) -> tuple[object, str] | None:
    """(frame, source) of a reward whose name says that it is by source: `score_by_source/openai/gsm8k/mean`. The source
    may be of any words, and of several parts.

    >>> _by_source("critic/score_by_source/openai/gsm8k/mean"), _by_source("data_source.gpqa.score_mean")
    (('critic/score_by_source', 'openai/gsm8k'), ('data_source', 'gpqa'))
    >>> [_by_source(n) for n in ("val/acc_by_source/gpqa", "score_by_source/gpqa/std", "count_by_source/gpqa")]
    [None, None, None]
    """
    for between in _BETWEEN.finditer(name):
        frame, source = name[: between.start()], name[between.end() :]
        says = pieces_of(_BETWEEN.split(frame)[-1])
        if not says & _SOURCES or not says & (_BY | {"source", "dataset"}):
            continue
        told = words_of(frame) - _SOURCES - _BY
        while (parts := _LAST_PART.fullmatch(source)) and words_of(parts[2]) <= _OF_REWARDS | {
            "mean",
            "train",
        }:
            told |= words_of(parts[2])
            source = parts[1]
        is_reward = told & _OF_REWARDS and told <= _OF_REWARDS | _RUN | {"critic"}
        is_source = not words_of(_BETWEEN.split(source)[-1]) <= _NOT_SOURCES | _OF_REWARDS | _RUN
        return (frame, source) if is_reward and is_source else None
    return None


_NOT_SOURCES = frozenset(
    {"std", "max", "min", "median", "count", "sum", "eval", "s", "num", "n", "norm", "baseline", "used", "model", "val",
     "function", "funcs", "func", "scale", "weight", "weighted", "clip", "clipped", "zero", "p10", "p50", "p90", "p99",
     "ratio", "diff", "delta", "ema", "moving", "target", "best", "last", "first", "final", "non", "threshold", "loss",
     "kl", "entropy", "length", "penalty", "critic", "actor", "advantage", "return", "score", "accuracy", "running",
     "shaped", "scaled", "var", "cost", "bonus", "fail", "failed", "failure", "failures", "error", "errors", "timeout",
     "timeouts", "parse", "parsed", "empty", "missing", "call", "calls", "invalid", "rejected", "skipped", "truncated",
     "extracted", "none", "nan", "hack", "hacks"}
)  # fmt: skip
"""Words that make another number of a reward."""
