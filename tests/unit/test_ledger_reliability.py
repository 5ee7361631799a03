"""Ranges are wider where nobody measured: of decoding, training, publications, steps, checkpoints and simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollbook.ledger.account import StepAccount
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import load_model
from rollbook.ledger.reliability import widening
from rollbook.ledger.step import Layouts, step_account
from rollbook.ledger.sync import SyncWork, sync_account
from rollbook.ledger.train import train_widening
from rollbook.ledger.workload import Mode, Workload
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.scenario import scenario_of
from rollbook.planner.simulate import simulate

DEFAULT = load_assumptions("default")
WORK = Workload(
    num_prompts=128, group_size=8, prompt_tokens=500, response_tokens=2000, max_response_tokens=8192
)


def account(
    gpu: str = "H100",
    model: str = "Llama-3.1-8B",
    *,
    num_gpus: int = 64,
    mode: Mode = "sync",
    stack: str = "fsdp",
    train: TrainLayout | None = None,
) -> StepAccount:
    half = 0 if mode in ("sync", "colocate_async") else num_gpus // 2
    return step_account(
        load_model(model),
        WORK,
        Cluster(accelerator=load_accelerator(gpu), num_gpus=num_gpus),
        replace(DEFAULT, stack=stack),
        mode=mode,
        num_rollout_gpus=half,
        num_train_gpus=half,
        layouts=Layouts(replica=ReplicaLayout(tp_size=8), train=train or TrainLayout()),
    )


def test_what_was_measured_keeps_the_plain_range() -> None:
    plain = account()
    assert plain.rollout.error_frac == DEFAULT.rollout_error_frac
    assert plain.train.error_frac == DEFAULT.train_error_frac
    assert plain.notes == ()


def test_a_device_with_the_chip_of_a_measured_one_is_as_well_known() -> None:
    assert account("H800").train.error_frac == DEFAULT.train_error_frac
    assert account("H800").notes == ()


def test_an_unmeasured_device_widens_both_sides_and_says_so() -> None:
    far = account("MI325X")
    assert far.rollout.error_frac == 1.5 * DEFAULT.rollout_error_frac
    assert far.train.error_frac == 1.5 * DEFAULT.train_error_frac
    assert [note for note in far.notes if "decoding with MI325X" in note]
    assert [note for note in far.notes if "fsdp training with MI325X" in note]
    assert far.step_s.high / far.step_s.value > account().step_s.high / account().step_s.value


def test_an_unmeasured_kind_of_model_widens_where_it_was_not_measured() -> None:
    """Linear attention was measured in pre-training and in engines, under no torch FSDP."""
    hybrid = account(model="Qwen3.5-35B-A3B")
    assert hybrid.rollout.error_frac == DEFAULT.rollout_error_frac
    assert hybrid.train.error_frac == 1.25 * DEFAULT.train_error_frac


def test_unmeasured_numbers_widen_training() -> None:
    assert account(train=TrainLayout(dtype="float8")).train.error_frac == 1.25 * DEFAULT.train_error_frac


def test_a_stack_whose_runs_differ_has_the_wider_range() -> None:
    def error_frac(stack: str) -> float:
        model, layout = load_model("Qwen3-30B-A3B"), TrainLayout(ep_size=8)
        cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=8)
        return train_widening(model, cluster, DEFAULT, layout, stack=stack)[0]

    assert error_frac("fsdp_experts") == 2 * error_frac("megatron_overlap")


@pytest.mark.parametrize("mode", ["colocate_async"])
def test_an_unmeasured_mode_widens_the_step(mode: Mode) -> None:
    """By a quarter beyond the weighted errors of its parts."""
    found = account(mode=mode)
    parts = {"rollout": found.rollout.error_frac, "train": found.train.error_frac}
    assert min(parts.values()) * 1.25 < found.step_s.high / found.step_s.value - 1
    assert any(f"RL steps with {mode}" in note for note in found.notes)


def test_more_gpus_than_were_measured_widen_steps_and_publications() -> None:
    assert any("more than 192 GPUs" in note for note in account(num_gpus=1024).notes)
    errors = [
        sync_account(
            load_model("Qwen3-32B"),
            Cluster(accelerator=load_accelerator("H100"), num_gpus=2 * side),
            DEFAULT.sync,
            SyncWork(method="broadcast", num_train_gpus=side, num_rollout_gpus=side, replica_gpus=8),
        ).error_frac
        for side in (64, 512)
    ]
    assert errors[1] == 1.25 * errors[0] == 1.25 * DEFAULT.sync.error_frac["broadcast"]


def test_longer_sequences_than_were_measured_widen_the_step() -> None:
    cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=64)
    far = replace(WORK, prompt_tokens=900_000.0)
    long, short = (
        step_account(load_model("Llama-3.1-8B"), work, cluster, DEFAULT, rollout_tp=8) for work in (far, WORK)
    )
    assert any("sequences of more than 65,536 tokens" in note for note in long.notes) and not short.notes


def test_ranges_do_not_widen_beyond_what_they_say() -> None:
    """However many traits are unknown: beyond that it would be no prediction any more."""
    nothing = {"device": ["abacus"], "model": ["beads"], "dtype": ["wood"], "engine": ["hand"]}
    factor, notes = widening(DEFAULT, "decode", nothing, what="decoding")
    assert factor == 2.5 and len(notes) == 5
    assert notes[-1] == "together these make the range of decoding 2.5 times as wide, not 2.93"
    factor, notes = widening(DEFAULT, "a part nobody measured", {"device": ["H100"]}, what="x")
    assert factor == 1.5 and len(notes) == 1


def test_a_checkpoint_and_a_simulation_carry_ranges() -> None:
    options = PlanOptions(model="Qwen3-8B", num_gpus="16")
    unknown, known = (
        make_plan(replace(options, storage_gb_per_s=rate).request(), is_brief=True).beside.checkpoint.account
        for rate in (0.0, 3.6)
    )
    assert unknown.write_range.high > known.write_range.high > known.write_s > known.write_range.low
    plan = make_plan(options.request(), is_brief=True)
    chosen = plan.require_chosen()
    result = simulate(scenario_of(plan.request, chosen))
    closed, span = chosen.account.step_s, result.step_range(chosen.account.step_s)
    assert span.value == result.step_s
    assert span.high / span.value == pytest.approx(closed.high / closed.value)
    assert span.low < span.value < span.high


def test_a_step_that_is_mostly_base_costs_says_so_and_reaches_down_to_the_rest() -> None:
    """8.8 s of a hand-over and 10 s of the loop are other frameworks'; ten tokens of a small model are not."""
    tiny = replace(WORK, num_prompts=8, group_size=2, response_tokens=10, max_response_tokens=20)
    cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=8)
    found = step_account(load_model("Qwen2.5-0.5B"), tiny, cluster, DEFAULT)
    base_s = DEFAULT.step_base_s + DEFAULT.switch.base_s
    assert base_s > 0.5 * found.step_s.value
    told = f"{base_s:.1f} s of the step are base costs of other frameworks' loops"
    assert any(note.startswith(told) for note in found.notes)
    as_file = step_account(load_model("Qwen2.5-0.5B"), tiny, cluster, replace(DEFAULT, name="own.toml"))
    assert any(note.endswith("as `own.toml` has them") for note in as_file.notes)  # which is no framework's
    assert found.step_s.low <= found.step_s.value - base_s
    assert not any("base costs" in note for note in account().notes)
