"""What `rollbook calibrate` measures, and the stages predicted from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollbook.cli.calibrate import command as calibrate_command
from rollbook.errors import ConfigError, DataError, PlanError
from rollbook.ledger.curve import draw_lengths, row_curve
from rollbook.ledger.fit import (
    BatchPoint,
    DecodePoint,
    PrefillPoint,
    fit_decode,
    fit_nonnegative,
    fit_pass,
    fit_train,
)
from rollbook.ledger.hardware import (
    CallFit,
    Contention,
    DecodeFit,
    HostFit,
    MachineSpec,
    PassFit,
    TrainFit,
    load_accelerator,
)
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.predict import StepWork, predict_stages, rollout_of, update_s

TINY = ModelSpec(
    name="tiny", num_layers=2, hidden_size=128, vocab_size=32, num_heads=4, intermediate_size=512
)
MACHINE = MachineSpec(
    name='box "A"',
    device="cpu",
    num_threads=1,
    gemm_flops_per_s={"float32": 8e10, "bfloat16": 2e11},
    copy_bytes_per_s=2e10,
    memory_bytes=16_000_000_000,
    launch_s=3e-6,
    model="tiny",
    decode=DecodeFit(
        base_s=1e-3, per_row_s=2e-5, per_row_token_s=1e-8, prefill_tokens_per_s=2e4, prefill_base_s=5e-3
    ),
    train=TrainFit(
        per_micro_batch_s=0.01,
        tokens_per_s=2e4,
        forward_tokens_per_s=6e4,
        forward_per_micro_batch_s=0.004,
        optimizer_s_per_param=2e-8,
    ),
    digest_bytes_per_s=1e9,
    sync_base_s=0.01,
    reward_s=1e-4,
)
WORK = StepWork(
    num_groups=8,
    group_size=4,
    prompt_tokens=6.0,
    lengths=LengthDistribution.from_samples([4.0], max_tokens=8),
    num_slots=64,
    micro_batch_tokens=100,
    num_mini_batches=2,
)


def test_hardware_toml_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    MACHINE.write(path)
    assert MachineSpec.read(path) == MACHINE
    with_host = replace(MACHINE, host=HostFit(pack_s=1e-5, advantage_s=2e-5, report_s=3e-5))
    with_host.write(path)
    assert MachineSpec.read(path) == with_host
    teacher = PassFit(per_micro_batch_s=0.02, tokens_per_s=1e4)
    more = replace(
        MACHINE,
        passes={"teacher": teacher},
        call=CallFit(base_s=2e-3, tokens_per_s=1e6),
        contention=Contention(engine=1.25, trainer=1.5, publication=2.0),
    )
    more.write(path)
    assert MachineSpec.read(path) == more
    bare = replace(MACHINE, decode=None, train=None)
    bare.write(path)
    assert MachineSpec.read(path) == bare


def test_measured_machine_serves_as_an_accelerator(tmp_path: Path) -> None:
    MACHINE.write(tmp_path / "hardware.toml")
    gpu = load_accelerator(str(tmp_path / "hardware.toml"))
    assert gpu.peak("bfloat16") == 8e10, "a processor computes in float32, whatever it reaches in bfloat16"
    assert gpu.hbm_bytes_per_s == 2e10
    on_gpu = replace(MACHINE, device="cuda").as_accelerator()
    assert (on_gpu.peak("bfloat16"), on_gpu.peak("float32")) == (2e11, 8e10)


@pytest.mark.parametrize("text", ["", "[machine]\nname = 1", "not toml", "[machine]\nnonsense = 3"])
def test_broken_hardware_toml_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="calibrate"):
        MachineSpec.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        MachineSpec.read(tmp_path / "absent.toml")


def test_fit_recovers_the_coefficients_that_made_the_points() -> None:
    points = [
        DecodePoint(rows, rows * context, 1e-3 + 2e-5 * rows + 1e-8 * rows * context)
        for rows in (1, 8, 64)
        for context in (16, 256)
    ]
    prefill = [PrefillPoint(n, 5e-3 + n / 2e4) for n in (64, 512, 4096)]
    fit = fit_decode(points, prefill)
    assert (fit.base_s, fit.per_row_s, fit.per_row_token_s) == pytest.approx((1e-3, 2e-5, 1e-8))
    assert (fit.prefill_base_s, fit.prefill_tokens_per_s) == pytest.approx((5e-3, 2e4))
    assert fit.error_frac < 1e-9


def test_fit_never_gives_a_negative_coefficient() -> None:
    """Seconds fall with rows here, which no machine does: the slope becomes zero, not negative."""
    coefficients, _ = fit_nonnegative([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0])
    assert coefficients[1] == 0.0 and coefficients[0] > 0


def test_fit_refuses_too_few_points_and_impossible_times() -> None:
    with pytest.raises(DataError, match="more sizes"):
        fit_decode([DecodePoint(1, 1, 0.1)], [])
    with pytest.raises(DataError, match="quiet machine"):
        fit_nonnegative([[1.0, 2.0]], [0.0, 1.0])


def test_fit_train_keeps_the_optimizer_per_parameter() -> None:
    train = [BatchPoint(b, n, 0.01 * b + n / 2e4) for b, n in ((1, 500), (4, 500), (2, 4000))]
    forward = [BatchPoint(b, n, 0.004 * b + n / 6e4) for b, n in ((1, 500), (4, 500), (2, 4000))]
    fit = fit_train(train, forward, optimizer_s=0.01, num_params=500_000)
    assert fit.per_micro_batch_s == pytest.approx(0.01)
    assert fit.tokens_per_s == pytest.approx(2e4)
    assert fit.forward_tokens_per_s == pytest.approx(6e4)
    assert fit.optimizer_s_per_param == pytest.approx(2e-8)


def test_rollout_of_equal_lengths_is_worked_by_hand() -> None:
    """32 sequences of 4 tokens in 64 slots: 4 decode steps, contexts 6 to 9 a row.

    4 x 1 ms + 128 rows x 20 us + 32 x (6 + 7 + 8 + 9) x 10 ns; one prefill call of 8 prompts but their last token.
    """
    rollout = predict_stages(TINY, MACHINE, WORK)["rollout"]
    decode_s = 4e-3 + 128 * 2e-5 + 32 * 30 * 1e-8
    prefill_s = 5e-3 + 8 * 5 / 2e4
    assert rollout.seconds == pytest.approx(decode_s + prefill_s)
    assert rollout.seconds_low < rollout.seconds < rollout.seconds_high


def test_first_token_from_the_prefill_saves_a_decode_step() -> None:
    eager = predict_stages(TINY, MACHINE, replace(WORK, first_token_from_prefill=True))["rollout"]
    assert eager.seconds == pytest.approx(3e-3 + 96 * 2e-5 + 32 * 21 * 1e-8 + 5e-3 + 8 * 6 / 2e4)


def test_long_prompts_take_several_prefill_calls() -> None:
    long = replace(WORK, prompt_tokens=1001.0, max_prefill_tokens=2000)
    more = predict_stages(TINY, MACHINE, long)["rollout"].seconds
    one = predict_stages(TINY, MACHINE, replace(long, max_prefill_tokens=10**6))["rollout"].seconds
    assert more - one == pytest.approx(3 * 5e-3)  # 8 x 1,000 tokens: 4 calls instead of 1


def test_train_counts_whole_micro_batches_per_mini_batch() -> None:
    """A group is a prompt of 6 and 4 x 3 tokens: 18. Five fit 100; 4 groups a mini batch: 1 micro batch, twice."""
    train = predict_stages(TINY, MACHINE, WORK)["train"]
    assert train.seconds == pytest.approx(2 * 0.01 + 8 * 18 / 2e4 + 2 * 2e-8 * TINY.computed_params)
    assert train.flops == pytest.approx(6 * TINY.matmul_params * 8 * 18)


def test_equal_units_leave_the_rest_of_the_budget_empty() -> None:
    """Sequences of 9 computed tokens, 16 a mini batch, budget 17: one a micro batch, 16 micro batches, twice."""
    work = replace(WORK, shares_prompt_in_training=False, micro_batch_tokens=17)
    seconds = predict_stages(TINY, MACHINE, work)["train"].seconds
    assert seconds == pytest.approx(32 * 0.01 + 32 * 9 / 2e4 + 2 * 2e-8 * TINY.computed_params)


def test_stages_follow_the_step() -> None:
    assert set(predict_stages(TINY, MACHINE, WORK)) == {"rollout", "reward", "proximal", "train", "sync"}
    full = replace(WORK, uses_reference=True, uses_critic=True)
    stages = predict_stages(TINY, MACHINE, full)
    assert set(stages) >= {"reference", "values", "critic"}
    assert stages["critic"].seconds == stages["train"].seconds


def test_sync_is_bytes_over_the_digest_rate() -> None:
    sync = predict_stages(TINY, MACHINE, replace(WORK, num_replicas=2))["sync"]
    assert sync.bytes == 2 * 4 * TINY.computed_params
    assert sync.seconds == pytest.approx(0.01 + sync.bytes / 1e9)


def test_the_host_is_paid_per_trajectory() -> None:
    """8 x 4 trajectories, half of them kept: 1 ms + 16 x 10 us packing, 2 ms + 16 x 20 us advantages, 32 x 30 us +
    16 x 5 us reporting."""
    host = HostFit(
        pack_s=1e-5,
        pack_base_s=1e-3,
        advantage_s=2e-5,
        advantage_base_s=2e-3,
        report_s=3e-5,
        report_trained_s=5e-6,
    )
    stages = predict_stages(TINY, replace(MACHINE, host=host), replace(WORK, trained_frac=0.5))
    seconds = [stages[name].seconds for name in ("pack", "adv", "other")]
    assert seconds == pytest.approx([1.16e-3, 2.32e-3, 1.04e-3])


def test_no_stage_is_expected_to_take_less_than_its_launches() -> None:
    """A fit on noise may say that nothing depends on anything. 2 layers x 8 operators x 3 us = 48 us a forward, three
    times that with the backward; the rollout has four decode steps, the step two mini batches."""
    nothing = DecodeFit(base_s=0.0, per_row_s=0.0, per_row_token_s=0.0, prefill_tokens_per_s=float("inf"))
    free = TrainFit(per_micro_batch_s=0.0, tokens_per_s=float("inf"), forward_tokens_per_s=float("inf"))
    work = replace(WORK, trained_frac=0.0)
    stages = predict_stages(TINY, replace(MACHINE, decode=nothing, train=free), work)
    assert stages["rollout"].seconds == pytest.approx(4 * 48e-6)
    assert stages["proximal"].seconds == pytest.approx(48e-6)
    assert stages["train"].seconds == pytest.approx(2 * 3 * 48e-6)
    for stage in stages.values():
        assert stage.seconds_low <= stage.seconds <= stage.seconds_high
    plain = predict_stages(TINY, MACHINE, WORK)
    assert "launches" not in plain["train"].formula and "launches" in stages["train"].formula


def test_a_scaled_fit_scales_every_step_and_prefill() -> None:
    assert MACHINE.decode is not None
    half = replace(MACHINE, decode=MACHINE.decode.scaled(0.5))
    whole_s = predict_stages(TINY, MACHINE, WORK)["rollout"].seconds
    assert predict_stages(TINY, half, WORK)["rollout"].seconds == pytest.approx(whole_s / 2)


@pytest.mark.parametrize("number", ["nan", "-1.0"])
def test_a_number_that_nobody_can_measure_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "hardware.toml"
    MACHINE.write(path)
    for line in path.read_text().splitlines():
        name, equals, value = line.partition(" = ")
        if equals and not value.startswith('"') and not line.startswith("#"):
            broken = tmp_path / "broken.toml"
            broken.write_text(path.read_text().replace(line, f"{name} = {number}"))
            with pytest.raises(ConfigError, match=f"{name} is"):
                MachineSpec.read(broken)


def test_machine_without_a_model_cannot_predict() -> None:
    with pytest.raises(PlanError, match="calibrate"):
        predict_stages(TINY, replace(MACHINE, decode=None), WORK)


def test_two_waves_take_twice_the_steps() -> None:
    lengths = np.full(8, 5)
    assert row_curve(lengths, 8).num_steps == 5
    assert row_curve(lengths, 4).num_steps == 10
    assert row_curve(lengths, 4).num_admissions == 2


def test_draws_repeat_for_a_seed_and_stay_within_the_limit() -> None:
    lengths = LengthDistribution(max_tokens=64, mean_tokens=20.0)
    first, again = draw_lengths(lengths, 200, seed=3), draw_lengths(lengths, 200, seed=3)
    assert (first == again).all()
    assert first.min() >= 1 and first.max() <= 64


def test_the_teacher_and_the_critic_are_priced_by_their_own_passes() -> None:
    """144 computed tokens: a teacher at 10 ms + 144 / 1,000; a critic's two updates at 20 ms + 144 / 2,000."""
    teacher = PassFit(per_micro_batch_s=0.01, tokens_per_s=1e3)
    critic = PassFit(per_micro_batch_s=0.02, tokens_per_s=2e3)
    machine = replace(MACHINE, passes={"teacher": teacher, "critic": critic, "values": teacher})
    stages = predict_stages(TINY, machine, replace(WORK, uses_teacher=True, uses_critic=True))
    assert stages["teacher"].seconds == pytest.approx(2 * 0.01 + 144 / 1e3)
    assert stages["values"].seconds == pytest.approx(stages["teacher"].seconds)
    assert stages["critic"].seconds == pytest.approx(2 * 0.02 + 144 / 2e3 + 2 * 2e-8 * TINY.computed_params)
    remote = predict_stages(TINY, MACHINE, replace(WORK, uses_teacher=True))
    assert "teacher" not in remote  # nobody measured it


def test_a_step_is_priced_by_what_it_really_had_to_do() -> None:
    """32 sequences of 4 tokens are the plan's own; one of 100 tokens among them adds 96 steps of a single row."""
    planned = predict_stages(TINY, MACHINE, WORK)["rollout"].seconds
    engine_s, host_s = rollout_of(TINY, MACHINE, WORK, [4] * 32)
    assert engine_s == pytest.approx(planned) and host_s == pytest.approx(32 * 1e-4)
    longer_s, _ = rollout_of(TINY, MACHINE, WORK, [4] * 31 + [100])
    context = sum(6 + token for token in range(4, 100))
    assert longer_s - engine_s == pytest.approx(96 * (1e-3 + 2e-5) + context * 1e-8)
    updates_s = update_s(TINY, MACHINE, WORK, num_micro_batches=5, num_tokens=1000, num_updates=2)
    assert updates_s == pytest.approx(5 * 0.01 + 1000 / 2e4 + 2 * 2e-8 * TINY.computed_params)


def test_engines_that_run_ahead_refill_their_slots_and_have_no_tail() -> None:
    """Lengths of 4 or 40 in 32 slots: alone, a step ends with its longest; in a stream it costs its tokens' share."""
    mixed = replace(
        WORK, num_slots=32, lengths=LengthDistribution.from_samples([4.0] * 9 + [40.0], max_tokens=40)
    )
    alone = predict_stages(TINY, MACHINE, mixed)["rollout"].seconds
    stream = predict_stages(TINY, MACHINE, replace(mixed, most_running=64))["rollout"].seconds
    assert stream < 0.6 * alone
    slow = replace(MACHINE, decode=replace(MACHINE.decode, base_s=1.0))  # type: ignore[type-var]
    stream = predict_stages(TINY, slow, replace(mixed, most_running=64))["rollout"].seconds
    assert stream == pytest.approx(7.6, rel=0.1)  # 32 x 7.6 tokens in 32 rows, a second a step


def test_stages_of_a_trainer_elsewhere_pay_the_way_there_and_back_once() -> None:
    """2 ms a call and 1 us a token, however many mini batches and epochs the call has."""
    call = CallFit(base_s=2e-3, tokens_per_s=1e6)
    work = replace(WORK, uses_critic=True, num_epochs=2)
    here = predict_stages(TINY, MACHINE, work)
    there = predict_stages(TINY, replace(MACHINE, call=call), work)
    for name in ("proximal", "values", "train", "critic"):
        more_s = there[name].seconds - here[name].seconds
        assert more_s == pytest.approx(2e-3 + work.computed_tokens / 1e6)
    for name in ("rollout", "reward", "sync"):
        assert there[name] == here[name]
    counts = {"num_micro_batches": 3, "num_tokens": 500, "num_updates": 2}
    machines = (replace(MACHINE, call=call), MACHINE)
    there_s, here_s = (update_s(TINY, machine, WORK, **counts) for machine in machines)
    assert there_s - here_s == pytest.approx(2e-3 + 500 / 1e6)


def test_beside_the_trainer_the_rollout_is_a_wait_and_both_sides_take_longer() -> None:
    """Contention of 2 and 1.5, and 3 for a publication: beside the trainer's stages half as much is generated; the loop
    waits for the rest, when engines are alone, and for nothing where none is left."""
    machine = replace(MACHINE, contention=Contention(engine=2.0, trainer=1.5, publication=3.0))
    ahead = replace(WORK, most_running=64)
    turns = predict_stages(TINY, MACHINE, ahead)
    beside = predict_stages(TINY, machine, replace(ahead, generates_beside=True))
    others = [name for name in turns if name not in ("rollout", "reward")]
    for name in others:
        factor = 3.0 if name == "sync" else 1.5
        assert beside[name].seconds == pytest.approx(factor * turns[name].seconds)
    trainer_s = sum(beside[name].seconds for name in others)
    assert beside["rollout"].seconds == pytest.approx(max(turns["rollout"].seconds - trainer_s / 2.0, 0.0))
    assert beside["rollout"].seconds_low == 0.0 and beside["reward"].seconds == 0.0
    slow = replace(machine, decode=MACHINE.decode.scaled(100))  # type: ignore[union-attr]
    waited = predict_stages(TINY, slow, replace(ahead, generates_beside=True))
    assert waited["rollout"].seconds == pytest.approx(100 * turns["rollout"].seconds - trainer_s / 2.0)


def test_engines_that_are_waited_for_with_every_slot_taken_are_not_probed() -> None:
    """A probe of 10 ms needs a slot: with 32 sequences of the next step in 32 slots there is none while the loop waits
    for them, and there is one where engines keep up."""
    slow = replace(MACHINE, decode=MACHINE.decode.scaled(100))  # type: ignore[union-attr]
    ahead = replace(WORK, most_running=64, generates_beside=True, num_slots=32)
    seconds = {
        (machine is slow, slots): predict_stages(TINY, machine, replace(ahead, num_slots=slots))[
            "sync"
        ].seconds
        for machine in (slow, MACHINE)
        for slots in (32, 33)
    }
    assert seconds[True, 33] - seconds[True, 32] == pytest.approx(0.01)
    assert seconds[False, 32] == seconds[False, 33] == seconds[True, 33]


def test_passes_are_fitted_best_at_the_sizes_that_a_run_has() -> None:
    """One group alone takes half of what the line through the run's own sizes gives: the largest is met to 2 %."""
    points = [BatchPoint(1, 20, 0.5 * (5e-3 + 20e-4))]
    points += [BatchPoint(1, n, 5e-3 + n * 1e-4) for n in (200, 600, 2000)]
    fit = fit_pass(points)
    predicted = fit.per_micro_batch_s + points[-1].num_tokens / fit.tokens_per_s
    assert predicted == pytest.approx(points[-1].seconds, rel=0.02)


def test_adapters_alone_are_what_the_optimizer_moves_and_a_publication_carries() -> None:
    """20,000 trained parameters at 20 ns, two updates; the passes are measured with adapters and stay as they are."""
    whole = predict_stages(TINY, MACHINE, WORK)
    adapters = predict_stages(
        TINY, MACHINE, replace(WORK, trained_params=20_000, published_params=20_000, uses_critic=True)
    )
    frozen = TINY.computed_params - 20_000
    assert whole["train"].seconds - adapters["train"].seconds == pytest.approx(2 * 2e-8 * frozen)
    assert adapters["sync"].bytes == 4 * 20_000
    assert adapters["sync"].seconds == pytest.approx(0.01 + 4 * 20_000 / 1e9)
    # A frozen matrix has a forward and a backward, no weight gradient; the critic trains whole.
    tokens = WORK.computed_tokens
    assert adapters["train"].flops == (4 * TINY.matmul_params + 6 * 20_000) * tokens
    assert adapters["critic"].flops == 6 * TINY.matmul_params * tokens
    with pytest.raises(PlanError, match="published_params is -1"):
        replace(WORK, published_params=-1)


def test_scaled_forwards_leave_the_updates_as_they_were() -> None:
    assert MACHINE.train is not None
    slower = replace(MACHINE, train=MACHINE.train.with_forwards_scaled(1.5))
    before, after = predict_stages(TINY, MACHINE, WORK), predict_stages(TINY, slower, WORK)
    assert after["proximal"].seconds == pytest.approx(1.5 * before["proximal"].seconds)
    assert after["train"].seconds == before["train"].seconds
    assert PassFit(per_micro_batch_s=0.1, tokens_per_s=10.0).scaled(2.0) == PassFit(
        per_micro_batch_s=0.2, tokens_per_s=5.0
    )


def test_a_file_says_how_long_its_measuring_waited_for_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan of a run that measures itself does."""
    waited_s = iter([1.0, 3.0])
    monkeypatch.setattr("rollbook.controller.entry.calibrate", lambda *_, **__: MACHINE)
    monkeypatch.setattr("rollbook.observe.core_waits.CoreWaits.read", lambda _: {"1": next(waited_s)})
    clock = iter([10.0, 14.0])
    monkeypatch.setattr("rollbook.cli.calibrate.monotonic", lambda: next(clock))
    calibrate_command(output=tmp_path / "hardware.toml")
    assert MachineSpec.read(tmp_path / "hardware.toml").core_wait_frac == 0.5
