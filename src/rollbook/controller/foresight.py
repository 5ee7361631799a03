"""What the planner derives for a job from its config alone, before it has begun: for `rollbook runbook`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import calibrate
from rollbook.diagnose.runbook import Derivation
from rollbook.envs.dataset import load_prompts
from rollbook.errors import ConfigError, RunError
from rollbook.ledger.assumptions import Assumptions, load_assumptions
from rollbook.ledger.hardware import Accelerator, Cluster, load_accelerator
from rollbook.ledger.model import ModelSpec, load_model
from rollbook.ledger.workload import Workload
from rollbook.modeling.char_tokenizer import CharTokenizer
from rollbook.planner.expected import expectation_of_request
from rollbook.planner.options import of_options
from rollbook.planner.plan import make_plan
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import device_words

_ASSUMED_PROMPT_TOKENS = 256


def derive(config: RunConfig, *, gpu: str = "", num_gpus: int = 0) -> Derivation:
    """The six steps of the derivation, and the expected stages of the job's own schedule.

    Args:
        gpu: an accelerator's name or a hardware.toml; empty: the config's `plan.hardware`, else this machine, measured.
        num_gpus: devices of the job; 0: as many as the config names.
    Raises:
        ConfigError: the device cannot be known here.
        PlanError: what the config asks for cannot be meant.
    """
    try:
        return _derive(config, gpu=gpu, num_gpus=num_gpus)
    except RunError as error:
        raise _of_config(error) from None


def _derive(config: RunConfig, *, gpu: str, num_gpus: int) -> Derivation:
    model, notes = _model(config), list[str]()
    accelerator = _accelerator(config, gpu, notes)
    limit = config.rollout.max_response_tokens
    response_tokens = config.plan.response_tokens or max(limit / 2, 1.0)
    if not config.plan.response_tokens:
        notes.append(
            f"the mean response is taken as half of the limit of {limit} tokens (plan.response_tokens says it)"
        )
    prompt_tokens = _prompt_tokens(config, notes)
    trainer = config.pools.num_trainer_devices
    devices = num_gpus or config.pools.num_devices
    is_beside = config.run.schedule == "separate_async"
    split = None
    if is_beside and devices > 1:
        split = (devices - trainer, trainer) if devices > trainer else (devices // 2, devices - devices // 2)
    elif is_beside:
        notes.append("generation and training share the one device: planned as if they took turns")
    request = PlanRequest(
        model=model,
        workload=Workload(
            num_prompts=config.run.groups_per_step,
            group_size=config.rollout.group_size,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            max_response_tokens=limit,
            algorithm="ppo" if config.algorithm.needs_values else "grpo",
            num_epochs=config.trainer.num_epochs,
            num_mini_batches=config.trainer.num_mini_batches,
            uses_reference=config.algorithm.needs_reference,
            uses_proximal=config.algorithm.needs_proximal(
                config.trainer.num_epochs * config.trainer.num_mini_batches
            ),
        ),
        cluster=Cluster(accelerator=accelerator, num_gpus=devices),
        assumptions=_assumptions(config),
        idle_state="host" if config.memory.offload else "device",
        sleep_level=config.memory.sleep_level,
        split=split,
        max_staleness_steps=max(config.buffer.max_staleness_steps, 1),
        checkpoint_every_steps=config.checkpoint.every_steps,
    )
    mode = "colocate_async" if is_beside and split is None else config.run.schedule
    plan = make_plan(request, is_brief=True)
    expected, _ = expectation_of_request(request, mode=mode)

    def words(text: str) -> str:
        return _in_keys(device_words(text, is_cpu=accelerator.is_cpu))

    return Derivation(
        machine=f"{devices} x {accelerator.name}",
        notes=(*notes, *(words(note) for note in (*plan.warnings, *expected.notes))),
        steps=tuple((step.title, words(step.because)) for step in plan.derivation),
        stages={name: (e.seconds, e.low, e.high) for name, e in expected.stages.items()},
        step_s=expected.step_s,
    )


_KEYS = {
    "--prompts": "run.groups_per_step",
    "--group-size": "rollout.group_size",
    "--response-tokens": "plan.response_tokens",
    "--max-response-tokens": "rollout.max_response_tokens",
    "--max-context": "max_position_embeddings in its config.json",
    "--algorithm": "algorithm.name",
    "--mini-batches": "trainer.num_mini_batches",
    "--epochs": "trainer.num_epochs",
    "--max-staleness": "buffer.max_staleness_steps",
    "--sleep-level": "memory.sleep_level",
    "--checkpoint-every": "checkpoint.every_steps",
}
"""Of a run's config, by the option of `rollbook plan` that asks for the same."""


def _in_keys(text: str) -> str:
    return re.sub(r"--[a-z][a-z0-9-]*", lambda found: _KEYS.get(found[0], found[0]), text)


def _of_config(error: RunError) -> RunError:
    """`error` of the planner as one of the config that asked: keys for the names of options."""
    named = of_options(error)
    return type(error)(_in_keys(named.what), _in_keys(named.remedy))


def _model(config: RunConfig) -> ModelSpec:
    if config.model.path is not None:
        return load_model(config.model.path)
    new = config.model.new
    assert new is not None
    facts: Mapping[str, Any] = {
        "model_type": new.architecture,
        "hidden_size": new.hidden_size,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads or new.num_heads,
        "head_dim": new.head_dim or new.hidden_size // new.num_heads,
        "intermediate_size": new.intermediate_size,
        "vocab_size": new.vocab_size or CharTokenizer(new.alphabet).vocab_size,
        "max_position_embeddings": new.max_position,
        "tie_word_embeddings": new.tie_embeddings,
    }
    return ModelSpec.from_hf_config(facts, "the new model")


def _assumptions(config: RunConfig) -> Assumptions:
    """Of a run of this loop, with the engine that it asks for and its own trainer."""
    own = load_assumptions("rollbook")
    sources = {**own.sources, "stack": "the loop's trainer"}
    decode = own.decode.for_engine(config.rollout.engine)
    return replace(own, decode=decode, micro_batch_tokens=config.trainer.micro_batch_tokens, sources=sources)


def _accelerator(config: RunConfig, gpu: str, notes: list[str]) -> Accelerator:
    if gpu or config.plan.hardware:
        return load_accelerator(gpu or config.plan.hardware)
    try:
        machine = calibrate(None, [], device=config.model.device)
    except ConfigError as error:
        raise ConfigError(
            f"the config's device {config.model.device} is not on this machine ({error.what})",
            "name it with --gpu (H100, say, or a hardware.toml of `rollbook calibrate`) and --num-gpus",
        ) from error
    notes.append(
        f"the rates of {config.model.device} were measured on this machine just now; plan.hardware keeps them"
    )
    return machine.as_accelerator()


def _prompt_tokens(config: RunConfig, notes: list[str]) -> float:
    """Mean tokens of the prompts, where the config's tokenizer is made on the spot; else a round number, said."""
    if config.model.new is not None:
        room = config.model.new.max_position - 1
        try:
            prompts = load_prompts(
                config.data, CharTokenizer(config.model.new.alphabet), max_prompt_tokens=room
            )
        except RunError as error:
            notes.append(f"prompts could not be read ({error.what})")
        else:
            sizes = [len(prompt.prompt_ids) for source in prompts.train for prompt in source[:2048]]
            if sizes:
                return sum(sizes) / len(sizes)
    notes.append(
        f"prompts are taken as {_ASSUMED_PROMPT_TOKENS} tokens: their tokenizer is not loaded for a manual"
    )
    return float(_ASSUMED_PROMPT_TOKENS)
