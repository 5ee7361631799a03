"""Laws that every account obeys, whatever the numbers."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.curve import draw_lengths, row_curve
from rollbook.ledger.decode import decode_step
from rollbook.ledger.generation import generation_curve
from rollbook.ledger.hardware import Cluster, accelerator_names, load_accelerator
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import load_model, model_names
from rollbook.ledger.step import step_account
from rollbook.ledger.workload import MODES, AgentWork, Workload

MODELS = ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b", "Qwen3.5-35B-A3B", "Gemma-3-4B"]
PRESETS = [load_assumptions("paper"), load_assumptions("default")]
H100 = load_accelerator("H100")
BASE = Workload(
    num_prompts=128, group_size=8, prompt_tokens=400, response_tokens=1500, max_response_tokens=8192
)

models = st.sampled_from(MODELS).map(load_model)
presets = st.sampled_from(PRESETS)


@given(model=models, assumptions=presets, gpus=st.sampled_from([64, 128, 512]), factor=st.floats(1.1, 3.0))
@settings(max_examples=40, deadline=None)
def test_longer_responses_never_make_a_step_shorter(model, assumptions, gpus, factor) -> None:  # type: ignore[no-untyped-def]
    cluster = Cluster(accelerator=H100, num_gpus=gpus)
    longer = replace(BASE, response_tokens=min(BASE.response_tokens * factor, 8000))
    short, long = (step_account(model, work, cluster, assumptions, rollout_tp=32) for work in (BASE, longer))
    assert long.seconds.total > short.seconds.total
    assert long.flops.total > short.flops.total


@given(model=models, assumptions=presets)
@settings(max_examples=20, deadline=None)
def test_more_gpus_never_make_a_step_longer(model, assumptions) -> None:  # type: ignore[no-untyped-def]
    totals = [
        step_account(
            model, BASE, Cluster(accelerator=H100, num_gpus=gpus), assumptions, rollout_tp=32
        ).seconds.total
        for gpus in (64, 128, 256, 512)
    ]
    assert totals == sorted(totals, reverse=True)


@given(model=models, prompts=st.integers(1, 400), group=st.integers(1, 32))
@settings(max_examples=40, deadline=None)
def test_paper_training_scales_with_tokens_alone(model, prompts, group) -> None:  # type: ignore[no-untyped-def]
    work = replace(BASE, num_prompts=prompts, group_size=group)
    cluster = Cluster(accelerator=H100, num_gpus=64)
    train = step_account(model, work, cluster, PRESETS[0], rollout_tp=32).seconds.train
    assert train == pytest.approx(
        6 * model.active_params * work.trained_tokens / (64 * 989e12 * 0.4), rel=1e-9
    )


@given(model=models, assumptions=presets)
@settings(max_examples=20, deadline=None)
def test_utilisation_and_shares_are_fractions(model, assumptions) -> None:  # type: ignore[no-untyped-def]
    account = step_account(model, BASE, Cluster(accelerator=H100, num_gpus=512), assumptions, rollout_tp=32)
    assert 0 < account.mfu_frac < 1
    assert 0 <= account.tail_frac < 1
    assert all(0 <= idle < 1 for idle in account.idle_frac.values())
    assert account.step_s.low <= account.step_s.value <= account.step_s.high


@given(model=models, rows=st.floats(1, 512), context=st.floats(1, 60_000))
@settings(max_examples=60, deadline=None)
def test_decode_step_grows_with_rows_and_context(model, rows, context) -> None:  # type: ignore[no-untyped-def]
    cluster = Cluster(accelerator=H100, num_gpus=8)

    def seconds(num_rows: float, tokens: float) -> float:
        step = decode_step(
            model,
            cluster,
            PRESETS[1].decode,
            ReplicaLayout(tp_size=8),
            num_rows=num_rows,
            context_tokens=tokens,
        )
        return float(step.seconds)

    assert seconds(rows * 1.5, context) >= seconds(rows, context)
    assert seconds(rows, context * 1.5) >= seconds(rows, context)
    assert seconds(rows * 2, context) <= 2 * seconds(rows, context)


@given(mean_frac=st.floats(0.05, 0.95), sigma=st.floats(0.05, 1.5), limit=st.integers(64, 40_000))
@settings(max_examples=80, deadline=None)
def test_lengths_keep_their_mean_after_clipping(mean_frac: float, sigma: float, limit: int) -> None:
    lengths = LengthDistribution(limit, mean_frac * limit, sigma)
    at = (np.arange(4000) + 0.5) * limit / 4000
    alive = lengths.survival(at)
    assert float(alive.mean()) * limit == pytest.approx(lengths.mean_tokens, rel=0.01)
    assert (np.diff(alive) <= 1e-12).all()
    assert 0 <= lengths.clip_frac <= 1


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    slots=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_every_token_is_decoded_once_and_slots_are_never_exceeded(lengths: list[int], slots: int) -> None:
    curve = row_curve(np.array(lengths), slots)
    assert curve.rows.sum() == sum(lengths)
    assert curve.rows.max() <= slots
    assert curve.num_steps >= max(max(lengths), -(-sum(lengths) // slots))
    held = sum(n * (n - 1) / 2 for n in lengths)
    assert curve.response_tokens.sum() == held


@pytest.mark.parametrize("slots", [16, 48, 128])
@pytest.mark.parametrize("sigma", [0.3, 0.6, 1.0])
def test_expected_curve_agrees_with_drawn_schedules(slots: int, sigma: float) -> None:
    """Cost 1 a step plus 0.02 a row, mean of 20 draws of 128 sequences on one replica: within 6 %."""
    lengths = LengthDistribution(2048, 500.0, sigma)
    expected = generation_curve(
        lengths, prompt_tokens=0.0, num_sequences=128, num_replicas=1, num_slots=slots
    )
    seconds = float((expected.num_steps * (1 + 0.02 * expected.rows)).sum())
    drawn = []
    for seed in range(20):
        curve = row_curve(draw_lengths(lengths, 128, seed), slots)
        drawn.append(curve.num_steps + 0.02 * float(curve.rows.sum()))
    assert seconds == pytest.approx(float(np.mean(drawn)), rel=0.06)


@given(sigma=st.floats(0.05, 0.4))
@settings(max_examples=20, deadline=None)
def test_the_tail_grows_with_the_spread_until_the_limit_cuts_it(sigma: float) -> None:
    cluster = Cluster(accelerator=H100, num_gpus=64)
    narrow, wide = (
        step_account(
            load_model("Llama-3.1-8B"), replace(BASE, length_sigma=s), cluster, PRESETS[1]
        ).seconds.generate_tail
        for s in (sigma, sigma + 0.2)
    )
    assert wide >= narrow


@given(
    name=st.sampled_from(model_names()),
    gpu=st.sampled_from([name for name in accelerator_names() if "Ascend" not in name]),
    num_gpus=st.sampled_from([1, 2, 8, 64, 512]),
    lengths=st.sampled_from([(1, 1), (1, 32768), (100, 8192), (8000, 8000)]),
    prompts=st.sampled_from([1, 512]),
    sigma=st.sampled_from([0.0, 0.6, 1.5]),
    mode=st.sampled_from(MODES),
    assumptions=presets,
    turns=st.sampled_from([1.0, 5.5]),
)
@settings(max_examples=150, deadline=None)
def test_every_account_is_finite_and_adds_up(  # type: ignore[no-untyped-def]
    name, gpu, num_gpus, lengths, prompts, sigma, mode, assumptions, turns
) -> None:
    work = Workload(
        num_prompts=prompts,
        group_size=4,
        prompt_tokens=300,
        response_tokens=lengths[0],
        max_response_tokens=lengths[1],
        length_sigma=sigma,
        algorithm="ppo",
        reward="generative",
        agent=AgentWork(num_turns=turns, observation_tokens=200, env_s=1.0),
    )
    cluster = Cluster(accelerator=load_accelerator(gpu), num_gpus=2 * num_gpus)
    account = step_account(
        load_model(name),
        work,
        cluster,
        assumptions,
        mode=mode,
        num_rollout_gpus=num_gpus,
        num_train_gpus=num_gpus,
    )
    seconds = asdict(account.seconds)
    total = seconds.pop("total")
    assert all(np.isfinite(value) and value >= 0 for value in seconds.values())
    assert total > 0
    if mode != "separate_async":
        assert total == pytest.approx(sum(seconds.values()))
    assert account.fits == (not account.why_not)
