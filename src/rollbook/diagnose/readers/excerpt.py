"""What a log shows that is too short for any rule, or is no log of reinforcement learning at all: facts for a note,
never an alarm."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.readers.words import is_of_pairs
from rollbook.diagnose.series import RunSeries, Series, finite
from rollbook.observe.numbers import counted

FEW = 5
"""Steps up to which no level can be told from its noise."""
_REWARDS = ("critic/score/", "critic/rewards/", "reward/", "val/", "val-core/", "rollout/raw_reward")
_OF_ROLLOUTS = (
    "response_length/", "timing_s/gen", "rollout/", "rollout_corr/", "critic/", "num_turns/", "actor/pg_", "actor/ppo_",
    "actor/kl_loss", "training/off_policy/", "batch/",
)  # fmt: skip


def notes(run: RunSeries) -> list[str]:
    """Sentences for "about the log"."""
    return [says for says in (_no_rl(run), _few(run)) if says]


def _no_rl(run: RunSeries) -> str:
    """Supervised training: a loss, and nothing that was sampled or scored."""
    has_loss = "actor/loss" in run.values and np.isfinite(run.values["actor/loss"]).any()
    if not has_loss or any(name.startswith((*_REWARDS, *_OF_ROLLOUTS)) for name in run.values):
        return ""
    pairs = [name for name in run.values if name.startswith("preference/") or is_of_pairs(name)]
    if any(("reward" in name or "return" in name) and name not in pairs for name in run.values):
        return ""
    if pairs:
        return (
            "a log of preference training or of a reward model's, not of reinforcement learning: the rewards in it are "
            "log ratios to a reference or scores of given answers, and nothing was sampled; losses that are no numbers "
            "and errors are judged, nothing else can be"
        )
    return (
        "no log of reinforcement learning, as far as it shows: it has a loss, but no reward and nothing that was "
        "sampled; losses that are no numbers and errors are judged, nothing else can be"
    )


def _few(run: RunSeries) -> str:
    if run.num_steps > FEW or not run.values:
        return ""
    shown: list[str] = []
    for metric in ("critic/score/mean", "critic/rewards/mean"):
        if _is(run, metric, 0.0):
            shown.append(f"{metric} is 0")
            break
    sources = [m for m in run.matching("reward/", "/mean") if _is(run, m, 0.0)]
    if sources and not shown:
        shown.append(f"{', '.join(sources[:3])} {'is' if len(sources) == 1 else 'are'} 0")
    if _is(run, "batch/effective_frac", 0.0):
        shown.append("no group has two different rewards")
    elif _is(run, "reward_std", 0.0):
        shown.append("reward_std is 0: the rewards of a group do not differ")
    if _is(run, "actor/grad_norm", 0.0):
        shown.append("actor/grad_norm is 0: nothing is learned")
    cut = _known(run, "response_length/clip_ratio")
    if cut is not None and cut.min() >= 0.5:
        least = f"{cut.min():.0%}" + " or more" * bool(cut.max() > cut.min())
        part = "all" if cut.min() >= 0.995 else least
        shown.append(f"{part} of the answers are cut off at the limit")
    shown += _far_from_the_sampler(run)
    if not shown:
        return ""
    where = "the step" if run.num_steps == 1 else f"all {run.num_steps} steps"
    return f"{counted(run.num_steps, 'step')}: too few to judge, but in {where} {'; '.join(shown)}"


FAR_NATS = 0.1
"""KL of a step from which on its logprobs are not those of the policy that sampled: ten times what a bold one has."""
NEAR_ONE = (0.5, 2.0)
"""Where the mean ratio of new and old policy lies in any update that changes little."""


def _far_from_the_sampler(run: RunSeries) -> list[str]:
    """Distances of the policy to itself at the start of the step that no update brings about."""
    shown = []
    kl = _known(run, "actor/ppo_kl")
    if kl is not None and np.abs(kl).min() >= FAR_NATS:
        shown.append(f"actor/ppo_kl is {kl[0]:.3g} nats: the old logprobs are not this policy's")
    ratio = _known(run, "val/ratio")
    if ratio is not None and ((ratio < NEAR_ONE[0]) | (ratio > NEAR_ONE[1])).all():
        shown.append(f"val/ratio, of new and old policy, is {ratio[0]:.3g} and not near 1")
    return shown


def _known(run: RunSeries, metric: str) -> Series | None:
    values = run.values.get(metric)
    known = finite(values) if values is not None else None
    return known if known is not None and len(known) else None


def _is(run: RunSeries, metric: str, level: float) -> bool:
    known = _known(run, metric)
    return known is not None and len(known) == run.num_steps and bool((known == level).all())
