"""Adapters: what is trained, what is published, what the engine computes with, and what the reference is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollbook.controller.startable import unstartable
from rollbook.errors import CheckpointError, ConfigError
from rollbook.modeling.attention import packed_layout
from rollbook.modeling.config import LoraConfig, ModelConfig
from rollbook.modeling.load import load_model, wrap_transformers
from rollbook.modeling.lora import adapted, adapter_tensors, add_adapters, without_adapters
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.objective import SupervisedObjective
from rollbook.trainer.trainer import Trainer
from tiny_run import TINY, RunResult, resume_tiny, run_tiny, tiny_config
from trainer_tiny import groups
from trainer_tiny import tiny_config as tiny_model

RANK, ALPHA = 4, 8.0


def lora_trainer(*, publish: str = "merged", dtype: str = "float32", **more: Any) -> Trainer:
    lora = {"rank": RANK, "alpha": ALPHA, "publish": publish}
    config = ModelConfig.model_validate(tiny_model(dtype=dtype).model_dump() | {"lora": lora})
    return Trainer(
        TrainerConfig(lr=1e-2), config, with_reference=True, temperature=1.0, max_response_tokens=16, **more
    )


def update(trainer: Trainer, num_updates: int = 1) -> None:
    for step in range(num_updates):
        batch = trainer.make_batch(groups(2, 3, seed=step), step=step, weight_version=step)
        trainer.update(batch, SupervisedObjective())


def copies(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_tensors().items()}


def test_an_untrained_adapter_is_zero_beside_the_loaded_weights() -> None:
    plain, held = load_model(tiny_model()).named_tensors(), lora_trainer().model
    adapters = adapter_tensors(held)
    assert len(adapters) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    assert all(not tensor.any() for name, tensor in adapters.items() if name.endswith("lora_B"))
    assert all(torch.equal(tensor, held.named_tensors()[name]) for name, tensor in plain.items())


def test_an_update_moves_the_adapters_and_nothing_else() -> None:
    trainer = lora_trainer()
    before = copies(trainer)
    update(trainer, 2)
    adapters = adapter_tensors(trainer.model)
    for name, tensor in trainer.model.named_tensors().items():
        assert torch.equal(tensor, before[name]) == (name not in adapters), name
        assert tensor.grad is None
    assert set(trainer.optimizer.names) == set(adapters)  # no moments of the base


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_base_plus_scaled_product(dtype: str) -> None:
    trainer = lora_trainer(dtype=dtype)
    update(trainer, 2)
    live = trainer.model.named_tensors()
    exported = dict(trainer.export_weights())
    assert (
        [spec.name for spec in trainer.weight_specs()]
        == list(exported)
        == list(load_model(tiny_model()).named_tensors())
    )
    for name, tensor in exported.items():
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_A" not in live:
            assert torch.equal(tensor, live[name])
            continue
        a, b = live[f"{owner}.lora_A"].double(), live[f"{owner}.lora_B"].double()
        wanted = live[name].double() + ALPHA / RANK * (b @ a)
        ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
        assert torch.allclose(tensor.double(), wanted, rtol=ulp, atol=1e-6)
        assert not torch.equal(tensor, live[name])


def test_adapters_alone_are_a_small_publication() -> None:
    trainer = lora_trainer(publish="adapter")
    update(trainer)
    exported = dict(trainer.export_weights())
    assert list(exported) == list(adapter_tensors(trainer.model)) == [s.name for s in trainer.weight_specs()]
    assert sum(spec.num_bytes for spec in trainer.weight_specs()) == 4 * RANK * sum(
        layer.in_features + layer.out_features for layer in adapted(trainer.model.module).values()
    )


def test_the_reference_is_the_base_and_costs_no_second_copy_of_it() -> None:
    trainer = lora_trainer()
    reference = trainer.reference
    assert reference is not None and reference.module is trainer.model.module
    plain = Trainer(TrainerConfig(), tiny_model(), temperature=1.0, max_response_tokens=16)
    update(trainer, 3)
    sequences = groups(2, 3, seed=9)
    batch = trainer.make_batch(sequences, step=0, weight_version=0)
    trainer.fill_reference(batch)
    trainer.fill_proximal(batch)
    wanted = plain.make_batch(groups(2, 3, seed=9), step=0, weight_version=0)
    plain.fill_proximal(wanted)
    gaps = []
    for ours, base in zip(batch.sequences, wanted.sequences, strict=True):
        assert ours.reference_logprobs is not None and base.proximal_logprobs is not None
        np.testing.assert_allclose(ours.reference_logprobs, base.proximal_logprobs, atol=1e-6)
        assert ours.proximal_logprobs is not None
        gaps.append(np.abs(ours.proximal_logprobs - ours.reference_logprobs).max())
    assert max(gaps) > 0.01
    trainer.freeze_reference()
    trainer.fill_reference(batch)
    for ours in batch.sequences:
        np.testing.assert_array_equal(ours.reference_logprobs, ours.proximal_logprobs)


def test_a_model_without_adapters_is_a_view_of_the_base() -> None:
    trainer = lora_trainer()
    plain = without_adapters(trainer.model)
    assert not adapted(plain.module) and adapted(trainer.model.module)
    live = trainer.model.named_tensors()
    for name, tensor in plain.named_tensors().items():
        assert tensor.data_ptr() == live[name].data_ptr(), name


def test_a_target_that_is_no_layer_is_named() -> None:
    config = tiny_model().model_copy(update={"lora": LoraConfig(targets=("q_projj",))})
    with pytest.raises(ConfigError, match="'q_projj'.*\n.*q_proj"):
        load_model(config)


LORA = {"rank": RANK, "alpha": ALPHA}


def lora_run(folder: Path, publish: str, *, num_steps: int = 3, **overrides: Any) -> RunResult:
    model = {**TINY["model"], "lora": {**LORA, "publish": publish}}
    return run_tiny(folder, num_steps=num_steps, config={"model": model}, **overrides)


@pytest.mark.parametrize("every_steps", [1, 2, 4])
@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_br005_every_publication_delivers_the_adapters(
    publish: str, every_steps: int, tmp_path: Path
) -> None:
    """Over a transport between two sides: each push after the first holds what has moved, and the gap stays at its
    floor, which it would not if an adapter were dropped on the way; whatever the interval of the pushes."""
    ahead = {
        "run.schedule": "separate_async",
        "buffer.max_staleness_steps": every_steps - 1,
        "sync.every_steps": every_steps,
    }
    num_steps = 3 if every_steps == 1 else 4
    run = lora_run(tmp_path, publish, num_steps=num_steps, **{"sync.transport": "broadcast", **ahead})
    publications = run.events_of("publication")
    assert [event["weight_version"] for event in publications] == list(range(1 + num_steps // every_steps))
    for event in publications[1:]:
        assert event["changed_frac"] > 0.5
        assert (event["num_adapter_tensors"] == event["num_tensors"]) == (publish == "adapter")
    gaps = [m["training/logprob_gap/max"] for m in run.metrics if "training/logprob_gap/max" in m]
    assert len(gaps) >= num_steps // every_steps and max(gaps) < 2e-5


def test_a_run_with_adapters_learns(tmp_path: Path) -> None:
    run = lora_run(tmp_path, "adapter", num_steps=25, **{"trainer.lr": 3e-2})
    rewards = [metrics["critic/rewards/mean"] for metrics in run.metrics]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2


def test_a_resumed_run_is_the_unbroken_one_and_leaves_a_whole_model(tmp_path: Path) -> None:
    whole = lora_run(tmp_path, "adapter", num_steps=3, name="whole")
    half = lora_run(tmp_path, "adapter", num_steps=2, name="half")
    resumed = resume_tiny(half, **{"run.num_steps": 3})
    assert set(whole.parameters) == set(resumed.parameters)
    for name, tensor in whole.parameters.items():
        assert torch.equal(tensor, resumed.parameters[name]), name
    saved = load_file(whole.folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in saved)
    assert "model.layers.0.self_attn.q_proj.weight" in saved


def test_adapters_are_not_resumed_on_another_base(tmp_path: Path) -> None:
    """No checkpoint holds the base: with another one under them they would mean something else."""
    half = lora_run(tmp_path, "merged", num_steps=2)
    with pytest.raises(CheckpointError, match="stand on a base with the digest"):
        resume_tiny(half, **{"run.num_steps": 3, "model.seed": 7})


def test_a_sleep_drops_only_what_the_next_publication_brings_back(tmp_path: Path) -> None:
    plain = lora_run(tmp_path, "adapter", name="plain")
    slept = lora_run(tmp_path, "adapter", name="slept", **{"memory.sleep_level": 2})
    for name, tensor in plain.parameters.items():
        assert torch.equal(tensor, slept.parameters[name]), name


def test_a_hand_over_leaves_the_base_where_the_publication_needs_it(tmp_path: Path) -> None:
    """The reference shares the base: only its adapters and the moments wait on the host."""
    kl = {"algorithm.kl": {"placement": "loss", "coef": 0.01}}
    plain = lora_run(tmp_path, "merged", name="plain", **kl)
    moved = lora_run(
        tmp_path, "merged", name="moved", **kl, **{"memory.offload": True, "memory.sleep_level": 2}
    )
    for name, tensor in plain.parameters.items():
        assert torch.equal(tensor, moved.parameters[name]), name
    num_bytes = 4 * sum(tensor.numel() for tensor in plain.parameters.values())
    spans = moved.events_of("span")
    moments = [span["bytes"] for span in spans if span["name"] == "training state to host"]
    reference = [span["bytes"] for span in spans if span["name"] == "frozen models to host"]
    assert moments == [2 * num_bytes] * 3
    assert reference == [num_bytes, 0, 0]  # its copy on the host stays good


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"rollout.engine": "vllm", "model.lora.publish": "adapter"},
            "only the native engine takes adapters alone",
        ),
        ({"rollout.mismatch": "int8", "model.lora.publish": "adapter"}, "whole weights are rounded"),
        ({"algorithm.name": "ppo", "model.lora.rank": 4}, "critic.backbone = 'shared'"),
    ],
)
def test_combinations_that_nobody_serves_are_named(overrides: dict[str, Any], says: str) -> None:
    problems = unstartable(tiny_config(**overrides))
    assert any(says in f"{what} ({remedy})" for what, remedy in problems), problems


def test_adapters_stand_in_transformers_models_too() -> None:
    """The sum in the layers, and a model that was given the merged tensors, compute the same."""
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = wrap_transformers(GemmaForCausalLM(config).eval())
    model.set_attention("rollbook_packed")
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=("q_proj", "down_proj"))
    add_adapters(model, lora, base_dtype=torch.float32, seed=1)
    for name, tensor in adapter_tensors(model).items():
        if name.endswith("lora_B"):
            tensor.data.normal_()
    merged = dict(model.published_tensors(torch.float32))
    plain = without_adapters(model)
    ids, positions = torch.arange(12)[None], torch.arange(12)[None]
    layout = packed_layout([0, 12])
    with torch.no_grad():
        base = plain.hidden_states(ids, positions, packed=layout)
        found = model.hidden_states(ids, positions, packed=layout)
        assert not torch.allclose(found, base, atol=1e-2)
        for name, tensor in plain.named_tensors().items():
            tensor.data = merged[name]  # its own from here on: the base stays as it is
        wanted = plain.hidden_states(ids, positions, packed=layout)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
