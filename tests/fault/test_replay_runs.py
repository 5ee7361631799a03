"""A run repeats from its own log bit for bit, whatever its schedule, and what was changed in the log is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lending_faults import HoldsUntilLent
from rollbook.cli.main import main
from rollbook.controller.replay import replay_run
from rollbook.controller.replay_log import Threads
from rollbook.controller.replay_report import ReplayReport
from rollbook.errors import ConfigError
from rollbook.rollout.native.scheduler import Scheduler
from rollbook.trainer.trainer import Trainer
from tiny_run import RunResult, resume_tiny, run_tiny

EXACT = {"rollout.batch_invariant": True}
ASYNC = {
    **EXACT,
    "run.schedule": "separate_async",
    "buffer.max_staleness_steps": 2,
    "rollout.max_response_tokens": 16,
}


def test_a_synchronous_run_repeats(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=4, **EXACT)
    report = replay_run(run.folder)
    assert report.is_equal, report.differences
    assert (report.num_steps, report.num_digests) == (4, 5)  # the first publication and one a step
    assert report.num_trajectories == 4 * 4 * 2
    assert report.num_tokens == sum(
        sum(r["action_mask"]) for step in range(4) for r in run.trajectories(step)
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rollout.num_replicas": 2},
        {"rollout.kv_policy": "recompute"},
        {"sync.every_steps": 2},
        {"buffer.order": "arrival", "buffer.when_stale": "drop"},
        {"algorithm.filter.drop_flat": True, "algorithm.filter.refill": True, "trainer.lr": 1e-3},
        {"run.schedule": "colocate_async"},
        {"run.schedule": "colocate_async", "rollout.pause_mode": "abort"},
        {"trainer.num_mini_batches": 2, "trainer.shuffle": True},
        {"sync.quantize": "int8"},
    ],
    ids=[
        "plain",
        "replicas",
        "recompute",
        "every_2",
        "arrival",
        "filter",
        "colocated",
        "abort",
        "mini_batches",
        "quantized",
    ],
)
def test_an_asynchronous_run_repeats_from_its_log(more: dict[str, Any], tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=6, **{**ASYNC, **more})
    report = replay_run(run.folder)
    assert report.is_equal, report.differences
    assert report.num_digests == len(run.events_of("publication"))
    assert report.num_trajectories == sum(len(run.trajectories(step)) for step in range(6))


def test_responses_that_a_publication_cut_are_among_them(tmp_path: Path) -> None:
    """Colocated, the pause of a step comes while responses are half done."""
    run = run_tiny(tmp_path, num_steps=6, **{**ASYNC, "run.schedule": "colocate_async"})
    report = replay_run(run.folder)
    assert report.num_cut > 0
    assert report.is_equal, report.differences


def test_a_run_with_a_warm_up_and_one_that_was_taken_up_again_repeat(tmp_path: Path) -> None:
    warm = {"warmup.num_updates": 2, "warmup.check_every_updates": 1, "warmup.batch_sequences": 8}
    run = run_tiny(tmp_path, num_steps=2, **{**EXACT, **warm})
    resumed = resume_tiny(run, **{"run.num_steps": 4})
    report = replay_run(resumed.folder)
    assert report.is_equal, report.differences
    assert report.num_steps == 4


def _rows(run: RunResult, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = run.folder / "trajectories" / f"step_{step}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def _flip_token(rows: list[dict[str, Any]]) -> None:
    ids = rows[0]["token_ids"]
    ids[-1] = 8 if ids[-1] != 8 else 9


def _nudge_logprob(rows: list[dict[str, Any]]) -> None:
    rows[0]["behavior_logprobs"][-1] *= 1 + 2e-7  # an ulp or two of float32


def _raise_reward(rows: list[dict[str, Any]]) -> None:
    rows[0]["reward"] += 0.25


@pytest.mark.parametrize(
    ("change", "kind"), [(_flip_token, "token"), (_nudge_logprob, "logprob"), (_raise_reward, "reward")]
)
def test_one_changed_number_in_the_log_is_named_with_its_place(
    change: Callable[[list[dict[str, Any]]], None], kind: str, tmp_path: Path
) -> None:
    run = run_tiny(tmp_path, num_steps=3, **EXACT)
    first = run.trajectories(1)[0]
    _rows(run, 1, change)
    report = replay_run(run.folder)
    named = [d for d in report.differences if d.kind == kind]
    assert named and named[0].step == 1
    assert f"trajectory {first['group_id']}/{first['member_idx']}" in named[0].where
    if kind != "reward":
        assert named[0].where.endswith(f"token {len(first['token_ids']) - 1}")


def test_a_changed_digest_is_named_and_the_command_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_tiny(tmp_path, num_steps=3, **EXACT)
    path = run.folder / "events.jsonl"
    events = run.events
    changed = next(e for e in events if e["kind"] == "publication" and e.get("step") == 1)
    changed["digest"] = "0" * 32
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.folder), "--json"])
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert ended.value.code == 1
    assert [(d["kind"], d["step"]) for d in printed["differences"]] == [("digest", 1)]
    assert printed["differences"][0]["where"] == f"weights of version {changed['weight_version']}"


def test_one_step_alone_is_sampled_again(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=4, **EXACT)
    _rows(run, 0, _flip_token)  # its updates count all the same: the weights differ from then on
    report = replay_run(run.folder, only_step=2)
    assert report.num_trajectories == len(run.trajectories(2))
    assert report.num_steps == 3
    with pytest.raises(ConfigError, match="has steps 0 to 3"):
        replay_run(run.folder, only_step=4)


def test_without_invariant_numerics_the_report_says_why_bits_may_differ(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=2)
    assert "rollout.batch_invariant is false" in replay_run(run.folder).notes[0]


def test_bits_that_differ_for_want_of_invariant_numerics_are_explained_where_the_reader_looks_last() -> None:
    report = ReplayReport(run_dir="runs/reverse", num_digests=2, is_batch_invariant=False)
    for idx in range(30):
        report.differs("logprob", 3, f"trajectory {idx}/0, token 7", -0.25, -0.25000003)
    report.logprob_gap_nats = 3e-8
    said = report.conclusion()
    assert said.startswith("NOT EQUAL: 30 differences (30 logprob), the first above")
    assert (
        "Tokens, rewards, versions and digests are all equal; logprobs differ by at most 3.0e-08 nats" in said
    )
    assert "rollout.batch_invariant = true" in said.splitlines()[-1]
    report.differs("token", 3, "trajectory 31/0, token 7", 4, 5)
    assert "all equal" not in report.conclusion()


def test_a_run_whose_trajectories_were_not_all_kept_is_refused(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=2, **{"observe.trajectories_every_steps": 2})
    with pytest.raises(ConfigError, match="trajectories_every_steps"):
        replay_run(run.folder)


def test_a_run_of_another_engine_is_refused(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=1)
    path = run.folder / "config.toml"
    path.write_text(path.read_text().replace('engine = "native"', 'engine = "vllm"'))
    with pytest.raises(ConfigError, match="rollout.engine of .* is 'vllm'"):
        replay_run(run.folder)


def test_sums_of_several_ranks_are_named_where_the_reader_looks_last() -> None:
    report = ReplayReport(run_dir="runs/reverse", num_trainer_ranks=2)
    assert report.conclusion() == "EQUAL, bit for bit"
    report.differs("digest", 3, "weights of version 4", "a", "b")
    assert "divided among 2 ranks" in report.conclusion().splitlines()[-1]


@pytest.fixture
def default_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads this process computes with where a config says nothing."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_replay_computes_with_the_threads_that_the_run_had(
    tmp_path: Path, default_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    default_threads(3)
    unset = {"trainer": {"lr": 1e-2}}
    run = run_tiny(tmp_path, num_steps=1, config=unset, **{**EXACT, "rollout.num_threads": 2})
    (logged,) = run.events_of("threads")
    assert (logged["trainer"], logged["engine"]) == (3, 2)
    seen = {"trainer": set(), "engine": set()}  # type: dict[str, set[int]]

    def noting(side: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **more: Any) -> Any:
            seen[side].add(torch.get_num_threads())
            return call(*args, **more)

        return noted

    monkeypatch.setattr(Trainer, "update", noting("trainer", Trainer.update))
    monkeypatch.setattr(Scheduler, "commit", noting("engine", Scheduler.commit))
    default_threads(1)
    report = replay_run(run.folder)
    assert seen == {"trainer": {3}, "engine": {2}}
    assert report.is_equal and report.run_threads == [Threads(trainer=3, engine=2)] == [report.threads]


@pytest.mark.parametrize(
    ("run_threads", "said"),
    [
        ([Threads(trainer=2, engine=2), Threads(trainer=1, engine=1)], "then 1 thread for the trainer"),
        ([], "does not say with how many threads it computed"),
        ([Threads(trainer=2, engine=2)], ""),
    ],
    ids=["resumed_with_others", "old_log", "the_same"],
)
def test_threads_are_named_only_where_they_may_be_why_bits_differ(
    run_threads: list[Threads], said: str
) -> None:
    report = ReplayReport(
        run_dir="runs/reverse", run_threads=run_threads, threads=Threads(trainer=2, engine=2)
    )
    assert report.conclusion() == "EQUAL, bit for bit"
    report.differs("digest", 3, "weights of version 4", "a", "b")
    assert said in report.conclusion()
    assert ("another number of threads" in report.conclusion()) is bool(said)
    assert "batch_invariant" not in report.conclusion()


FULL_POOL = {
    **ASYNC,
    "run.schedule": "colocate_async",
    "rollout.max_response_tokens": 20,
    "rollout.num_slots": 8,
    "rollout.kv_pool_tokens": 80,
    "rollout.page_tokens": 4,
    "trainer.lr": 0.03,
}
"""Responses grow until the pool is full: the youngest are put off, and computed anew under later weights."""


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
def test_a_response_put_off_and_computed_anew_across_a_swap_repeats(kv_policy: str, tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=6, **{**FULL_POOL, "rollout.kv_policy": kv_policy})
    assert sum(m["rollout/num_preemptions"] for m in run.metrics) > 0
    cut_and_anew = [
        row
        for step in range(6)
        for row in run.trajectories(step)
        for turn in row["turns"]
        if len(turn["version_runs"]) > 1 and len(turn["kv_starts"]) > 1
    ]
    assert cut_and_anew, "nothing of what this is about happened"
    report = replay_run(run.folder)
    assert report.is_equal, report.differences
    assert not report.notes


def test_a_run_that_lent_its_trainers_device_repeats(tmp_path: Path) -> None:
    """Responses that moved to the lent engine and back, some across a publication."""
    lent = {**ASYNC, "rollout.num_slots": 3, "lending.is_on": True, "lending.margin": 0.0, "trainer.lr": 0.03}
    run = run_tiny(tmp_path, num_steps=5, faults=[HoldsUntilLent(num_tokens=5)], **lent)
    assert any(row["replica_id"] == 1 for step in range(5) for row in run.trajectories(step))
    report = replay_run(run.folder)
    assert report.is_equal, report.differences


def test_a_log_that_does_not_say_where_keys_were_computed_anew_is_announced(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, num_steps=4, **{**ASYNC, "run.schedule": "colocate_async"})

    def forget(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for turn in row["turns"]:
                turn["kv_starts"] = []

    for step in range(4):
        _rows(run, step, forget)
    report = replay_run(run.folder)
    assert report.num_cut > 0
    (note,) = report.notes
    assert note.startswith("the log does not say where keys and values were computed anew")
