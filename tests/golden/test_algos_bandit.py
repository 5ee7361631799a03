"""Every preset learns: the whole path from rewards to a gradient step, on a bandit whose answer is known.

A softmax policy over 5 arms, episodes of 2 action tokens around an observation. The reward is the share of tokens
that chose arm 3, so the best policy earns 1 and the uniform one 0.2. The teacher prefers arm 3 likewise.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollbook.algos.advantage import estimate_advantages
from rollbook.algos.aggregate import loss_counts
from rollbook.algos.config import PRESETS, AlgorithmConfig
from rollbook.algos.correction import correct
from rollbook.algos.policy import PolicyTensors, policy_objective
from rollbook.types import TrainSequence

ARMS, BEST, GROUPS, MEMBERS = 5, 3, 4, 8
TEACHER = torch.log_softmax(torch.tensor([0.0, 0, 0, 6, 0]), 0)
ACTIONS = np.array([False, True, False, True])


def sample(logits: torch.Tensor, draw: torch.Generator) -> list[TrainSequence]:
    logprobs = torch.log_softmax(logits.detach(), 0)
    sequences = []
    for group_id in range(GROUPS):
        for member_idx in range(MEMBERS):
            arms = torch.multinomial(logprobs.exp(), 2, replacement=True, generator=draw)
            token_ids = np.zeros(4, np.int32)
            token_ids[ACTIONS] = arms.numpy()

            def on_actions(values: torch.Tensor, arms: torch.Tensor = arms) -> np.ndarray:
                spread = np.zeros(4, np.float32)
                spread[ACTIONS] = values[arms].numpy()
                return spread

            sequences.append(
                TrainSequence(
                    group_id=group_id,
                    member_idx=member_idx,
                    source="bandit",
                    token_ids=token_ids,
                    action_mask=ACTIONS,
                    loss_mask=ACTIONS.copy(),
                    behavior_logprobs=on_actions(logprobs),
                    proximal_logprobs=on_actions(logprobs),
                    reference_logprobs=on_actions(torch.log_softmax(torch.zeros(ARMS), 0)),
                    teacher_logprobs=on_actions(TEACHER),
                    values=np.full(4, 0.2, np.float32),
                    reward=float((arms == BEST).float().mean()),
                    oldest_version=0,
                )
            )
    return sequences


def tensors(sequences: list[TrainSequence], logits: torch.Tensor) -> PolicyTensors:
    def packed(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))

    weights = packed("importance_weights") if sequences[0].importance_weights is not None else None
    return PolicyTensors(
        logprobs=torch.log_softmax(logits, 0)[packed("token_ids").long()],
        loss_mask=packed("loss_mask"),
        action_mask=packed("action_mask"),
        cu_seqlens=torch.arange(0, 4 * len(sequences) + 1, 4),
        advantages=packed("advantages"),
        behavior_logprobs=packed("behavior_logprobs"),
        proximal_logprobs=packed("proximal_logprobs"),
        importance_weights=weights,
        reference_logprobs=packed("reference_logprobs"),
        teacher_logprobs=packed("teacher_logprobs"),
    )


def learn(config: AlgorithmConfig, *, num_steps: int = 25) -> float:
    """Probability of the best arm after training."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(ARMS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    for _ in range(num_steps):
        sequences = sample(logits, draw)
        if config.correction.is_on and config.proximal == "recompute":
            correct(sequences, config.correction)
        estimate_advantages(sequences, config)
        for half in (sequences[::2], sequences[1::2]):  # two mini batches: the second has ratios other than 1
            batch = tensors(half, logits)
            counts = loss_counts(batch.loss_mask, batch.cu_seqlens, max_response_tokens=2)
            loss, _ = policy_objective(batch, config, counts)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return float(torch.softmax(logits.detach(), 0)[BEST])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns_the_bandit(name: str) -> None:
    assert learn(AlgorithmConfig.model_validate({"name": name})) > 0.9


@pytest.mark.parametrize(
    "fields",
    [
        {"correction": {"level": "token"}},
        {"correction": {"level": "sequence", "mode": "mask"}},
        {"correction": {"reject": {"statistic": "sequence_mean", "upper_nats": 0.1}}},
        {"proximal": "behavior"},
        {"proximal": "behavior", "loss": "reinforce", "correction": {"level": "token"}},
        {"estimator": "none", "scale": "none", "distill": {"placement": "loss", "coef": 1.0}},
    ],
)
def test_corrections_and_bypass_learn_it_too(fields: dict[str, object]) -> None:
    assert learn(AlgorithmConfig.model_validate(fields)) > 0.9


def test_a_strong_kl_holds_the_policy_at_the_reference() -> None:
    """Uniform reference, coefficient 10 reward units per nat: the best arm stays near 0.2."""
    for placement, estimator in (("loss", "k2"), ("reward", "k1")):
        kl = {"placement": placement, "estimator": estimator, "coef": 10.0}
        assert learn(AlgorithmConfig.model_validate({"scale": "none", "kl": kl})) < 0.35
