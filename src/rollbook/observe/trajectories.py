"""Trajectories of a step as one Parquet file: one row each, as sampled, readable without this package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.errors import RunError
from rollbook.observe.run_dir import written_aside
from rollbook.types import (
    Bools,
    Failure,
    FailureKind,
    FinishReason,
    KVStart,
    Prompt,
    Trajectory,
    Turn,
    VersionRun,
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.int64()),
        ("member_idx", pa.int32()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("task", pa.string()),  # JSON
        ("replica_id", pa.int32()),
        ("started_at_s", pa.float64()),
        ("finished_at_s", pa.float64()),
        ("num_prompt_tokens", pa.int32()),
        # Prompt, then response and observation of each turn; the four lists below are as long as each other.
        ("token_ids", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("loss_mask", pa.list_(pa.bool_())),  # null where none was given
        ("behavior_logprobs", pa.list_(pa.float32())),  # 0 where not action
        (
            "turns",
            pa.list_(
                pa.struct(
                    [
                        ("num_response_tokens", pa.int32()),
                        ("num_observation_tokens", pa.int32()),
                        ("finish_reason", pa.string()),
                        (
                            "version_runs",
                            pa.list_(pa.struct([("weight_version", pa.int64()), ("num_tokens", pa.int32())])),
                        ),
                        (  # where keys and values were computed anew
                            "kv_starts",
                            pa.list_(pa.struct([("token_idx", pa.int32()), ("weight_version", pa.int64())])),
                        ),
                    ]
                )
            ),
        ),
        ("was_cut_off", pa.bool_()),  # by its turns or the model's context
        ("reward", pa.float64()),  # null: no reward, which is not a reward of 0
        ("reward_terms", pa.map_(pa.string(), pa.float64())),
        ("failure_kind", pa.string()),
        ("failure_message", pa.string()),
        ("failure_turn_idx", pa.int32()),
    ]
)


def write_trajectories(
    path: Path, step: int, trajectories: Sequence[Trajectory], loss_masks: Mapping[str, Bools]
) -> None:
    """Write all of them or nothing. Raises RunError when the disk is full."""
    rows = [_row(step, t, loss_masks.get(t.trajectory_id)) for t in trajectories]
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in SCHEMA]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    with written_aside(path) as aside:
        pq.write_table(table, aside, compression="zstd")


def _row(step: int, t: Trajectory, loss_mask: Bools | None) -> dict[str, Any]:
    turns = [
        {
            "num_response_tokens": len(turn.response_ids),
            "num_observation_tokens": len(turn.observation_ids),
            "finish_reason": str(turn.finish_reason),
            "version_runs": [
                {"weight_version": run.weight_version, "num_tokens": run.num_tokens}
                for run in turn.version_runs
            ],
            "kv_starts": [
                {"token_idx": start.token_idx, "weight_version": start.weight_version}
                for start in turn.kv_starts
            ],
        }
        for turn in t.turns
    ]
    return {
        "step": step,
        "group_id": t.group_id,
        "member_idx": t.member_idx,
        "prompt_id": t.prompt.prompt_id,
        "source": t.prompt.source,
        "task": json.dumps(dict(t.prompt.task), ensure_ascii=False, default=str),
        "replica_id": t.replica_id,
        "started_at_s": t.started_at_s,
        "finished_at_s": t.finished_at_s,
        "num_prompt_tokens": len(t.prompt.prompt_ids),
        "token_ids": t.token_ids(),
        "action_mask": t.action_mask(),
        "loss_mask": loss_mask,
        "behavior_logprobs": t.behavior_logprobs(),
        "turns": turns,
        "was_cut_off": t.was_cut_off,
        "reward": t.reward,
        "reward_terms": list(t.reward_terms.items()),
        "failure_kind": str(t.failure.kind) if t.failure else None,
        "failure_message": t.failure.message if t.failure else None,
        "failure_turn_idx": t.failure.turn_idx if t.failure else None,
    }


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of one step, equal to what was written. Raises RunError where there is none to read."""
    return [_trajectory(row) for row in _read(path).to_pylist()]


def read_loss_masks(path: Path) -> dict[str, Bools]:
    """Trajectory id -> [n] bool over its token ids, for the trajectories that were given one."""
    rows = _read(path, ["group_id", "member_idx", "loss_mask"]).to_pylist()
    return {
        f"{row['group_id']}/{row['member_idx']}": np.asarray(row["loss_mask"], np.bool_)
        for row in rows
        if row["loss_mask"] is not None
    }


def _read(path: Path, columns: list[str] | None = None) -> Any:
    if not path.exists():
        raise RunError(
            f"there is no trajectory file {path}", "check the step; `trajectories/` lists those written"
        )
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise RunError(
            f"{path} is not a readable Parquet file: {error}", "it is damaged; use another step"
        ) from error


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    token_ids = np.asarray(row["token_ids"], np.int32)
    logprobs = np.asarray(row["behavior_logprobs"], np.float32)
    position = row["num_prompt_tokens"]
    prompt_ids = token_ids[:position]
    turns = []
    for turn in row["turns"]:
        response_end = position + turn["num_response_tokens"]
        end = response_end + turn["num_observation_tokens"]
        turns.append(
            Turn(
                response_ids=token_ids[position:response_end],
                behavior_logprobs=logprobs[position:response_end],
                version_runs=tuple(
                    VersionRun(r["weight_version"], r["num_tokens"]) for r in turn["version_runs"]
                ),
                finish_reason=FinishReason(turn["finish_reason"]),
                observation_ids=token_ids[response_end:end],
                kv_starts=tuple(
                    KVStart(s["token_idx"], s["weight_version"]) for s in turn.get("kv_starts") or ()
                ),
            )
        )
        position = end
    failure = None
    if row["failure_kind"] is not None:
        failure = Failure(
            kind=FailureKind(row["failure_kind"]),
            message=row["failure_message"],
            turn_idx=row["failure_turn_idx"],
        )
    return Trajectory(
        group_id=row["group_id"],
        member_idx=row["member_idx"],
        prompt=Prompt(
            prompt_id=row["prompt_id"],
            prompt_ids=prompt_ids,
            source=row["source"],
            task=json.loads(row["task"]),
        ),
        turns=tuple(turns),
        reward=row["reward"],
        reward_terms=dict(row["reward_terms"]),
        failure=failure,
        replica_id=row["replica_id"],
        was_cut_off=bool(row.get("was_cut_off")),
        started_at_s=row["started_at_s"],
        finished_at_s=row["finished_at_s"],
    )
