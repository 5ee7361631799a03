"""Gradients of a mini batch: the same however it is split, and equal to finite differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate
from rollbook.modeling.attention import packed_layout
from rollbook.observe.values import Ratio, Values
from rollbook.trainer.objective import MicroBatch, SupervisedObjective
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence
from trainer_tiny import groups, sequence, tiny_trainer


@dataclass
class Surrogate:
    """-ratio x advantage and an entropy term, reduced by one of the aggregations."""

    mode: str
    losses: float = 0.0
    """Sum of the shares."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        assert entropy is not None
        per_token = -torch.exp(logprobs - micro.behavior_logprobs) * micro.advantages - 0.1 * entropy
        loss = aggregate(per_token, micro.loss_mask, micro.cu_seqlens, mode=self.mode, counts=counts)
        self.losses += loss.item()
        return loss, {}


class Ones:
    """A loss of 1 on each loss token."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        ones = (logprobs * 0 + 1).where(micro.loss_mask, 0.0).sum()
        share = ones / max(counts.num_loss_tokens, 1)
        return share, {"loss": Ratio(share.item(), 0)}


def gradients(trainer: Trainer, sequences: list[TrainSequence], objective: Surrogate) -> dict[str, Tensor]:
    """Of one mini batch; the optimizer does not step."""
    held: dict[str, Tensor] = {}

    def keep(lr: float | None = None) -> object:
        held.update((n, g.clone()) for n, g in zip(trainer.optimizer.names, trainer.optimizer.gradients()))
        raise StopIteration

    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    step, trainer.optimizer.step = trainer.optimizer.step, keep  # type: ignore[assignment, method-assign]
    try:
        trainer.update(batch, objective)
    except StopIteration:
        trainer.optimizer.clear()
    finally:
        trainer.optimizer.step = step  # type: ignore[method-assign]
    return held


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    assert set(ours) == set(theirs)
    assert any(g.abs().max() > 1e-4 for g in theirs.values())
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("model", [{}, {"architecture": "qwen3", "num_kv_heads": 1}], ids=["llama", "qwen3"])
def test_gradients_do_not_depend_on_micro_batches_order_or_shared_prompts(
    mode: str, model: dict[str, object]
) -> None:
    """BR-079: one micro batch, several, one a sequence, shuffled, shared prompts or not; 1e-10 in float64."""
    sequences = groups(3, 2, seed=1)
    sequences[1].loss_mask[:] = False  # a masked sequence leaves numerator and denominator
    sequences[4].loss_mask[-1:] = False
    base = gradients(
        tiny_trainer(
            float64=True, model=model, micro_batch_tokens=10_000, share_prompts=False, shuffle=False
        ),
        sequences,
        Surrogate(mode),
    )
    for budget in (10_000, 25, 1):
        for share_prompts in (True, False):
            for order in (sequences, sequences[::-1]):
                trainer = tiny_trainer(
                    float64=True,
                    model=model,
                    micro_batch_tokens=budget,
                    share_prompts=share_prompts,
                    logprob_chunk_tokens=3,
                    keep_logits_mib=int(share_prompts),
                )
                assert_same(gradients(trainer, order, Surrogate(mode)), base, 1e-10)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_shares_of_two_ranks_add_up_to_the_whole(mode: str) -> None:
    """BR-079, BR-126: lengths 1-2 on one rank, 3-6 on the other, and a third rank with nothing but a filler."""
    sequences = [sequence([1, 2], list(range(3, 3 + n)), group_id=n, advantage=n - 2.5) for n in range(1, 7)]
    whole = gradients(tiny_trainer(float64=True), sequences, Surrogate(mode))
    total: dict[str, Tensor] = {}
    for members in ([0, 1], [2, 3, 4, 5], []):
        trainer = tiny_trainer(float64=True)
        batch = trainer.make_batch(sequences, step=0, weight_version=0)
        counts = trainer._counts(sequences, range(6))
        inputs, micro = trainer._pack(batch, members)
        logprobs, entropy = trainer._predict(trainer.model, inputs, with_entropy=True)
        assert entropy is not None
        whole_row = torch.zeros(micro.action_mask.shape[0], dtype=torch.float64)
        spread = [whole_row.index_copy(0, inputs.token_positions, v) for v in (logprobs, entropy)]
        loss, _ = Surrogate(mode).loss(micro, spread[0], spread[1], counts)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, grad in zip(trainer.optimizer.names, trainer.optimizer.gradients()):
            total[name] = total[name] + grad if name in total else grad
    assert_same(total, whole, 1e-10)


def test_gradients_agree_with_finite_differences_through_the_model() -> None:
    sequences = groups(2, 2, seed=3)
    trainer = tiny_trainer(float64=True, temperature=0.7)
    grads = gradients(trainer, sequences, Surrogate("token_mean"))
    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    generator = torch.Generator().manual_seed(0)

    def loss() -> float:
        objective = Surrogate("token_mean")
        trainer.optimizer.step = lambda lr=None: _nothing()  # type: ignore[assignment, method-assign]
        trainer.update(batch, objective)
        trainer.optimizer.clear()
        return objective.losses

    for name, parameter in zip(trainer.optimizer.names, trainer.optimizer.parameters):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-5 / direction.norm()
        weights = parameter.detach()
        weights.add_(direction, alpha=float(step))
        up = loss()
        weights.sub_(direction, alpha=2 * float(step))
        down = loss()
        weights.add_(direction, alpha=float(step))
        slope = (up - down) / (2 * float(step))
        assert slope == pytest.approx(float((grads[name] * direction).sum()), rel=1e-5, abs=1e-7), name


def _nothing() -> object:
    from rollbook.trainer.optimizer import UpdateReport

    return UpdateReport(0.0, 0.0, is_applied=True, is_clipped=False, has_moved=True)


def _loss_of_ones(trainer: Trainer, sequences: list[TrainSequence]) -> float:
    values = trainer.update(trainer.make_batch(sequences, step=0, weight_version=0), Ones())
    loss = values["loss"]
    assert isinstance(loss, Ratio)
    return loss.numerator


def test_masked_tokens_leave_the_denominator() -> None:
    """BR-080 case 1 and 3: answers of 4, 4, 8 tokens, the third masked; then a span of 3 masked. Loss 1, not 0.5."""
    prompt = [1, 2]
    third = [False] * 8
    answers = [
        sequence(prompt, [3] * 4, group_id=0),
        sequence(prompt, [4] * 4, group_id=1),
        sequence(prompt, [5] * 8, group_id=2, loss_mask=third),
    ]
    assert _loss_of_ones(tiny_trainer(), answers) == pytest.approx(1.0)
    assert _loss_of_ones(tiny_trainer(micro_batch_tokens=1), answers) == pytest.approx(1.0)
    answers[2].loss_mask[2:] = [True, False, False, False, True, True, True, True]
    assert _loss_of_ones(tiny_trainer(), answers) == pytest.approx(1.0)


def test_a_batch_whose_tokens_are_all_masked_moves_nothing() -> None:
    """BR-080 case 2: no 0/0, no drift by momentum or weight decay; the tokens still count as generated."""
    trainer = tiny_trainer(weight_decay=0.1)
    sequences = groups(2, 2)
    trainer.update(trainer.make_batch(sequences, step=0, weight_version=0), Ones())
    before = copy.deepcopy(trainer.state_dict())
    for member in sequences:
        member.loss_mask[:] = False
    batch = trainer.make_batch(sequences, step=1, weight_version=1)
    values = trainer.update(batch, Surrogate("token_mean"))
    assert {n: v.result() for n, v in values.items()} == {
        "trainer/actor_micro_batches": 0,
        "trainer/actor_empty_updates": 1,
    }
    assert batch.num_tokens == sum(len(s.token_ids) for s in sequences)
    after = trainer.state_dict()
    for part in ("masters", "means", "mean_squares"):
        for name, tensor in after["policy"][part].items():
            assert torch.equal(tensor, before["policy"][part][name])


def test_two_micro_batches_of_six_and_two_tokens_give_the_token_mean() -> None:
    """BR-079 by hand: 6 tokens of loss 1 and 2 tokens of loss 3 give (6 + 6) / 8 = 1.5, not (1 + 3) / 2 = 2."""

    class ByGroup:
        def loss(
            self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
        ) -> tuple[Tensor, Values]:
            amount = 1.0 if int(micro.loss_mask.sum()) == 6 else 3.0
            total = (logprobs * 0 + amount).where(micro.loss_mask, 0.0).sum() / counts.num_loss_tokens
            return total, {"loss": Ratio(total.item(), 0)}

    trainer = tiny_trainer(micro_batch_tokens=1)
    sequences = [sequence([1], [2] * 6, group_id=0), sequence([1], [2] * 2, group_id=1)]
    values = trainer.update(trainer.make_batch(sequences, step=0, weight_version=0), ByGroup())
    loss = values["loss"]
    assert isinstance(loss, Ratio)
    assert loss.numerator == pytest.approx(1.5)


def _by_definition(trainer: Trainer, member: TrainSequence, temperature: float) -> Tensor:
    """[n - 1] ln p of tokens 1, 2, ...: log softmax of all logits over the temperature that sampled them."""
    ids = torch.from_numpy(member.token_ids).long()
    layout, positions = packed_layout([0, len(ids)]), torch.arange(len(ids))
    with torch.no_grad():
        hidden = trainer.model.hidden_states(ids[None], positions[None], packed=layout)[0]
        logits = trainer.model.lm_head().logits(hidden)[:-1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[1:, None])[:, 0]


def _alone(trainer: Trainer, member: TrainSequence) -> np.ndarray:
    batch = trainer.make_batch([member], step=0, weight_version=0)
    trainer.fill_proximal(batch)
    assert member.proximal_logprobs is not None
    return member.proximal_logprobs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_every_scoring_path_gives_the_same_logprobs(temperature: float) -> None:
    """BR-061, BR-066: proximal, reference and current agree to 1e-5 before any update, packed or alone, and are
    those of the distribution that the engine samples from."""
    trainer = tiny_trainer(temperature=temperature, with_reference=True)
    sequences = groups(3, 2)
    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    trainer.fill_proximal(batch)
    trainer.fill_reference(batch)
    seen: dict[int, Tensor] = {}

    class Note:
        def loss(
            self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
        ) -> tuple[Tensor, Values]:
            bounds = micro.cu_seqlens.tolist()
            for i, start, end in zip(micro.sequence_idx.tolist(), bounds, bounds[1:]):
                seen[i] = logprobs.detach()[start:end]
            return logprobs.sum() * 0, {}

    trainer.update(batch, Note())
    fresh = tiny_trainer(temperature=temperature)
    for i, member in enumerate(batch.sequences):
        assert member.proximal_logprobs is not None
        assert member.reference_logprobs is not None
        np.testing.assert_allclose(member.proximal_logprobs, member.reference_logprobs, atol=1e-5)
        np.testing.assert_allclose(member.proximal_logprobs, seen[i].numpy(), atol=1e-5)
        np.testing.assert_allclose(member.proximal_logprobs, _alone(fresh, copy.deepcopy(member)), atol=1e-5)
        defined = _by_definition(trainer, member, temperature).where(
            torch.from_numpy(member.action_mask[1:]), 0.0
        )
        np.testing.assert_allclose(member.proximal_logprobs[1:], defined, atol=1e-5)
        assert not member.proximal_logprobs[~member.action_mask].any()
        assert (member.proximal_logprobs[member.action_mask] < 0).all()


def test_supervised_updates_learn_the_answers() -> None:
    """Loss in nats a token falls from ln 21 (about 3) to under 0.05 on four fixed answers."""
    trainer = tiny_trainer(model={"initializer_range": 0.05, "hidden_size": 32})
    sequences = [sequence([i, i + 1], [i + 5, i + 9, 2], group_id=i) for i in range(4)]
    step: Callable[[int], Values] = lambda i: trainer.update(
        trainer.make_batch(sequences, step=i, weight_version=i), SupervisedObjective()
    )
    first = step(0)["warmup/loss"].result()
    for i in range(1, 60):
        last = step(i)["warmup/loss"].result()
    assert first == pytest.approx(np.log(21), abs=0.3)
    assert last < 0.05
