"""Trajectories come back from their Parquet file as they were sampled."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import RunError
from rollbook.observe.trajectories import read_loss_masks, read_trajectories, write_trajectories
from rollbook.types import Failure, FailureKind, FinishReason, Prompt, Trajectory, Turn, VersionRun

ids = st.integers(0, 2**31 - 1)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    run_lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    num_tokens = sum(run_lengths)
    return Turn(
        response_ids=np.array(draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens)), np.int32),
        behavior_logprobs=np.array(
            draw(st.lists(st.floats(-50, 0, width=32), min_size=num_tokens, max_size=num_tokens)), np.float32
        ),
        version_runs=tuple(VersionRun(version, length) for version, length in enumerate(run_lengths)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        observation_ids=np.array(draw(st.lists(ids, max_size=3)), np.int32),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    failed = draw(st.booleans())
    return Trajectory(
        group_id=draw(st.integers(0, 2**40)),
        member_idx=draw(st.integers(0, 100)),
        prompt=Prompt(
            prompt_id=draw(st.text(max_size=5)),
            prompt_ids=np.array(draw(st.lists(ids, min_size=1, max_size=4)), np.int32),
            source="add",
            task=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
        ),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        reward=None if failed else draw(st.floats(-1, 1)),
        reward_terms=draw(st.dictionaries(st.text(max_size=3), st.floats(-1, 1), max_size=2)),
        failure=Failure(kind=draw(st.sampled_from(FailureKind)), message="gone", turn_idx=1)
        if failed
        else None,
        replica_id=draw(st.integers(0, 8)),
        was_cut_off=draw(st.booleans()),
        started_at_s=1.5,
        finished_at_s=2.5,
    )


def same(a: Trajectory, b: Trajectory) -> bool:
    return (
        (a.group_id, a.member_idx, a.reward, a.reward_terms, a.failure, a.replica_id, a.started_at_s)
        == (b.group_id, b.member_idx, b.reward, b.reward_terms, b.failure, b.replica_id, b.started_at_s)
        and (a.was_cut_off, a.is_truncated) == (b.was_cut_off, b.is_truncated)
        and (a.prompt.prompt_id, a.prompt.source, a.prompt.task)
        == (b.prompt.prompt_id, b.prompt.source, b.prompt.task)
        and np.array_equal(a.token_ids(), b.token_ids())
        and np.array_equal(a.action_mask(), b.action_mask())
        and np.array_equal(a.behavior_logprobs(), b.behavior_logprobs())
        and [(t.version_runs, t.finish_reason, len(t.observation_ids)) for t in a.turns]
        == [(t.version_runs, t.finish_reason, len(t.observation_ids)) for t in b.turns]
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(trajectories(), max_size=4))
def test_written_trajectories_read_back_equal(written: list[Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_3.parquet"
        write_trajectories(path, 3, written, {})
        read = read_trajectories(path)
        assert len(read) == len(written)
        assert all(same(a, b) for a, b in zip(written, read, strict=True))


def test_masks_stand_beside_the_tokens_and_absent_ones_are_null(tmp_path: Path) -> None:
    turn = Turn(
        response_ids=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.5, -1.0], np.float32),
        version_runs=(VersionRun(3, 1), VersionRun(4, 1)),
        finish_reason=FinishReason.STOP,
    )
    prompt = Prompt(prompt_id="p", prompt_ids=np.array([1, 2], np.int32), source="add")
    members = [Trajectory(group_id=5, member_idx=i, prompt=prompt, turns=(turn,), reward=1.0) for i in (0, 1)]
    path = tmp_path / "step_0.parquet"
    write_trajectories(path, 0, members, {"5/1": np.array([False, False, True, False])})
    rows = pq.read_table(path).to_pylist()
    assert rows[0]["action_mask"] == [False, False, True, True]
    assert rows[0]["behavior_logprobs"] == [0.0, 0.0, -0.5, -1.0]
    assert rows[0]["turns"][0]["version_runs"] == [
        {"weight_version": 3, "num_tokens": 1},
        {"weight_version": 4, "num_tokens": 1},
    ]
    assert (rows[0]["loss_mask"], rows[1]["loss_mask"]) == (None, [False, False, True, False])
    assert {k: v.tolist() for k, v in read_loss_masks(path).items()} == {"5/1": [False, False, True, False]}


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no trajectory file"):
        read_trajectories(tmp_path / "step_9.parquet")
    (tmp_path / "step_1.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(RunError, match="not a readable Parquet file"):
        read_trajectories(tmp_path / "step_1.parquet")
