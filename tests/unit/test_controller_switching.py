"""Hand-overs of a device in the real loop: nothing but places changes, every move is on record, and weights reach an
engine by any transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.controller import calibrate, expectation, rehearsal, switching
from rollbook.controller.loop import Controller
from rollbook.controller.startable import unstartable
from rollbook.errors import ConfigError, DeadlineError
from rollbook.memory.handover import Expectation, Move, MoveReport, hand_over
from tiny_run import RunResult, resume_tiny, run_tiny, tiny_config

BF16 = {"model.dtype": "bfloat16", "rollout.dtype": "float32"}
"""Master weights are then tensors of their own, and the engine's weights, too."""


def stages_of(run: RunResult, step: int) -> list[tuple[str, str, int]]:
    """(stage, move, bytes) in the order of their spans."""
    spans = {event["span_id"]: event for event in run.events_of("span") if event.get("step") == step}
    moves = [s for s in spans.values() if spans.get(s.get("parent_id"), {}).get("name", "").startswith("to_")]
    ordered = sorted(moves, key=lambda span: span["span_id"])
    return [(spans[s["parent_id"]]["name"], s["name"], s["bytes"]) for s in ordered]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_tiny(tmp_path_factory.mktemp("plain"), num_steps=3, **BF16)


@pytest.mark.parametrize("sleep_level", [1, 2])
def test_a_run_that_hands_the_device_over_is_the_same_run(
    sleep_level: int, tmp_path: Path, plain: RunResult
) -> None:
    run = run_tiny(
        tmp_path, num_steps=3, **BF16, **{"memory.sleep_level": sleep_level, "memory.offload": True}
    )
    assert [s["critic/rewards/mean"] for s in run.metrics] == [
        s["critic/rewards/mean"] for s in plain.metrics
    ]
    for name, tensor in plain.parameters.items():  # read from host memory, where they waited
        assert torch.equal(tensor, run.parameters[name]), name
    state_bytes = 3 * 4 * sum(tensor.numel() for tensor in plain.parameters.values())
    assert stages_of(run, 1) == [
        ("to_trainer", "pause", 0),
        ("to_trainer", "engine sleeps", 0),  # nothing crosses a link on a CPU
        ("to_trainer", "release", 0),
        ("to_trainer", "training state to device", state_bytes),
        ("to_rollout", "gradients dropped", 0),
        ("to_rollout", "training state to host", state_bytes),
        ("to_rollout", "release", 0),
        ("to_rollout", "engine wakes", 0),
        ("to_rollout", "resume", 0),
    ]
    owners = {event["point"]: event["owners"] for event in run.events_of("memory")}
    assert (
        owners["train"]["optimizer moments"] == 2 * owners["train"]["master weights"] == state_bytes * 2 // 3
    )
    assert "optimizer moments" not in owners["rollout"]
    assert owners["rollout"]["KV pool"] > 0


def test_every_move_of_a_planned_run_stands_beside_what_its_rehearsal_took(
    tmp_path: Path, plain: RunResult
) -> None:
    moves = {"memory.sleep_level": 2, "memory.offload": True}
    run = run_tiny(tmp_path, num_steps=3, **BF16, **moves, **{"plan.is_on": True})
    for name, tensor in plain.parameters.items():  # the rehearsal leaves no trace in the weights
        assert torch.equal(tensor, run.parameters[name]), name
    stages = json.loads((run.folder / "plan.json").read_text())["stages"]
    for step, metrics in enumerate(run.metrics):
        spans = [e for e in run.events_of("span") if e.get("step") == step]
        halves = [span for span in spans if span["name"] in ("to_trainer", "to_rollout")]
        assert len(halves) == 3
        for half in halves:
            parts = [span for span in spans if span.get("parent_id") == half["span_id"]]
            assert sum(part["expected_s"] for part in parts) == pytest.approx(half["expected_s"])
        for name in ("to_trainer", "to_rollout"):
            assert metrics[f"expected_s/switch_{name}"] == pytest.approx(stages[name]["seconds"])
        expected = {name: seconds for name, seconds in metrics.items() if name.startswith("expected_s/")}
        whole = expected.pop("expected_s/step")  # of the work that the step got, as its stages are
        assert whole >= sum(expected.values()) * 0.999


def test_a_rehearsed_move_is_expected_to_take_what_it_took_and_to_move_the_ledgers_bytes(
    tmp_path: Path,
) -> None:
    """The ledger's seconds are those of published frameworks: a run of ours took a thirtieth of them on an H200."""

    def published(controller: Controller) -> None:
        controller.switch._table = {"training state to host": Expectation(bytes=7, seconds=1e6)}

    run = run_tiny(
        tmp_path, num_steps=2, faults=[published], **BF16, **{"memory.offload": True, "plan.is_on": True}
    )
    moves = [span for span in run.events_of("span") if span["name"] == "training state to host"]
    assert [span["expected_bytes"] for span in moves] == [7, 7]
    assert all(0 < span["expected_s"] < 100 for span in moves)


@pytest.mark.parametrize("sleep_level", [1, 2])
def test_a_hand_over_is_rehearsed_with_what_stands_around_it_in_a_step_and_changes_nothing(
    sleep_level: int, tmp_path: Path, plain: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving back what a step's updates had held took 60 ms on an H200, and 14 where nothing had been trained; a
    publication after it takes longer than one whose memory is still at hand, and is expected to."""
    seen: list[str] = []

    def watched(controller: Controller) -> None:
        def noted(do: Callable[..., Any], *given: Any, **named: Any) -> Any:
            seen.append(do.__name__)
            return do(*given, **named)

        for owner, name in (
            (controller.trainer, "update"),
            (controller.router, "sleep"),
            (controller.router, "wake"),
            (controller.publisher, "resync"),
        ):
            monkeypatch.setattr(owner, name, partial(noted, getattr(owner, name)))

    rates = iter([1.0, 5.0])  # of rehearsals, then of the hand-overs' publications
    monkeypatch.setattr(rehearsal, "publication_rate", lambda _: next(rates))
    monkeypatch.setattr(expectation, "publication_rate", lambda _: next(rates))
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.0)
    moves = {"memory.sleep_level": sleep_level, "memory.offload": True, "plan.is_on": True}
    run = run_tiny(tmp_path, num_steps=3, faults=[watched], **BF16, **moves)
    rehearsed, step = ["sleep", "update", "wake", "resync"], ["sleep", "update", "wake"]
    assert seen[seen.index("sleep") :] == rehearsed * (1 + calibrate.FEW_REPEATS) + step * 3
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["machine"]["coefficients"]["digest_bytes_per_s"] == 5.0
    for name, tensor in plain.parameters.items():
        assert torch.equal(tensor, run.parameters[name]), name


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_engines_that_do_not_answer_are_named_also_where_nothing_moves(call: str, tmp_path: Path) -> None:
    def stuck(controller: Controller) -> None:
        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        setattr(controller.router, call, never)

    with pytest.raises(
        DeadlineError, match=f"the move '{call}' of a hand-over of cpu took longer than 0.05 s"
    ):
        run_tiny(tmp_path, num_steps=1, faults=[stuck], **{"memory.move_deadline_s": 0.05})


def test_engines_that_drain_have_as_long_as_a_response_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, float] = {}

    async def noted(moves: Sequence[Move], device: torch.device, *, deadline_s: float) -> list[MoveReport]:
        given[moves[0].name] = deadline_s
        return await hand_over(moves, device, deadline_s=deadline_s)

    monkeypatch.setattr(switching, "hand_over", noted)
    drains = {
        "run.schedule": "colocate_async",
        "buffer.max_staleness_steps": 1,
        "rollout.pause_mode": "drain",
    }
    run_tiny(
        tmp_path,
        num_steps=1,
        **drains,
        **{"memory.move_deadline_s": 100.0, "rollout.response_deadline_s": 700.0},
    )
    assert given == {"pause": 800.0, "resume": 100.0}


def test_nothing_is_planned_or_measured_where_no_plan_is_wanted(plain: RunResult) -> None:
    assert "plan" not in {event["name"] for event in plain.events if event["kind"].startswith("span")}
    assert not (plain.folder / "plan.json").exists()


def test_a_run_resumes_from_a_checkpoint_that_was_written_while_its_state_was_away(
    tmp_path: Path, plain: RunResult
) -> None:
    moves = {"memory.sleep_level": 1, "memory.offload": True}
    half = run_tiny(tmp_path, num_steps=3, **BF16, **moves, **{"run.num_steps": 2})
    whole = resume_tiny(half, **{"run.num_steps": 3})
    for name, tensor in plain.parameters.items():
        assert torch.equal(tensor, whole.parameters[name]), name


@pytest.mark.parametrize("sleep_level", [1, 2])
def test_responses_under_way_outlive_the_engines_sleep(sleep_level: int, tmp_path: Path) -> None:
    """They are kept as tokens, recomputed after the engine woke, and go on under the next version."""
    asked = {
        "run.schedule": "colocate_async",
        "buffer.max_staleness_steps": 2,
        "rollout.max_response_tokens": 20,
    }
    few_slots = {"rollout.num_slots": 4, "memory.sleep_level": sleep_level, "memory.offload": True}
    run = run_tiny(tmp_path, num_steps=4, **BF16, **asked, **few_slots)
    rows = [row for step in range(4) for row in run.trajectories(step)]
    assert not any(row["failure_kind"] for row in rows)
    mixed = [turn for row in rows for turn in row["turns"] if len(turn["version_runs"]) > 1]
    assert mixed  # some were sampled by two versions
    assert run.metrics[-1]["replica/0/weight_version"] == 4


@pytest.mark.parametrize(("sleep_level", "versions"), [(1, [0]), (2, [0, 1, 2])])
def test_dropped_weights_come_back_also_when_nothing_was_learned(
    sleep_level: int, versions: list[int], tmp_path: Path
) -> None:
    """A step whose groups are all flat publishes nothing, unless the engine has no weights without it."""
    flat = {
        "reward": {"terms": [{"function": "tiny_rewards:zero", "isolation": "inline", "is_tested": False}]}
    }
    asked = {"algorithm.filter.drop_flat": True, "memory.sleep_level": sleep_level}
    run = run_tiny(tmp_path, num_steps=2, config=flat, **asked)
    assert [event["weight_version"] for event in run.events_of("publication")] == versions


@pytest.mark.parametrize("transport", ["shm", "disk", "broadcast"])
def test_weights_reach_engines_by_any_transport_and_the_run_stays_the_same(
    transport: str, tmp_path: Path, plain: RunResult
) -> None:
    further: dict[str, Any] = {"sync.disk_dir": str(tmp_path / "weights")} if transport == "disk" else {}
    run = run_tiny(
        tmp_path,
        num_steps=3,
        **BF16,
        **{
            "sync.transport": transport,
            "rollout.num_replicas": 2,
            "sync.delta": transport == "shm",
            **further,
        },
    )
    publications = run.events_of("publication")
    assert [event["committed"] for event in publications] == [[0, 1]] * 4
    assert all(event["sent_bytes"] > 0 for event in publications)
    assert (publications[-1]["base_version"] is not None) == (transport == "shm")
    for name, tensor in plain.parameters.items():  # what is sampled depends on the weights, not on their way
        assert torch.equal(tensor, run.parameters[name]), name


@pytest.mark.parametrize(
    ("scheme", "transport"),
    [("int8", "inproc"), ("int8", "shm"), ("fp8_block", "shm"), ("fp8_block", "disk")],
)
def test_quantized_weights_are_published_proven_and_sampled_from(
    scheme: str, transport: str, tmp_path: Path, plain: RunResult
) -> None:
    further: dict[str, Any] = {"sync.disk_dir": str(tmp_path / "weights")} if transport == "disk" else {}
    further |= {"sync.delta": transport == "shm", "sync.transport": transport}
    run = run_tiny(tmp_path, num_steps=2, **BF16, **further, **{"sync.quantize": scheme})
    publications = run.events_of("publication")
    assert [event["committed"] for event in publications] == [[0]] * 3
    specs = plain.events_of("publication")[0]
    assert publications[0]["num_bytes"] < specs["num_bytes"]
    for metrics in run.metrics:  # the engine samples from what was sent, not from the trainer's weights
        assert 1e-3 < metrics["training/logprob_gap/max"] < 2.0
        assert 1e-4 < metrics["sync/probe_gap_max"] < 2.0


@pytest.mark.parametrize("sleep_level", [1, 2])
@pytest.mark.parametrize("staging", ["staged", "direct"])
def test_quantized_weights_come_back_after_a_sleep(staging: str, sleep_level: int, tmp_path: Path) -> None:
    moves = {"memory.sleep_level": sleep_level, "memory.offload": True, "sync.staging": staging}
    run = run_tiny(tmp_path, num_steps=2, **BF16, **moves, **{"sync.quantize": "int8", "plan.is_on": True})
    assert not run.events_of("publication_failed") and not run.events_of("quarantined")
    assert run.metrics[-1]["sync/probe_gap_max"] < 2.0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"run.schedule": "separate_async", "buffer.max_staleness_steps": 1}, "never hands a device over"),
        ({"rollout.device": "cuda"}, "rollout.device 'cuda'"),
        (
            {"sync.every_steps": 2, "run.schedule": "colocate_async", "buffer.max_staleness_steps": 1},
            "every_steps",
        ),
        ({"sync.delta": True, "sync.transport": "shm"}, "a delta needs the weights"),
        ({"cluster.kind": "ray"}, "handed over inside one process"),
    ],
)
def test_a_hand_over_that_cannot_be_is_refused(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="memory.sleep_level is 2") as caught:
        tiny_config(**{"memory.sleep_level": 2}, **overrides).check()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"sync.transport": "ipc"}, "the engine runs in the trainer's process"),
        ({"sync.quantize": "int8", "rollout.engine": "vllm"}, "only the native engine decodes"),
        ({"sync.quantize": "int8", "rollout.mismatch": "int4"}, "rounded twice"),
        ({"sync.quantize": "int8", "model.lora": {"rank": 2, "publish": "adapter"}}, "no matrix of a layer"),
        ({"rollout.engine": "vllm", "rollout.device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"rollout.engine": "vllm", "rollout.num_replicas": 2}, "one vLLM engine fits a process"),
        ({"rollout.engine": "vllm", "rollout.vllm.tp_size": 2}, "rollout.vllm.tp_size is 2 with in_process"),
        ({"rollout.engine": "vllm", "rollout.batch_invariant": True}, "only the native engine has it"),
        ({"rollout.engine": "vllm", "rollout.top_p": 0.9, "rollout.temperature": 0.5}, "after the filters"),
        (
            {"rollout.engine": "vllm", "rollout.top_p": 0.9, "eval.every_steps": 1, "eval.temperature": 0.5},
            "evaluate at temperature 0 or 1",
        ),
        ({"rollout.engine": "vllm", "rollout.vllm.in_process": False}, "use 'ipc' on a GPU, 'shm' otherwise"),
        (
            {"rollout.engine": "vllm", "rollout.vllm.in_process": False, "sync.transport": "ipc"},
            "CUDA memory is shared between GPUs alone",
        ),
        (
            {
                "rollout.engine": "vllm",
                "rollout.vllm.in_process": False,
                "sync.transport": "shm",
                "sync.shm_dir": "/tmp",
            },
            "look into /dev/shm",
        ),
    ],
)
def test_what_nobody_serves_is_named_before_anything_is_built(overrides: dict[str, Any], says: str) -> None:
    problems = unstartable(tiny_config(**overrides))
    assert any(says in f"{what} ({remedy})" for what, remedy in problems), problems
    assert all(remedy for _, remedy in problems)


def test_every_problem_is_named_at_once() -> None:
    problems = unstartable(
        tiny_config(
            **{
                "rollout.engine": "vllm",
                "rollout.num_replicas": 2,
                "rollout.vllm.tp_size": 2,
                "sync.transport": "ipc",
            }
        )
    )
    assert (
        len([what for what, _ in problems if "num_replicas" in what or "tp_size" in what or "ipc" in what])
        == 3
    )


def test_a_device_that_torch_does_not_see_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    problems = unstartable(tiny_config(**{"model.device": "cuda", "rollout.device": "cuda"}))
    assert [what for what, _ in problems] == [
        "model.device is 'cuda' and torch sees no CUDA device",
        "rollout.device is 'cuda' and torch sees no CUDA device",
    ]


def test_a_startable_config_has_no_problem() -> None:
    assert unstartable(tiny_config()) == []


def test_moves_stand_beside_the_ledgers_on_a_device_of_its_table(tmp_path: Path) -> None:
    """The names of the moves are the ledger's; bytes are those that lie in host memory."""
    seen: dict[str, Any] = {}

    def look(controller: Controller) -> None:
        seen["state"] = {parking.name: parking.num_bytes for parking in controller.switch._parked()}
        seen["expected"] = controller.switch.by_ledger("NVIDIA H200")
        assert controller.switch.by_ledger("a device of no table") == {}

    kl = {"algorithm.kl": {"placement": "loss", "coef": 0.01}}
    moves = {"memory.offload": True, "memory.sleep_level": 1}
    run = run_tiny(tmp_path, num_steps=2, faults=[look], **BF16, **kl, **moves)
    state, expected = seen["state"], seen["expected"]
    assert set(state) == {"training state", "frozen models"}
    assert expected["training state to host"].bytes == pytest.approx(state["training state"])
    assert expected["frozen models to device"].bytes == pytest.approx(state["frozen models"])
    assert expected["engine sleeps"].bytes > 0 and expected["engine wakes"].seconds > 0
    moved = {name for step in range(2) for _, name, _ in stages_of(run, step)}
    assert moved >= {name for name in expected if "caches" not in name and "graphs" not in name}


@pytest.mark.parametrize(
    "moves", [{"memory.offload": True, "memory.sleep_level": 1}, {"memory.offload": True}]
)
def test_each_owners_bytes_stand_beside_the_ledgers_and_agree(tmp_path: Path, moves: dict[str, Any]) -> None:
    """Parameters x bytes of ModelSpec against every tensor that the run holds: equal on this model within 2 %."""
    kl = {"algorithm.kl": {"placement": "loss", "coef": 0.01}}
    run = run_tiny(tmp_path, num_steps=1, **BF16, **kl, **moves)
    metrics = run.metrics[0]
    told = [name.split("/")[2] for name in metrics if name.startswith("memory/owner/") and "expected" in name]
    assert {"weights", "KV_pool"} <= set(told)
    for owner in told:
        measured, wanted = (
            metrics[f"memory/owner/{owner}/bytes"],
            metrics[f"memory/owner/{owner}/expected_bytes"],
        )
        assert measured == pytest.approx(wanted, rel=0.02), owner
