"""The worked cases of the paper account. Expected figures are worked by hand from the account's own rules."""

from __future__ import annotations

import pytest

from rollbook.ledger.account import StepAccount
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.step import step_account
from rollbook.ledger.workload import Mode, Workload


def account(
    model: str,
    *,
    num_gpus: int,
    group_size: int = 16,
    prompt_tokens: int = 500,
    response_tokens: int = 8192,
    max_response_tokens: int = 32768,
    tp: int = 0,
    mode: Mode = "sync",
    split: tuple[int, int] = (0, 0),
    gpu: str = "H100",
    algorithm: str = "grpo",
    reward: str = "rule",
) -> StepAccount:
    workload = Workload(
        num_prompts=512,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        max_response_tokens=max_response_tokens,
        algorithm=algorithm,  # type: ignore[arg-type]
        reward=reward,  # type: ignore[arg-type]
    )
    return step_account(
        load_model(model),
        workload,
        Cluster(accelerator=load_accelerator(gpu), num_gpus=num_gpus),
        load_assumptions("paper"),
        mode=mode,
        rollout_tp=tp,
        num_rollout_gpus=split[0],
        num_train_gpus=split[1],
    )


@pytest.mark.parametrize(
    ("model", "gpus", "group", "prompt", "response", "limit", "tp", "expected"),
    [
        ("Llama-3-8B", 16, 8, 300, 1024, 4096, 1, (111.3, 0.287, 256, 21.5, 46.6, 24.5, 22.0, 41.3)),
        ("Llama-3-8B", 64, 16, 500, 8192, 32768, 1, (810.1, 0.133, 92, 35.6, 601.7, 196.4, 72.3, 135.5)),
        ("Qwen3-32B", 64, 16, 500, 8192, 32768, 2, (2407.3, 0.182, 65, 35.8, 1556.1, 401.0, 295.2, 553.5)),
    ],
)
def test_worked_cases(
    model: str,
    gpus: int,
    group: int,
    prompt: int,
    response: int,
    limit: int,
    tp: int,
    expected: tuple[float, ...],
) -> None:
    result = account(
        model,
        num_gpus=gpus,
        group_size=group,
        prompt_tokens=prompt,
        response_tokens=response,
        max_response_tokens=limit,
        tp=tp,
    )
    seconds = result.seconds
    step, mfu, slots, decode_ms, generate, tail, forward, train = expected
    assert seconds.total == pytest.approx(step, abs=0.06)
    assert result.mfu_frac == pytest.approx(mfu, abs=0.0006)
    assert result.rollout.slots_per_replica == slots
    assert 1e3 * result.rollout.decode_step_s == pytest.approx(decode_ms, abs=0.06)
    assert seconds.generate_throughput + seconds.generate_tail == pytest.approx(generate, abs=0.06)
    assert seconds.generate_tail == pytest.approx(tail, abs=0.06)
    assert seconds.forward == pytest.approx(forward, abs=0.06)
    assert seconds.train == pytest.approx(train, abs=0.06)


def test_stages_add_up_to_the_step() -> None:
    seconds = account("Llama-3-8B", num_gpus=64).as_json()["seconds"]
    assert isinstance(seconds, dict)
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)


def test_separate_async_is_the_larger_side() -> None:
    """42 rollout GPUs need 64/42 of the colocated throughput seconds; the tail is filled by the next step."""
    result = account("Llama-3-8B", num_gpus=64, mode="separate_async", split=(42, 22))
    assert result.seconds.total == pytest.approx(617, abs=1.5)
    assert result.mfu_frac == pytest.approx(0.17, abs=0.005)
    assert result.idle_frac["rollout"] == pytest.approx(0.0)
    assert result.idle_frac["train"] > 0


def test_32b_on_128_gpus_loses_over_a_third_of_generation_to_the_tail() -> None:
    result = account("Qwen3-32B", num_gpus=128, prompt_tokens=1024, tp=2)
    assert result.seconds.total == pytest.approx(1500, rel=0.01)
    assert result.tail_frac == pytest.approx(0.38, abs=0.005)


def test_32b_on_128_gpus_separated_trains_for_longer_than_it_generates() -> None:
    """80 : 48 is bound by training: 450 s of forward and training on 128 GPUs, times 128/48."""
    result = account(
        "Qwen3-32B", num_gpus=128, prompt_tokens=1024, tp=2, mode="separate_async", split=(80, 48)
    )
    assert result.seconds.total == pytest.approx(1170, rel=0.03)
    assert result.mfu_frac == pytest.approx(0.20, abs=0.01)


def test_671b_on_384_to_128_is_refused_for_its_training_state() -> None:
    result = account(
        "DeepSeek-V3", num_gpus=512, prompt_tokens=1024, tp=32, mode="separate_async", split=(384, 128)
    )
    assert not result.fits
    assert "10.7 TB" in result.why_not[0] and "at least 150" in result.why_not[0]


def test_671b_fits_when_the_train_side_holds_its_state() -> None:
    assert account("DeepSeek-V3", num_gpus=512, tp=32, mode="separate_async", split=(352, 160)).fits


def test_expert_model_computes_with_active_and_reads_all_parameters() -> None:
    """37e9 x 2 FLOPs a token; 671e9 x 2 bytes of weights on 32 GPUs in every decode step, tail included."""
    result = account("DeepSeek-V3", num_gpus=512, prompt_tokens=1024, tp=32)
    assert result.flops.generate == pytest.approx(2 * 37e9 * 8192 * 8192)
    assert result.seconds.generate_tail == pytest.approx(24576 * 2 * 671e9 / (32 * 3.35e12 * 0.6))


def test_ppo_adds_a_critic_of_8n_and_its_state() -> None:
    """8N over prompt and response: 2N at forward MFU, 6N at training MFU, and 16 B per parameter more."""
    plain = account("Llama-3-8B", num_gpus=64)
    ppo = account("Llama-3-8B", num_gpus=64, algorithm="ppo")
    tokens = 8192 * 8692
    assert ppo.flops.critic == pytest.approx(8 * 8.03e9 * tokens)
    assert ppo.seconds.train == pytest.approx(2 * plain.seconds.train)
    assert ppo.seconds.forward == pytest.approx(1.5 * plain.seconds.forward)
    assert ppo.memory["critic_state_bytes_per_gpu"] == pytest.approx(16 * 8.03e9 / 64)
    # Hand-over both ways: 18 B of the policy and 16 B of the critic over 25 GB/s a GPU.
    assert plain.seconds.switch == pytest.approx(2 * 18 * 8.03e9 / 64 / 25e9)
    assert ppo.seconds.switch == pytest.approx(2 * 34 * 8.03e9 / 64 / 25e9)


def test_reward_model_is_one_more_forward_of_the_policys_size() -> None:
    plain = account("Llama-3-8B", num_gpus=64)
    scored = account("Llama-3-8B", num_gpus=64, reward="model")
    assert scored.flops.reward_model == pytest.approx(plain.flops.reference)
    assert scored.seconds.forward == pytest.approx(1.5 * plain.seconds.forward)
    assert plain.memory["reward_model_bytes_per_gpu"] == 0
    assert scored.memory["reward_model_bytes_per_gpu"] == pytest.approx(2 * 8.03e9 / 64)


def test_memory_of_the_first_case() -> None:
    memory = account(
        "Llama-3-8B",
        num_gpus=16,
        group_size=8,
        prompt_tokens=300,
        response_tokens=1024,
        max_response_tokens=4096,
    ).memory
    assert memory["weights_bytes"] == pytest.approx(16.06e9)
    assert memory["train_state_bytes"] == pytest.approx(128.48e9)
    assert memory["train_state_bytes_per_gpu"] == pytest.approx(8.03e9)
    assert memory["kv_bytes_per_token"] == 131_072
    assert memory["kv_total_bytes"] == pytest.approx(4096 * 812 * 131_072)


def test_json_has_the_keys_that_others_read() -> None:
    step = account("Llama-3-8B", num_gpus=64).as_json()
    assert set(step["flops"]) == {
        "generate", "prefill", "reference", "proximal", "reward_model", "train", "critic", "total",
    }  # fmt: skip
    assert {
        "generate_throughput", "generate_tail", "prefill", "forward", "train", "switch", "sync", "total",
    } <= set(step["seconds"])  # fmt: skip
    assert {
        "num_replicas", "slots_per_replica", "num_waves", "decode_step_s", "tokens_per_s_per_gpu", "mfu_frac",
    } <= set(step["decode"])  # fmt: skip
    assert {
        "weights_bytes", "train_state_bytes", "train_state_bytes_per_gpu", "reference_bytes_per_gpu",
        "rollout_weights_bytes_per_gpu", "kv_bytes_per_token", "kv_total_bytes",
    } <= set(step["memory"])  # fmt: skip
    assert step["decode"]["num_waves"] == 2  # ceil(8192 / (64 x 92))
