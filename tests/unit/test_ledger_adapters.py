"""Adapters alone in the books, and environments with a slow tail: figures worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rollbook.errors import PlanError
from rollbook.ledger.adapters import lora_params, policy_state_bytes, trained_params
from rollbook.ledger.agents import env_sigma
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.checkpoint import checkpoint_account
from rollbook.ledger.flops import default_flops
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.memory import memory_items, train_memory
from rollbook.ledger.model import load_model
from rollbook.ledger.residence import Residence
from rollbook.ledger.step import Layouts, step_account
from rollbook.ledger.workload import AgentWork, Workload
from rollbook.planner.options import PlanOptions
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search
from rollbook.planner.simulate import simulate

DEFAULT = load_assumptions("default")
CLUSTER = Cluster(accelerator=load_accelerator("H100"), num_gpus=8)
LLAMA = load_model("Llama-3.1-8B")
WORK = Workload(
    num_prompts=64, group_size=16, prompt_tokens=500, response_tokens=2000, max_response_tokens=8192
)
ADAPTERS = replace(WORK, lora_rank=16)
NUM_ADAPTERS = 41_943_040
"""32 layers x 16 x (q, o: 2 (4096 + 4096); k, v: 2 (4096 + 1024); feed-forward: 3 (4096 + 14336))."""


def test_adapters_of_every_matrix() -> None:
    assert lora_params(LLAMA, 16) == NUM_ADAPTERS
    assert trained_params(LLAMA, ADAPTERS) == NUM_ADAPTERS
    assert trained_params(LLAMA, WORK) == LLAMA.params


def test_a_token_passes_only_its_own_experts_adapters() -> None:
    """Qwen3-30B-A3B: 128 experts of which 8 are active; attention is the same in both."""
    moe = load_model("Qwen3-30B-A3B")
    per_expert = 48 * 3 * (2048 + 768)
    assert lora_params(moe, 1) - lora_params(moe, 1, active_only=True) == 120 * per_expert


def test_a_frozen_base_has_weights_and_no_state() -> None:
    """2 B x 8.03e9 of base and 16 B x 41.9e6 of adapters, where all weights take 16 B x 8.03e9."""
    assert policy_state_bytes(LLAMA, ADAPTERS, DEFAULT) == 2 * LLAMA.params + 16 * NUM_ADAPTERS
    memory = train_memory(LLAMA, ADAPTERS, DEFAULT, num_gpus=8, layout=TrainLayout(lora=True))
    assert memory.policy_state == pytest.approx((2 * LLAMA.params + 16 * NUM_ADAPTERS) / 8)
    assert memory.reference == 0  # the base without its adapters


def test_the_items_of_a_frozen_base_add_up_to_its_state() -> None:
    account = step_account(LLAMA, ADAPTERS, CLUSTER, DEFAULT, rollout_tp=1)
    items = memory_items(
        LLAMA, ADAPTERS, CLUSTER, DEFAULT, rollout=account.rollout, train=account.train,
        layout=TrainLayout(lora=True), waits_on_host=True,
    )  # fmt: skip
    of = {item.name: item.bytes for item in items if item.place == "train device"}
    assert of["gradients"] == 2 * NUM_ADAPTERS / 8
    state = of["weights"] + of["gradients"] + of["master weights"] + of["optimizer moments"]
    assert state == pytest.approx(account.train.train_state_bytes_per_gpu)


def test_frozen_matrices_have_no_weight_gradient() -> None:
    """Training of all weights is 6 N a token and three times attention; a frozen N saves 2, adapters cost 6."""
    whole, adapters = default_flops(LLAMA, WORK), default_flops(LLAMA, ADAPTERS)
    saved = (2 * LLAMA.matmul_params - 6 * NUM_ADAPTERS) * WORK.trained_tokens
    assert adapters.train == pytest.approx(whole.train - saved)
    assert adapters.reference == whole.reference  # a forward of the base, whoever owns it


def test_a_step_with_adapters_trains_and_hands_over_less() -> None:
    layouts = Layouts(replica=ReplicaLayout(), train=TrainLayout(lora=True))
    whole = step_account(LLAMA, WORK, CLUSTER, DEFAULT, rollout_tp=1)
    adapters = step_account(LLAMA, ADAPTERS, CLUSTER, DEFAULT, layouts=layouts)
    alone = step_account(LLAMA, replace(ADAPTERS, publishes_adapters=True), CLUSTER, DEFAULT, layouts=layouts)
    # 3 of 4 passes over the matrices; attention and memory-bound operators stay.
    assert 0.75 < adapters.seconds.train / whole.seconds.train < 0.95
    assert adapters.seconds.switch < whole.seconds.switch
    assert adapters.seconds.sync == whole.seconds.sync  # merged: whole weights
    assert alone.seconds.sync < adapters.seconds.sync


def test_a_checkpoint_of_adapters_leaves_the_base_out() -> None:
    """14 B x 41.9e6 = 0.59 GB where all weights are 112 GB, and a critic twice that."""
    total = {
        work: checkpoint_account(
            LLAMA, work, CLUSTER, num_train_gpus=8, storage_bytes_per_s=2e9, step_s=100, every_steps=10,
            is_async=False,
        ).total_bytes
        for work in (WORK, ADAPTERS, replace(WORK, algorithm="ppo"))
    }  # fmt: skip
    assert list(total.values()) == [14 * LLAMA.params, 14 * NUM_ADAPTERS, 28 * LLAMA.params]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"lora_rank": -1}, "below 0"),
        ({"lora_rank": 8, "algorithm": "ppo"}, "whole second model"),
        ({"publishes_adapters": True}, "none train"),
    ],
)
def test_what_cannot_be_meant_of_adapters(changes: dict[str, object], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        replace(WORK, **changes)  # type: ignore[arg-type]


# -- environments


def agents(num_sequences: int, *, sigma: float, length_sigma: float = 0.0, turns: float = 2.0) -> Workload:
    """Trajectories with `turns` turns and environments of 10 s on average."""
    p99_s = 10 * math.exp(2.3263 * sigma - sigma**2 / 2) if sigma else 0.0
    return Workload(
        num_prompts=1, group_size=num_sequences, prompt_tokens=10, response_tokens=1000,
        max_response_tokens=1000 if length_sigma == 0 else 8000, length_sigma=length_sigma,
        agent=AgentWork(num_turns=turns, env_s=10, env_p99_s=p99_s),
    )  # fmt: skip


def test_the_spread_follows_from_mean_and_99th_percentile() -> None:
    """p99 / mean = exp(2.326 s - s² / 2): s = 1 at 6.21."""
    assert env_sigma(10.0, 0.0, 62.1) == pytest.approx(1.0, abs=0.002)
    assert env_sigma(10.0, 0.0, 10.0) == env_sigma(10.0, 0.0, 0.0) == 0.0


def residence(work: Workload, step_s: float = 1e-3) -> Residence:
    """Engines whose decode step takes as long whatever runs."""
    return Residence(workload=work, rows=np.array([1.0, 1e4]), step_s=np.array([step_s, step_s]))


def wait_s(work: Workload, *, longest_s: float, slots: float = 1e9, replicas: int = 1) -> float:
    """By how much the last one ends after the longest response, which takes `longest_s`."""
    token_s = longest_s / work.lengths().expected_max(work.num_sequences)
    per_replica = work.num_sequences / replicas
    stay = residence(work, token_s).stay(per_replica=per_replica, num_slots=slots, num_replicas=replicas)
    return stay.last_s - longest_s


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0])
def test_two_members_wait_for_the_slower_environment(sigma: float) -> None:
    """The larger of two log-normals of mean m is 2 m Phi(s / sqrt 2) on average: at s = 1, 15.2 s of 10 s."""
    expected_s = 20 * 0.5 * math.erfc(-sigma / 2)
    assert wait_s(agents(2, sigma=sigma), longest_s=5.0) == pytest.approx(expected_s, rel=0.02)


def test_without_spread_the_wait_is_the_mean_of_all_calls() -> None:
    assert wait_s(agents(512, sigma=0.0, turns=4), longest_s=100.0) == pytest.approx(30.0, abs=0.2)


@pytest.mark.parametrize(("turns", "sigma"), [(3.0, 0.7), (5.0, 1.2), (2.5, 0.8)])
def test_the_slowest_of_thousands_lies_in_the_tail_of_the_sum_of_its_calls(
    turns: float, sigma: float
) -> None:
    """Against 200 drawn steps of 2,048 trajectories; a log-normal of mean and variance would be a tenth too short."""
    work = agents(2048, sigma=sigma, length_sigma=0.6, turns=turns)
    rng, lengths = np.random.default_rng(0), work.lengths()
    token_s = 20.0 / lengths.expected_max(2048)
    decode_s = lengths.quantile(rng.random((200, 2048))) * token_s
    calls = rng.lognormal(math.log(10) - sigma**2 / 2, sigma, (200, 2048, 5))
    number = np.where(rng.random((200, 2048)) < (turns - 1) % 1, math.floor(turns), math.floor(turns - 1))
    env_s = (calls * (np.arange(5) < number[..., None])).sum(2)
    drawn_s = float((decode_s + env_s).max(1).mean())
    assert wait_s(work, longest_s=20.0) + 20.0 == pytest.approx(drawn_s, rel=0.03)
    assert drawn_s > float(env_s.max(1).mean())


def test_a_slot_that_is_held_through_calls_keeps_the_next_one_waiting_for_a_whole_stay() -> None:
    """12 stays of 1 s of decoding and 30 s of calls in 8 slots end after two; with slots given back, after one."""
    work = agents(12, sigma=0.0, turns=4)
    kept = wait_s(work, longest_s=1.0, slots=8)
    lost = wait_s(replace(work, agent=replace(work.agent, keeps_prefix=False)), longest_s=1.0, slots=8)
    assert kept + 1.0 == pytest.approx(62.0, rel=0.02) and lost + 1.0 == pytest.approx(31.0, rel=0.02)


def test_engines_work_as_long_as_any_trajectory_of_theirs_decodes() -> None:
    """One of two seconds of every stay of 31 s: alone it decodes a thirtieth of the time, beside 500 others always."""
    one, many = (residence(agents(n, sigma=0.0, turns=4)) for n in (1, 500))
    assert float(one.live(31.0)) == pytest.approx(1.0, rel=0.01)
    stays = [r.stay(per_replica=n, num_slots=1e9, num_replicas=1) for r, n in ((one, 1), (many, 500))]
    assert stays[0].busy_s == pytest.approx(1.0, rel=0.05)
    assert stays[1].busy_s == pytest.approx(stays[1].last_s, rel=0.01)


@pytest.mark.parametrize("env_s", [20.0, 60.0])
def test_closed_form_and_simulation_agree_on_agents(env_s: float) -> None:
    """Slots held through calls, a queue before them, the slowest of 512 environments: step within 8 %, and what
    engines stand idle within 8 points."""
    request = PlanOptions(
        model="Qwen3-8B", num_gpus="8", prompts="64", group_size="8", response_tokens="2k", max_response_tokens="8k",
        turns=5, observation_tokens="256", env_seconds=env_s, env_p99_seconds=3 * env_s, rollout_tp=4,
    ).request()  # fmt: skip
    found = Search(request).candidate("sync", 8, 8)
    result = simulate(scenario_of(request, found, num_steps=30))
    assert found.step_s == pytest.approx(result.step_s, rel=0.08)
    assert found.account.idle_frac["rollout"] == pytest.approx(result.rollout_idle_frac, abs=0.08)
