"""Mini batches, resume, precision, critic, reference and export of the trainer."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.algos.aggregate import LossCounts
from rollbook.errors import CheckpointError, ConfigError, DataError
from rollbook.observe.values import Ratio, Values
from rollbook.trainer.config import CriticConfig
from rollbook.trainer.objective import MicroBatch, SupervisedObjective
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence
from trainer_tiny import groups, sequence, tiny_config, tiny_trainer


@dataclass
class SquaredError:
    """The critic's loss: mean squared distance to the returns."""

    def loss(self, micro: MicroBatch, values: Tensor, counts: LossCounts) -> tuple[Tensor, Values]:
        assert micro.returns is not None
        total = ((values - micro.returns).square()).where(micro.loss_mask, 0.0).sum()
        share = total / counts.num_loss_tokens
        return share, {"critic/vf_loss": Ratio(total.item(), int(micro.loss_mask.sum()))}


class PolicyGradient:
    """-logprob x advantage, token mean."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        total = -(logprobs * micro.advantages).where(micro.loss_mask, 0.0).sum()
        return total / counts.num_loss_tokens, {}


def _steps(trainer: Trainer, steps: range) -> None:
    for step in steps:
        batch = trainer.make_batch(groups(3, 2, seed=step), step=step, weight_version=step)
        trainer.update(batch, PolicyGradient())
        if trainer.critic is not None:
            for member in batch.sequences:
                member.returns = np.where(member.action_mask, 0.5, 0.0).astype(np.float32)
            trainer.update_critic(batch, SquaredError())


def test_mini_batches_hold_each_sequence_once_an_epoch_with_groups_together() -> None:
    trainer = tiny_trainer(num_mini_batches=3, num_epochs=2)
    sequences = groups(6, 2)
    batch = trainer.make_batch(sequences, step=4, weight_version=4)
    assert trainer.num_updates_per_step == len(batch.mini_batches) == 6
    for epoch in (batch.mini_batches[:3], batch.mini_batches[3:]):
        assert sorted(i for part in epoch for i in part) == list(range(12))
        for part in epoch:
            assert len({sequences[i].group_id for i in part}) == 2  # four sequences, two whole groups
    assert batch.mini_batches[:3] != batch.mini_batches[3:]


def test_filters_may_leave_fewer_sequences_than_mini_batches() -> None:
    trainer = tiny_trainer(num_mini_batches=8)
    batch = trainer.make_batch(groups(1, 3), step=0, weight_version=0)
    assert sorted(batch.mini_batches) == [[0], [1], [2]]


def test_the_shuffle_is_a_function_of_seed_and_step() -> None:
    def order(seed: int, step: int, shuffle: bool = True) -> list[list[int]]:
        trainer = tiny_trainer(num_mini_batches=2, seed=seed, shuffle=shuffle)
        return trainer.make_batch(groups(8, 2), step=step, weight_version=0).mini_batches

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1, shuffle=False) == [list(range(8)), list(range(8, 16))]


def test_a_resumed_run_is_the_unbroken_run_bit_for_bit() -> None:
    def make() -> Trainer:
        return tiny_trainer(
            model={"dtype": "bfloat16"},
            critic=CriticConfig(lr=1e-2),
            with_reference=True,
            num_mini_batches=2,
            schedule="linear",
            num_updates=12,
        )

    unbroken, first, resumed = make(), make(), make()
    _steps(unbroken, range(6))
    _steps(first, range(3))
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    _steps(resumed, range(3, 6))
    ours, theirs = resumed.state_dict(), unbroken.state_dict()
    assert ours["policy"]["num_updates"] == theirs["policy"]["num_updates"] == 12
    for role in ("policy", "critic"):
        for part in ("masters", "means", "mean_squares"):
            for name, tensor in theirs[role][part].items():
                assert torch.equal(ours[role][part][name], tensor), (role, part, name)
    for (name, tensor), (_, other) in zip(resumed.export_weights(), unbroken.export_weights()):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_tried_after_keeping_the_state_leaves_no_bit_behind(dtype: str, num_before: int) -> None:
    """Updates with a learning rate, of policy and critic, before the first step and on a resume."""

    def make() -> Trainer:
        return tiny_trainer(model={"dtype": dtype}, critic=CriticConfig(lr=1e-2), num_mini_batches=2)

    trainer, undisturbed = make(), make()
    for each in (trainer, undisturbed):
        _steps(each, range(num_before))
    trainer.keep_state()
    _steps(trainer, range(10, 12))
    trainer.put_back_state()
    for each in (trainer, undisturbed):
        _steps(each, range(num_before, num_before + 2))
    ours, theirs = trainer.state_dict(), undisturbed.state_dict()
    for role in ("policy", "critic"):
        assert ours[role]["num_updates"] == theirs[role]["num_updates"]
        for part in ("masters", "means", "mean_squares"):
            for name, tensor in theirs[role][part].items():
                assert torch.equal(ours[role][part][name], tensor), (role, part, name)


def test_the_state_survives_a_checkpoint_on_disk(tmp_path: Path) -> None:
    from rollbook.checkpoint.checkpoint import commit_checkpoint, prepare_checkpoint

    trainer, again = tiny_trainer(with_reference=True), tiny_trainer(with_reference=True)
    _steps(trainer, range(2))
    prepare_checkpoint(tmp_path, 2, {}, {"trainer": trainer.write_state})
    again.read_state(commit_checkpoint(tmp_path, 2, keep=1))
    _steps(trainer, range(2, 3))
    _steps(again, range(2, 3))
    for (name, tensor), (_, other) in zip(trainer.export_weights(), again.export_weights()):
        assert torch.equal(tensor, other), name


def test_another_rank_than_the_first_writes_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    """They have one folder and one name for it: the last to write would leave its own rows."""
    trainer = tiny_trainer()
    trainer.ranks = SimpleNamespace(rank=1)  # type: ignore[assignment]
    assert not trainer.write_state(tmp_path).sha256
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_the_reference_the_run_needs_is_refused() -> None:
    state = tiny_trainer().state_dict()
    with pytest.raises(CheckpointError, match="has no reference"):
        tiny_trainer(with_reference=True).load_state_dict(state)


def test_bfloat16_compute_stays_close_to_float32() -> None:
    """Logprobs within 0.1 nat on average 0.02; the first update moves the masters the same way (cosine > 0.99)."""
    sequences = groups(4, 4, seed=2)
    moved: dict[str, list[Tensor]] = {}
    logprobs: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        trainer = tiny_trainer(
            model={"dtype": dtype, "initializer_range": 0.15}, max_grad_norm=0.0, beta1=0.0, eps=1.0
        )
        batch = trainer.make_batch(copy.deepcopy(sequences), step=0, weight_version=0)
        trainer.fill_proximal(batch)
        logprobs[dtype] = [
            x
            for s in batch.sequences
            if s.proximal_logprobs is not None
            for x in s.proximal_logprobs[s.action_mask]
        ]
        before = [m.clone() for m in trainer.optimizer.masters]
        trainer.update(batch, PolicyGradient())
        moved[dtype] = [m - b for m, b in zip(trainer.optimizer.masters, before)]
    difference = np.abs(np.array(logprobs["float32"]) - np.array(logprobs["bfloat16"]))
    assert difference.max() < 0.1
    assert difference.mean() < 0.02
    ours, theirs = (torch.cat([m.flatten() for m in moved[d]]) for d in ("bfloat16", "float32"))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_gradient_checkpointing_changes_no_gradient() -> None:
    results = []
    for checkpointing in (False, True):
        trainer = tiny_trainer(gradient_checkpointing=checkpointing)
        _steps(trainer, range(2))
        results.append([m.clone() for m in trainer.optimizer.masters])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_critic_learns_returns_and_leaves_the_policy_alone(backbone: str) -> None:
    critic = CriticConfig.model_validate({"lr": 0.05, "backbone": backbone})
    trainer = tiny_trainer(critic=critic, temperature=0.8)
    policy = {n: t.clone() for n, t in trainer.export_weights()}
    sequences = groups(4, 2, seed=1)
    for member in sequences:
        value = member.group_id / 4
        member.returns = np.where(member.action_mask, value, 0.0).astype(np.float32)
    losses = []
    for step in range(40):
        batch = trainer.make_batch(sequences, step=step, weight_version=0)
        losses.append(trainer.update_critic(batch, SquaredError())["critic/vf_loss"].result())
    assert losses[-1] < (0.01 if backbone == "own" else 0.5) * losses[0]
    for name, tensor in trainer.export_weights():
        assert torch.equal(tensor, policy[name]), name


def test_values_stand_on_action_tokens_and_come_from_the_state_before() -> None:
    """The same tokens before an action give the same value, whatever the action is."""
    trainer = tiny_trainer(critic=CriticConfig())
    assert trainer.critic is not None
    torch.nn.init.normal_(trainer.critic.head)
    batch = trainer.make_batch(
        [sequence([1, 2], [3, 4], group_id=0), sequence([1, 2], [3, 9], group_id=1)], step=0, weight_version=0
    )
    trainer.fill_values(batch)
    first, second = (s.values for s in batch.sequences)
    assert first is not None
    assert second is not None
    assert not first[:2].any()
    assert first[2:].all()
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_the_reference_stays_where_the_run_began() -> None:
    trainer = tiny_trainer(with_reference=True)
    batch = trainer.make_batch(groups(2, 2), step=0, weight_version=0)
    trainer.fill_reference(batch)
    before = [s.reference_logprobs for s in batch.sequences]
    for _ in range(3):
        trainer.update(batch, PolicyGradient())
    trainer.fill_reference(batch)
    trainer.fill_proximal(batch)
    for old, member in zip(before, batch.sequences):
        assert old is not None
        assert member.reference_logprobs is not None
        np.testing.assert_array_equal(old, member.reference_logprobs)
    moved = [np.abs(s.proximal_logprobs - old).max() for old, s in zip(before, batch.sequences)]  # type: ignore[operator]
    assert max(moved) > 0.01
    trainer.freeze_reference()
    trainer.fill_reference(batch)
    for member in batch.sequences:
        np.testing.assert_array_equal(member.proximal_logprobs, member.reference_logprobs)  # type: ignore[arg-type]


def test_the_policy_follows_the_advantages() -> None:
    trainer = tiny_trainer()
    good = sequence([1, 2], [3], group_id=0, member_idx=0, advantage=1.0)
    bad = sequence([1, 2], [4], group_id=0, member_idx=1, advantage=-1.0)
    batch = trainer.make_batch([good, bad], step=0, weight_version=0)
    trainer.fill_proximal(batch)
    before = [float(s.proximal_logprobs[2]) for s in batch.sequences]  # type: ignore[index]
    for _ in range(5):
        trainer.update(batch, PolicyGradient())
    trainer.fill_proximal(batch)
    after = [float(s.proximal_logprobs[2]) for s in batch.sequences]  # type: ignore[index]
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


@pytest.mark.parametrize(
    ("compute", "export"), [("float32", None), ("bfloat16", None), ("float32", "bfloat16")]
)
def test_export_gives_every_tensor_once_in_the_engines_dtype(compute: str, export: str | None) -> None:
    trainer = tiny_trainer(model={"dtype": compute, "tie_embeddings": True}, export_dtype=export)
    specs, tensors = trainer.weight_specs(), dict(trainer.export_weights())
    assert [s.name for s in specs] == list(tensors)
    assert "lm_head.weight" not in tensors  # tied: once, under the embedding's name
    for spec in specs:
        tensor = tensors[spec.name]
        assert str(tensor.dtype) == f"torch.{spec.dtype}" == f"torch.{export or compute}"
        assert (tuple(tensor.shape), tensor.nbytes) == (spec.shape, spec.num_bytes)
        assert not tensor.requires_grad
        if export is None:
            assert tensor.data_ptr() == trainer.model.named_tensors()[spec.name].data_ptr()  # no copy


def test_exported_weights_follow_the_updates() -> None:
    trainer = tiny_trainer(model={"dtype": "bfloat16"})
    before = {n: t.clone() for n, t in trainer.export_weights()}
    _steps(trainer, range(2))
    masters = dict(zip(trainer.optimizer.names, trainer.optimizer.masters))
    for name, tensor in trainer.export_weights():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16))
        assert not torch.equal(tensor, before[name])


def test_a_poisoned_update_is_skipped_counted_and_leaves_the_policy() -> None:
    class Poison(PolicyGradient):
        def loss(
            self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
        ) -> tuple[Tensor, Values]:
            loss, values = super().loss(micro, logprobs, entropy, counts)
            return loss * float("nan"), values

    trainer = tiny_trainer()
    before = {n: t.clone() for n, t in trainer.export_weights()}
    batch = trainer.make_batch(groups(2, 2), step=0, weight_version=0)
    values = trainer.update(batch, Poison())
    assert values["trainer/actor_skipped_updates"].result() == 1
    assert "actor/grad_norm" not in values
    for name, tensor in trainer.export_weights():
        assert torch.equal(tensor, before[name])


def test_an_objective_that_raises_leaves_no_gradient_behind() -> None:
    class Broken(PolicyGradient):
        calls = 0

        def loss(
            self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
        ) -> tuple[Tensor, Values]:
            self.calls += 1
            if self.calls == 2:
                raise DataError("a logprob is not finite", "look at it")
            return super().loss(micro, logprobs, entropy, counts)

    trainer = tiny_trainer(micro_batch_tokens=1)
    batch = trainer.make_batch(groups(2, 2), step=0, weight_version=0)
    with pytest.raises(DataError):
        trainer.update(batch, Broken())
    assert not any(g.any() for g in trainer.optimizer.gradients())


def test_metrics_carry_verl_names() -> None:
    trainer = tiny_trainer(num_mini_batches=2, lr=0.5, max_grad_norm=1e-6)
    batch = trainer.make_batch(groups(2, 2), step=0, weight_version=0)
    values = trainer.update(batch, SupervisedObjective())
    assert values["actor/lr"].result() == 0.5
    assert values["actor/grad_norm"].result() > 0
    assert values["actor/grad_clipped_frac"].result() == 1.0
    assert values["trainer/actor_updates"].result() == 2


def _with(member: TrainSequence, **changes: object) -> TrainSequence:
    for name, value in changes.items():
        setattr(member, name, value)
    return member


def test_batches_that_cannot_be_trained_are_refused_with_values() -> None:
    trainer = tiny_trainer(num_mini_batches=2)
    cases: list[tuple[list[TrainSequence], str]] = [
        ([], "step 3 has no sequences"),
        (
            [sequence([1], [2] * 70), sequence([1], [2])],
            "sequence 0/0 has 71 tokens and the model's context 64",
        ),
        ([sequence([1], [200]), sequence([1], [2])], "token ids from 1 to 200 and the model 21 embeddings"),
        (
            [_with(sequence([1], [2]), loss_mask=np.array([True, True])), sequence([1], [2])],
            "loss tokens that the policy did not sample",
        ),
    ]
    for sequences, message in cases:
        with pytest.raises(DataError, match=message):
            trainer.make_batch(sequences, step=3, weight_version=3)


def test_what_the_trainer_was_not_made_with_is_refused() -> None:
    trainer = tiny_trainer()
    batch = trainer.make_batch(groups(1, 2), step=0, weight_version=0)
    with pytest.raises(ConfigError, match="no reference"):
        trainer.fill_reference(batch)
    with pytest.raises(ConfigError, match="no critic"):
        trainer.fill_values(batch)
    with pytest.raises(ConfigError, match="temperature 0"):
        tiny_trainer(temperature=0.0)


def test_a_policy_saved_after_training_computes_what_was_trained(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    _steps(trainer, range(2))
    trainer.model.save(tmp_path, dict(zip(trainer.optimizer.names, trainer.optimizer.masters)))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    again = tiny_trainer()
    again.model.module.load_state_dict(_load(tmp_path), strict=False)
    batch = trainer.make_batch(groups(1, 2), step=0, weight_version=0)
    other = again.make_batch(groups(1, 2), step=0, weight_version=0)
    trainer.fill_proximal(batch)
    again.fill_proximal(other)
    for ours, theirs in zip(batch.sequences, other.sequences):
        np.testing.assert_array_equal(ours.proximal_logprobs, theirs.proximal_logprobs)  # type: ignore[arg-type]


def _load(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def test_initial_weights_are_a_function_of_the_seed() -> None:
    from rollbook.modeling.load import load_model

    one, two = (load_model(tiny_config()).named_tensors() for _ in range(2))
    other = load_model(tiny_config().model_copy(update={"seed": 6})).named_tensors()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
