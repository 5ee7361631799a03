"""What is checked before the first step, so that a run does not find it out at two in the morning.

1. The scorer gives full marks to its own reference answers, and not to wrong ones.
2. One trajectory went all the way: prompt, engine, environment, score. Some may fail before it; that is a note.
3. One publication was proven on every replica, and the probe's logprobs agree with the trainer's.
4. The four signals of the decision tree are wired: reward by source, version per replica, gap, seconds of the
   weight sync. A signal that nobody reports cannot wake anybody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollbook.controller.rollout import Member, Rollout
from rollbook.envs.rewards.scorer import Scorer
from rollbook.envs.rewards.self_test import require_proven, self_test
from rollbook.errors import ConfigError, RunError
from rollbook.observe.recorder import Recorder
from rollbook.sync.report import PublicationReport
from rollbook.types import Failure, Group, Prompt, Trajectory

NUM_TRIALS = 4
"""Trajectories that may be tried until one does not fail: a scorer may raise on some responses only."""
TRIAL_GROUP = -1


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was proven, and what could not be."""

    notes: tuple[str, ...]
    """A sentence for each thing that is not proven."""
    trajectory: Trajectory


async def preflight(
    *,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    num_self_test_prompts: int,
    rollout: Rollout,
    recorder: Recorder,
    deadline_s: float,
    versions: Mapping[int, int],
    publication: PublicationReport,
) -> Preflight:
    """Run the checks; the publication was made before, by the same call that every step makes.

    Args:
        versions: replica -> the weight version that it reports, of those in service.
        publication: what that publication did.
    Raises:
        ConfigError: a signal is not wired; the scorer fails its own reference answers, or judges nothing of a data
            source; the filters ask for a reward term that it does not give.
        RunError: every trial trajectory failed; the message is the first failure.
    """
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.source not in by_source and not any(term.applies_to(prompt) for term in scorer.terms):
            raise ConfigError(
                f"no reward term applies to data source {prompt.source!r} (prompt {prompt.prompt_id})",
                "add it to the sources of a term in reward.terms, or leave those empty",
            )
        held = by_source.setdefault(prompt.source, [])
        if len(held) < num_self_test_prompts:
            held.append(prompt)
    chosen = [prompt for held in by_source.values() for prompt in held]
    notes = require_proven(await self_test(scorer, chosen)) if chosen else ["reward.self_test_prompts is 0"]
    trajectory, failures = await _trial(rollout, prompts, deadline_s)
    if failures:
        notes.append(
            f"{len(failures)} of {len(failures) + 1} trial trajectories failed, the first as {failures[0].kind}: "
            f"{failures[0].message}"
        )
    group = Group(group_id=TRIAL_GROUP, prompt=trajectory.prompt, trajectories=(trajectory,))
    rollout.shape(group)
    rollout.drop_reason(group)  # raises where the filters ask for a reward term that is not given
    recorder.event(
        "preflight",
        signals=wired_signals(trajectory, versions, publication),
        notes=notes,
        trial_reward=trajectory.reward,
        trial_response_tokens=trajectory.num_response_tokens,
    )
    return Preflight(tuple(notes), trajectory)


async def _trial(
    rollout: Rollout, prompts: Sequence[Prompt], deadline_s: float
) -> tuple[Trajectory, list[Failure]]:
    """The first trajectory that does not fail, of a few, and the failures before it."""
    failures: list[Failure] = []
    for member_idx in range(NUM_TRIALS):
        trial = Member(group_id=TRIAL_GROUP, member_idx=member_idx, prompt=prompts[member_idx % len(prompts)])
        try:
            async with asyncio.timeout(deadline_s):
                trajectory = await rollout.produce(trial)
        except TimeoutError:
            raise ConfigError(
                f"the trial trajectory of preflight took longer than {deadline_s:g} s",
                "look at the engine and the environment; raise buffer.group_deadline_s if this is expected",
            ) from None
        if trajectory.failure is None:
            return trajectory, failures
        failures.append(trajectory.failure)
    kinds = " and ".join(sorted({str(failure.kind) for failure in failures}))
    raise RunError(
        f"all {NUM_TRIALS} trial trajectories of preflight failed as {kinds}, the first with: {failures[0].message}",
        "mend this before training: trajectories would go on to fail the same way",
    )


def wired_signals(
    trajectory: Trajectory, versions: Mapping[int, int], publication: PublicationReport
) -> list[str]:
    """Each of the four signals with its first reading.

    Raises:
        ConfigError: one is not reported.
    """
    source, reward = trajectory.prompt.source, trajectory.reward
    if not source or reward is None or not math.isfinite(reward):
        raise ConfigError(
            f"the signal 'reward by source' is not wired: the trial's reward is {reward} and its source {source!r}",
            "give the data source a name and its scorer a finite value",
        )
    wrong = {who: version for who, version in versions.items() if version != publication.weight_version}
    if wrong or not versions:
        raise ConfigError(
            f"the signal 'weight version per replica' is not wired: {wrong or 'no replica'} reported where version "
            f"{publication.weight_version} was proven",
            "the engine must report the version it serves (`Engine.stats`)",
        )
    num_tokens = trajectory.num_response_tokens
    num_finite = sum(int(np.isfinite(turn.behavior_logprobs).sum()) for turn in trajectory.turns)
    if num_finite < max(num_tokens, 1):
        raise ConfigError(
            f"the signal 'logprob gap' is not wired: {num_tokens - num_finite} of {num_tokens} tokens of the trial "
            "came without a finite logprob",
            "the engine must report the logprob of each token that it samples",
        )
    if not publication.total_s > 0:
        raise ConfigError(
            f"the signal 'seconds of the weight sync' is not wired: the publication took {publication.total_s} s",
            "the publisher's clock stands still",
        )
    total = sum(float(turn.behavior_logprobs.sum()) for turn in trajectory.turns)
    return [
        f"reward by source: {source} {reward:g}",
        f"weight version per replica: {', '.join(f'{who} has {v}' for who, v in sorted(versions.items()))}",
        f"logprob gap: {num_tokens} logprobs, mean {total / num_tokens:.3g}",
        f"seconds of the weight sync: {publication.total_s:.3g}",
    ]
