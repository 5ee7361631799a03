"""The algorithms' losses as the trainer really sums them: by hand, and the same however a mini batch is split."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from rollbook.algos.aggregate import LossCounts
from rollbook.algos.config import AlgorithmConfig
from rollbook.controller.objective import PolicyObjective
from rollbook.observe.values import Values
from rollbook.trainer.objective import MicroBatch
from rollbook.trainer.optimizer import UpdateReport
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence
from trainer_tiny import sequence, tiny_trainer


class Summed:
    """The real objective; adds up the shares that it hands to the trainer."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.inner = PolicyObjective(config, proximal_is_current=True)
        self.total, self.num_shares = 0.0, 0

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        loss, values = self.inner.loss(micro, logprobs, entropy, counts)
        self.total += loss.item()
        self.num_shares += 1
        return loss, values


def update(
    trainer: Trainer, sequences: list[TrainSequence], config: AlgorithmConfig
) -> tuple[Summed, dict[str, Tensor], Values]:
    """One mini batch without the optimizer's step: its objective, its gradient by name, and the metrics."""
    gradients: dict[str, Tensor] = {}

    def keep(lr: float | None = None) -> UpdateReport:
        held = trainer.optimizer.gradients()
        gradients.update({n: g.clone() for n, g in zip(trainer.optimizer.names, held, strict=True)})
        trainer.optimizer.clear()
        return UpdateReport(1.0, 0.0, is_applied=True, is_clipped=False, has_moved=True)

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    objective = Summed(config)
    values = trainer.update(batch, objective)
    return objective, gradients, values


TOKEN_MEAN = AlgorithmConfig(name="dapo")


def of_loss(num_tokens: int, loss: float, group_id: int, **more: object) -> TrainSequence:
    """With ratio 1 a token's loss is minus its advantage."""
    response = [(group_id + i) % 8 for i in range(num_tokens)]
    return sequence([1, 2], response, group_id=group_id, advantage=-loss, **more)  # type: ignore[arg-type]


def test_br079_six_tokens_of_loss_1_and_two_of_loss_3_make_a_loss_of_1_and_a_half() -> None:
    """(6 x 1 + 2 x 3) / 8 in two micro batches; means of means would give 2."""
    trainer = tiny_trainer(micro_batch_tokens=1, shuffle=False)
    objective, _, values = update(trainer, [of_loss(6, 1.0, 0), of_loss(2, 3.0, 1)], TOKEN_MEAN)
    assert objective.num_shares == 2
    assert objective.total == pytest.approx(1.5)
    assert values["actor/pg_loss"].result() == pytest.approx(1.5)


def test_br080_a_masked_response_leaves_numerator_and_denominator() -> None:
    """Responses of 4, 4 and 8 tokens of loss 1, the third masked: 8 / 8, not 8 / 16."""
    third = of_loss(8, 1.0, 2, loss_mask=[False] * 8)
    for budget in (1, 4096):
        trainer = tiny_trainer(micro_batch_tokens=budget)
        objective, _, _ = update(trainer, [of_loss(4, 1.0, 0), of_loss(4, 1.0, 1), third], TOKEN_MEAN)
        assert objective.total == pytest.approx(1.0)
    # A tool span of 3 tokens inside a response of 8: 5 tokens are left.
    span = [True] * 3 + [False] * 3 + [True] * 2
    objective, _, values = update(tiny_trainer(), [of_loss(8, 1.0, 0, loss_mask=span)], TOKEN_MEAN)
    assert objective.total == pytest.approx(1.0)
    assert values["actor/entropy"].denominator == 5  # type: ignore[union-attr]


def test_br080_a_batch_that_is_all_masked_makes_no_update_and_no_drift() -> None:
    trainer = tiny_trainer(weight_decay=0.1)
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    batch = trainer.make_batch(
        [of_loss(4, 1.0, n, loss_mask=[False] * 4) for n in range(3)], step=0, weight_version=0
    )
    values = trainer.update(batch, PolicyObjective(TOKEN_MEAN, proximal_is_current=True))
    assert values["trainer/actor_empty_updates"].result() == 1
    assert "actor/grad_norm" not in values
    assert all(tensor.equal(before[name]) for name, tensor in trainer.export_weights())


def six_sequences(draw: np.random.Generator) -> list[TrainSequence]:
    """Lengths 1 to 6, in groups of two that share a prompt."""
    return [
        sequence(
            [1 + n // 2, 2],
            draw.integers(0, 8, n + 1).tolist(),
            group_id=n // 2,
            member_idx=n % 2,
            advantage=float(draw.normal()),
        )
        for n in range(6)
    ]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "reinforce_pp"])
def test_br079_every_algorithm_has_one_gradient_for_every_split(name: str) -> None:
    """One micro batch, two, six, other orders, shared prompts or not: float64, equal to 1e-10."""
    config = AlgorithmConfig(name=name, entropy_coef=0.01)  # type: ignore[arg-type]
    sequences = six_sequences(np.random.default_rng(3))
    splits = [
        {"micro_batch_tokens": 4096},
        {"micro_batch_tokens": 18},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 18, "share_prompts": False},
        {"micro_batch_tokens": 18, "seed": 9},
    ]
    found = [update(tiny_trainer(float64=True, **split), sequences, config) for split in splits]
    assert [objective.num_shares for objective, _, _ in found][::2] == [1, 6, found[4][0].num_shares]
    whole = found[0][1]
    assert max(gradient.abs().max().item() for gradient in whole.values()) > 1e-3
    for objective, gradients, _ in found[1:]:
        assert objective.total == pytest.approx(found[0][0].total, abs=1e-10)
        for parameter, gradient in whole.items():
            assert (gradients[parameter] - gradient).abs().max().item() < 1e-10, parameter
