"""Ranks of one machine against one process: gradients, updates, checkpoints and exported bytes.

All facts come from two launches of real gloo ranks (2 and 3 processes); each test reads one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from torch import Tensor

import rollbook.trainer.export as export_module
import rollbook.trainer.trainer as trainer_module
from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate
from rollbook.errors import DataError
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import LoadedModel, wrap_transformers
from rollbook.observe.values import Total, Values
from rollbook.sync.bucket import Packer, SlotBuffers
from rollbook.trainer.config import CriticConfig, TrainerConfig
from rollbook.trainer.objective import MicroBatch, SupervisedObjective
from rollbook.trainer.packing import deal_micro_batches
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.trainer import Trainer
from rollbook.types import Floats, TrainSequence
from trainer_ranks import on_ranks
from trainer_tiny import groups, sequence, tiny_trainer

State = dict[str, Any]
ODD = {"tie_embeddings": False, "hidden_size": 20, "num_heads": 2, "intermediate_size": 33}
"""No dimension but the width is a multiple of 2."""
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "odd sizes, untied": {"model": ODD},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "checkpointed": {"gradient_checkpointing": True},
    "own critic": {"critic": CriticConfig(lr=1e-2), "with_reference": True},
    "shared critic": {"critic": CriticConfig(lr=1e-2, backbone="shared")},
}
FAMILIES = ("llama", "qwen3_moe", "mixtral")


@dataclass
class Surrogate:
    """-ratio x advantage and an entropy term, reduced by one of the aggregations; notes the logprobs it saw."""

    mode: str
    noted: dict[int, Floats] = field(default_factory=dict)
    num_calls: int = 0

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        assert entropy is not None
        self.num_calls += 1
        bounds = micro.cu_seqlens.tolist()
        for i, start, end in zip(micro.sequence_idx.tolist(), bounds, bounds[1:]):
            self.noted.setdefault(i, logprobs.detach()[start:end].numpy())
        per_token = -torch.exp(logprobs - micro.behavior_logprobs) * micro.advantages - 0.1 * entropy
        loss = aggregate(per_token, micro.loss_mask, micro.cu_seqlens, mode=self.mode, counts=counts)
        return loss, {"loss": Total(loss.item())}


class SquaredReturns:
    """A critic's loss."""

    def loss(self, micro: MicroBatch, values: Tensor, counts: LossCounts) -> tuple[Tensor, Values]:
        loss = (values - 1.0).square().where(micro.loss_mask, 0.0).sum() / counts.num_loss_tokens
        return loss, {}


def gradients(trainer: Trainer, sequences: list[TrainSequence], objective: Any) -> dict[str, Tensor]:
    """Of one mini batch, whole, on rank 0; the optimizer does not step."""
    held: dict[str, Tensor] = {}
    optimizer = trainer.optimizer

    def keep(lr: float | None = None) -> Any:
        for name, grad, parameter in zip(optimizer.names, optimizer.gradients(), optimizer.parameters):
            held[name] = trainer.ranks.whole(grad.clone(), parameter)
        raise StopIteration

    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    step, optimizer.step = optimizer.step, keep  # type: ignore[method-assign]
    try:
        trainer.update(batch, objective)
    except StopIteration:
        optimizer.clear()
    finally:
        optimizer.step = step  # type: ignore[method-assign]
    return held


def dealt(*ranks: list[list[int]]) -> Callable[..., list[list[list[int]]]]:
    """A division given by hand."""
    return lambda *args, **keywords: [list(micro_batches) for micro_batches in ranks]


def six() -> list[TrainSequence]:
    """Responses of 1 to 6 tokens."""
    rng = np.random.default_rng(3)
    return [
        sequence(
            [1, 2],
            rng.integers(0, 20, n).tolist(),
            group_id=n,
            advantage=float(rng.normal()),
        )
        for n in range(1, 7)
    ]


def long_and_short() -> list[TrainSequence]:
    """Five sequences that cost 45 tokens and five that cost 10."""
    rng = np.random.default_rng(4)
    return [
        sequence([1], rng.integers(0, 20, n).tolist(), group_id=i) for i, n in enumerate([45] * 5 + [10] * 5)
    ]


DIVISIONS = {
    "one each": dealt([[0, 1]], [[2, 3, 4, 5]]),
    "two each": dealt([[0], [1]], [[5, 2], [4, 3]]),
    "one rank has nothing": dealt([[3, 1, 0, 5], [2, 4]], [[], []]),
    "as the trainer deals": deal_micro_batches,
}
BUDGETS = {
    "five long against one micro batch of five": dealt(
        [[0], [1], [2], [3], [4]], [[5, 6, 7, 8, 9], [], [], [], []]
    ),
    "one rank has one sample": dealt([[0], [1]], [[5], []]),
    "one rank has none": dealt([[0], [1]], [[], []]),
}


def family(name: str) -> LoadedModel:
    """A tiny transformers model, seeded."""
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 21,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    experts = {"num_experts_per_tok": 2}
    if name == "llama":
        config: Any = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    elif name == "mixtral":
        config = transformers.MixtralConfig(**sizes, **experts, num_local_experts=3)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, **experts, num_experts=5, moe_intermediate_size=12)
    module = transformers.AutoModelForCausalLM.from_config(config)
    model = wrap_transformers(module.eval())
    model.set_attention("rollbook_packed")
    return model


def family_trainer(name: str, ranks: Ranks) -> Trainer:
    return Trainer(
        TrainerConfig(lr=1e-2, micro_batch_tokens=20),
        ModelConfig.model_validate({"new": {}}),
        model=family(name),
        max_response_tokens=16,
        ranks=ranks,
    )


def one_step(trainer: Trainer) -> dict[str, Any]:
    """Forward passes, two updates of the policy and of the critic; everything a caller sees."""
    batch = trainer.make_batch(groups(5, 3), step=1, weight_version=0)
    values = trainer.fill_proximal(batch)
    if trainer.reference is not None:
        values |= trainer.fill_reference(batch)
    objective = Surrogate("token_mean")
    values |= trainer.update(batch, objective)
    if trainer.critic is not None:
        trainer.fill_values(batch)
        values |= trainer.update_critic(batch, SquaredReturns())
    values |= trainer.update(batch, SupervisedObjective())
    return {
        "values": {n: v.result() for n, v in values.items() if not n.startswith("global_seqlen/")},
        "rank tokens": {n: v.result() for n, v in values.items() if n.startswith("global_seqlen/")},
        "logprobs": [s.proximal_logprobs for s in batch.sequences],
        "noted": objective.noted,
        "state": trainer.state_dict(),
        "export": {name: tensor.clone() for name, tensor in trainer.export_weights()},
    }


@dataclass
class Meter:
    """Bytes that an export has taken and not given back."""

    live: int = 0
    peak: int = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        num_bytes = tensor.numel() * tensor.element_size()
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        finalize(tensor.untyped_storage(), self.give_back, num_bytes)
        return tensor

    def give_back(self, num_bytes: int) -> None:
        self.live -= num_bytes


def shared_buffer_bytes(trainer: Trainer, gather_bytes: int) -> int:
    """Of an export of the evenly divided tensors; `gather_bytes` may be less than a config allows. When a backend lets
    go of a gather's tensors is its own affair, so what is taken is counted, not what is held."""
    taken: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        taken.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=device)

    plain, export_module.allocate = export_module.allocate, allocate
    try:
        tensors = trainer.model.named_tensors()
        even = {name: t for name, t in tensors.items() if t.shape[0] % trainer.ranks.size == 0}
        list(export_module.gathered(even, trainer.ranks, trainer.export_dtype, gather_bytes))
    finally:
        export_module.allocate = plain
    rows, bucket, *_ = taken
    return rows + bucket


def publication(trainer: Trainer, bucket_bytes: int) -> dict[str, Any]:
    """An export through the publisher's packer: digests, and the peak of live gathered bytes."""
    meter = Meter()
    plain, export_module.allocate = export_module.allocate, meter.allocate
    try:
        packer = Packer(
            specs={spec.name: spec for spec in trainer.weight_specs()},
            stream=iter(trainer.export_weights()),
            weight_version=1,
            bucket_bytes=bucket_bytes,
            buffers=SlotBuffers(),
        )
        num_buckets = sum(1 for _ in packer.buckets())
        digests = dict(packer.digests())
    finally:
        export_module.allocate = plain
    sizes = [spec.num_bytes for spec in trainer.weight_specs()]
    return {
        "digests": digests,
        "peak": meter.peak,
        "num_buckets": num_buckets,
        "largest": max(sizes),
        "bytes": sum(sizes),
    }


def resumed(ranks: Ranks, state: State) -> State:
    """The state after one more update from `state`."""
    trainer = tiny_trainer(ranks=ranks, model=ODD, critic=CriticConfig(lr=1e-2), with_reference=True)
    trainer.load_state_dict(state)
    batch = trainer.make_batch(groups(4, 2, seed=8), step=2, weight_version=1)
    trainer.update(batch, SupervisedObjective())
    trainer.update_critic(batch, SquaredReturns())
    return trainer.state_dict()


def beginning() -> State:
    trainer = tiny_trainer(model=ODD, critic=CriticConfig(lr=1e-2), with_reference=True)
    one_step(trainer)
    return trainer.state_dict()


def facts(ranks: Ranks, state: State) -> dict[str, Any]:
    """Everything the tests below compare, from this rank."""
    out: dict[str, Any] = {"gradients": {}, "calls": {}, "steps": {}, "families": {}}
    plain = trainer_module.deal_micro_batches
    trainer = tiny_trainer(ranks=ranks, float64=True, share_prompts=False, micro_batch_tokens=12)
    for name, division in {**DIVISIONS, **BUDGETS}.items():
        if ranks.is_alone and name != "as the trainer deals":
            continue
        trainer_module.deal_micro_batches = division
        for mode in AGGREGATIONS if name in DIVISIONS else ["token_mean"]:
            objective = Surrogate(mode)
            given = six() if name in DIVISIONS else long_and_short()
            if name == "one rank has one sample":
                given = [s for i, s in enumerate(given) if i in (0, 1, 5)]
                trainer_module.deal_micro_batches = dealt([[0], [1]], [[2], []])
            if name == "one rank has none":
                given = given[:2]
            out["gradients"][name, mode] = gradients(trainer, given, objective)
            if name in BUDGETS:
                calls = []
                hook = trainer.model.module.base_model.register_forward_hook(  # type: ignore[union-attr,operator]
                    lambda *_, calls=calls: calls.append(1)
                )
                batch = trainer.make_batch(given, step=0, weight_version=0)
                trainer.fill_proximal(batch)
                hook.remove()
                out["calls"][name] = len(calls)
    trainer_module.deal_micro_batches = plain
    for name, keywords in MODELS.items():
        made = tiny_trainer(
            ranks=ranks, micro_batch_tokens=20, num_mini_batches=2, gather_bytes=4096, **keywords
        )
        out["steps"][name] = one_step(made)
        if name == "bfloat16":
            made.load_state_dict(beginning_of(keywords))
            out["publication"] = publication(made, 4096)
            out["shared buffers"] = shared_buffer_bytes(made, 600) if ranks.size > 1 else 0
    for name in FAMILIES:
        out["families"][name] = one_step(family_trainer(name, ranks))
    out["resumed"] = resumed(ranks, state)
    return out


def beginning_of(keywords: dict[str, Any]) -> State:
    return tiny_trainer(**keywords).state_dict()


def disagreement(ranks: Ranks) -> str:
    trainer = tiny_trainer(ranks=ranks)
    batch = trainer.make_batch(groups(2 + ranks.rank, 2), step=1, weight_version=0)
    with pytest.raises(DataError) as raised:
        trainer.update(batch, SupervisedObjective())
    return str(raised.value)


def two_ranks(ranks: Ranks, state: State) -> dict[str, Any]:
    return facts(ranks, state) | {"disagreement": disagreement(ranks)}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return facts(ALONE, beginning())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(tmp_path_factory.mktemp("ranks"), 2, two_ranks, beginning(), timeout_s=120)


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        yield name, float((tensor.double() - theirs[name].double()).abs().max())


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    for name, difference in compared(ours, theirs):
        assert difference <= atol, (name, difference)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("division", list(DIVISIONS))
def test_br079_a_gradient_does_not_depend_on_the_rank_or_micro_batch_of_a_token(
    one: dict[str, Any], two: list[dict[str, Any]], division: str, mode: str
) -> None:
    whole = one["gradients"]["as the trainer deals", mode]
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    same(two[0]["gradients"][division, mode], whole, 1e-10)


@pytest.mark.parametrize("name", list(BUDGETS))
def test_br126_ranks_with_less_to_do_compute_as_often_as_the_others_and_add_nothing(
    two: list[dict[str, Any]], name: str
) -> None:
    rounds = 5 if "five" in name else 2
    assert [rank["calls"][name] for rank in two] == [rounds, rounds]
    given = long_and_short()
    chosen = {"five long against one micro batch of five": range(10), "one rank has one sample": (0, 1, 5)}
    trainer = tiny_trainer(float64=True, share_prompts=False)
    whole = gradients(trainer, [given[i] for i in chosen.get(name, (0, 1))], Surrogate("token_mean"))
    same(two[0]["gradients"][name, "token_mean"], whole, 1e-10)


@pytest.mark.parametrize("name", list(MODELS))
def test_two_ranks_train_as_one_process_does(
    one: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    ours, theirs = two[0]["steps"][name], one["steps"][name]
    # bfloat16 gradients round before they are summed, and four steps of AdamW move by at most 1e-2 either way
    atol = 8e-2 if name == "bfloat16" else 2e-5
    for i, row in enumerate(ours["logprobs"]):
        np.testing.assert_allclose(row, theirs["logprobs"][i], atol=1e-6)
        np.testing.assert_allclose(row, two[1]["steps"][name]["logprobs"][i], atol=0)
        np.testing.assert_allclose(ours["noted"][i], theirs["noted"][i], atol=2 * atol)
    for role in ("policy", "critic"):
        if role in theirs["state"]:
            same(ours["state"][role]["masters"], theirs["state"][role]["masters"], atol)
    assert set(ours["values"]) == set(theirs["values"])
    for metric in ("loss", "actor/grad_norm", "warmup/loss"):
        assert ours["values"][metric] == pytest.approx(
            theirs["values"][metric], rel=0.02 if atol > 1e-3 else 1e-5
        )
    alone, divided = theirs["rank tokens"], ours["rank tokens"]
    assert alone["global_seqlen/max"] == alone["global_seqlen/min"] == 2 * divided["global_seqlen/mean"]
    spread = divided["global_seqlen/max"] - divided["global_seqlen/min"]
    assert divided["global_seqlen/minmax_diff"] == spread
    assert two[1]["steps"][name]["values"] == ours["values"], "every rank reports the same"


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_models_and_mixtures_are_divided_like_ours(
    one: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    ours, theirs = two[0]["families"][name], one["families"][name]
    same(ours["state"]["policy"]["masters"], theirs["state"]["policy"]["masters"], 5e-5)
    same(ours["export"], theirs["export"], 5e-5)
    loads = [metric for metric in theirs["values"] if metric.startswith("rollout/moe/")]
    assert len(loads) == (0 if name == "llama" else 3 * (2 + 2)), "two layers, their largest and their mean"
    for metric in loads:  # a token or two may fall to another expert where rounding decides
        assert ours["values"][metric] == pytest.approx(theirs["values"][metric], abs=0.2)
        assert ours["values"][metric] == two[1]["families"][name]["values"][metric]


def test_the_gathered_export_has_the_digests_of_one_process_and_two_buckets_at_most(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    ours, theirs = two[0]["publication"], one["publication"]
    assert ours["digests"] == theirs["digests"] == two[1]["publication"]["digests"]
    assert ours["num_buckets"] > 2
    bucket_bytes = max(4096, ours["largest"])
    assert bucket_bytes <= ours["peak"] <= 2 * bucket_bytes + ours["largest"]  # and the tensor in hand
    assert theirs["peak"] == 0, "one process gathers nothing"


def test_a_tensor_larger_than_a_bucket_is_gathered_into_its_own_memory(two: list[dict[str, Any]]) -> None:
    assert two[0]["publication"]["largest"] > 600
    assert two[0]["shared buffers"] <= 600


def test_a_checkpoint_is_resumed_by_any_number_of_ranks(
    one: dict[str, Any], two: list[dict[str, Any]], tmp_path: Path
) -> None:
    three = on_ranks(tmp_path / "three", 3, resumed, beginning(), timeout_s=120)
    for ours in (two[0]["resumed"], three[0]):
        for role in ("policy", "critic"):
            for part in ("masters", "means", "mean_squares"):
                same(ours[role][part], one["resumed"][role][part], 2e-5)
            assert ours[role]["num_updates"] == one["resumed"][role]["num_updates"]
        same(ours["reference"], one["resumed"]["reference"], 0)
    again = resumed(ALONE, two[0]["resumed"])
    same(again["policy"]["masters"], resumed(ALONE, one["resumed"])["policy"]["masters"], 5e-5)


def test_ranks_that_were_given_different_batches_all_say_so(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "the ranks do not agree on actor of step 1" in rank["disagreement"]
        assert "rank 0: [1, 4," in rank["disagreement"] and "rank 1: [1, 6," in rank["disagreement"]
