"""Which responses show the gap between trainer and engines of a step whose whole batch is stale."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollbook.algos.config import AlgorithmConfig
from rollbook.buffer.buffer import Taken
from rollbook.controller.gap import MAX_FRESH, fresh_scorer, gap_values
from rollbook.observe.values import Values
from rollbook.types import (
    FinishReason,
    Group,
    Prompt,
    TrainBatch,
    TrainSequence,
    Trajectory,
    Turn,
    VersionRun,
)

SERVED = 3
"""The version that the engines hold, and the step that trains on it."""


def sequence(version: int, *, proximal: float | None = None) -> TrainSequence:
    mask = np.array([False, True])
    logprobs = np.array([0, -1], np.float32)
    return TrainSequence(
        group_id=0,
        member_idx=0,
        source="s",
        token_ids=np.array([1, 2], np.int32),
        action_mask=mask,
        loss_mask=mask.copy(),
        behavior_logprobs=logprobs,
        reward=1.0,
        oldest_version=version,
        proximal_logprobs=None if proximal is None else logprobs + np.float32(proximal) * mask,
    )


def group(group_id: int, version: int) -> Group:
    prompt = Prompt(prompt_id=str(group_id), source="s", prompt_ids=np.array([1], np.int32))
    turn = Turn(
        response_ids=np.array([2], np.int32),
        behavior_logprobs=np.array([-1], np.float32),
        version_runs=(VersionRun(version, 1),),
        finish_reason=FinishReason.STOP,
    )
    members = (Trajectory(group_id=group_id, member_idx=0, prompt=prompt, turns=(turn,), reward=1.0),)
    return Group(group_id=group_id, prompt=prompt, trajectories=members)


def controller(**changed: Any) -> Any:
    """The parts that the gap is made of; the trainer gives -1.5 for every token."""
    filled: list[TrainBatch] = []

    def make_batch(sequences: list[TrainSequence], *, step: int, weight_version: int) -> TrainBatch:
        return TrainBatch(step=step, weight_version=weight_version, sequences=sequences, mini_batches=[])

    def fill_proximal(batch: TrainBatch) -> Values:
        filled.append(batch)
        for each in batch.sequences:
            each.proximal_logprobs = np.where(each.action_mask, np.float32(-1.5), np.float32(0))
        return {}

    parts = {
        "config": SimpleNamespace(
            cluster=SimpleNamespace(kind=changed.get("kind", "inproc")), algorithm=AlgorithmConfig()
        ),
        "schedule": SimpleNamespace(pauses_for_training=changed.get("pauses", False)),
        "rollout": SimpleNamespace(
            buffer=SimpleNamespace(
                serving_step=changed.get("serving_step", SERVED),
                finished=lambda: iter(changed.get("finished", [])),
            )
        ),
        "trainer": SimpleNamespace(make_batch=make_batch, fill_proximal=fill_proximal),
        "needs_proximal": changed.get("needs_proximal", True),
        "filled": filled,
    }
    return SimpleNamespace(**parts)


def batch_of(*versions: int) -> tuple[TrainBatch, Taken]:
    """Of step `SERVED`, a version a step."""
    taken = Taken([], [], [], 0, [], [], step=SERVED, version_steps={v: v for v in range(SERVED + 1)})
    sequences = [sequence(version) for version in versions]
    return TrainBatch(step=SERVED, weight_version=SERVED, sequences=sequences, mini_batches=[]), taken


async def scored(parts: Any, *versions: int) -> list[TrainSequence] | None:
    fresh: list[TrainSequence] = []
    score = fresh_scorer(parts, *batch_of(*versions), fresh)
    if score is None:
        return None
    await asyncio.to_thread(score)
    return fresh


@pytest.mark.parametrize(
    ("versions", "changed"),
    [((2, SERVED), {}), ((2,), {"pauses": True}), ((2,), {"kind": "ray"})],
    ids=["batch_has_some", "engines_pause", "trainer_elsewhere"],
)
async def test_nothing_is_scored_beside_a_batch_that_shows_the_gap_or_where_it_cannot_be(
    versions: tuple[int, ...], changed: dict[str, Any]
) -> None:
    assert await scored(controller(**changed, finished=[group(1, SERVED)]), *versions) is None


async def test_only_what_the_trainers_own_version_sampled_is_scored_and_few_of_it() -> None:
    finished = [group(i, SERVED - i % 2) for i in range(4 * MAX_FRESH)]
    parts = controller(finished=finished)
    fresh = await scored(parts, 1, 2)
    assert fresh is not None and len(fresh) == MAX_FRESH
    assert {each.oldest_version for each in fresh} == {SERVED}
    assert all(each.proximal_logprobs is not None for each in fresh)
    assert [(b.step, b.weight_version) for b in parts.filled] == [(SERVED, SERVED)]


@pytest.mark.parametrize(
    "changed", [{"serving_step": SERVED - 1}, {"finished": []}], ids=["moved_on", "none"]
)
async def test_where_no_response_is_of_the_trainers_weights_none_is_scored(changed: dict[str, Any]) -> None:
    parts = controller(**{"finished": [group(1, SERVED)], **changed})
    assert await scored(parts, 2) == [] and not parts.filled


@pytest.mark.parametrize("needs_proximal", [True, False])
def test_the_mismatch_is_reported_here_where_nothing_before_the_updates_reported_it(
    needs_proximal: bool,
) -> None:
    """Sequences that no forward gave the trainer's logprobs are left out of both."""
    batch, taken = batch_of()
    batch.sequences = [sequence(2, proximal=0.5), sequence(1)]
    values = gap_values(controller(needs_proximal=needs_proximal), batch, taken)
    assert any(name.startswith("rollout_corr/") for name in values) is not needs_proximal
    assert values["training/logprob_gap_by_staleness/1/mean"].result() == pytest.approx(0.5)
    assert not any(name.startswith("training/logprob_gap_by_staleness/2") for name in values)
