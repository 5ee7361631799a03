"""Makes the parts of a run from its config, and takes them down again. No part knows another's class: here they meet.

model ─┬─► trainer ──(WeightSource)──► publisher ──(WeightPort)──► engines ◄── router ◄── rollout ◄── stream
       └─► engines (own copy, or the trainer's memory where dtype and device allow)
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rollbook.algos.filters import drop_reason
from rollbook.algos.shaping import shape_rewards
from rollbook.buffer.buffer import GroupBuffer
from rollbook.config.run_config import RunConfig
from rollbook.controller.evaluate import Evaluator
from rollbook.controller.lending import Lending
from rollbook.controller.loop import Controller
from rollbook.controller.probing import Prober
from rollbook.controller.replicas import Parts, Replica, start_replicas
from rollbook.controller.rollout import Member, Rollout
from rollbook.controller.saving import Saver
from rollbook.controller.schedule import SCHEDULES
from rollbook.controller.startable import require_startable
from rollbook.controller.switching import DeviceSwitch
from rollbook.envs.config import JUDGE
from rollbook.envs.dataset import Prompts, load_prompts, require_enough
from rollbook.envs.env import EnvFactory
from rollbook.envs.rewards.scorer import Judge, Scorer
from rollbook.envs.single_turn import SingleTurnEnv
from rollbook.envs.stream import PromptStream
from rollbook.errors import ConfigError
from rollbook.modeling.load import LoadedModel
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.observe.recorder import Recorder
from rollbook.rollout.agent_loop import run_trajectory
from rollbook.rollout.judge import Baseline, HttpJudge
from rollbook.rollout.router import Router
from rollbook.rollout.teacher import HttpTeacher
from rollbook.sync.publisher import Publisher
from rollbook.sync.quantized import as_sent
from rollbook.trainer.trainer import Trainer
from rollbook.types import Group, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from rollbook.cluster.ray import RayParts


@asynccontextmanager
async def build(config: RunConfig, recorder: Recorder) -> AsyncIterator[Controller]:
    """Every part of the run, started; stopped when the block ends, whatever happened inside."""
    require_startable(config)
    config = with_threads(config, num_cores=len(os.sched_getaffinity(0)))
    async with AsyncExitStack() as stack:
        schedule = SCHEDULES[config.run.schedule]
        with recorder.span("model"):
            on_ray = await _on_ray(config, recorder, stack)
            trainer = Trainer(**_trainer_arguments(config)) if on_ray is None else on_ray.trainer
        if on_ray is not None or "cpu" not in (config.model.device, config.rollout.device):
            compute_alone(config, stack)
        tokenizer = trainer.model.tokenizer
        assert tokenizer is not None
        recorder.decode = partial(tokenizer.decode, skip_special_tokens=False)
        with recorder.span("data"):
            prompts = _load_prompts(config, trainer.model, tokenizer)
        with recorder.span("scorer"):
            scorer = Scorer(config.reward, await _judges(config, stack))
            stack.push_async_callback(scorer.close)
            await scorer.start()
            baseline = await _baseline(config, scorer, stack)
        with recorder.span("engines"):
            parts = Parts(
                config=config,
                trainer=trainer,
                tokenizer=tokenizer,
                stack=stack,
                in_turn=schedule.pauses_for_training,
            )
            router, publisher, lent = await _engines(parts, on_ray)
        router.on_quarantine = lambda who, why: recorder.event("quarantined", replica_id=who, why=why)
        router.on_return = lambda who: recorder.event("back_in_service", replica_id=who)
        stack.callback(_end_exports, publisher, recorder)

        def make_env(prompt: Prompt) -> SingleTurnEnv:
            return SingleTurnEnv(prompt, tokenizer=tokenizer, scorer=scorer)

        stream = PromptStream.of(prompts.train, config.data, seed=config.run.seed)
        # One step more than there are: what it samples shows the gap of the last version.
        buffer = GroupBuffer(config.buffer, config.run.groups_per_step, config.run.num_steps + 1)
        controller = Controller(
            config=config,
            schedule=schedule,
            recorder=recorder,
            rollout=_rollout(config, buffer, stream, router, make_env, trainer.model, recorder),
            router=router,
            trainer=trainer,
            publisher=publisher,
            switch=DeviceSwitch(config, router, trainer, recorder),
            scorer=scorer,
            evaluator=_evaluator(config, prompts, make_env, baseline, trainer.model),
            prober=Prober(
                sync=config.sync,
                rollout=config.rollout,
                trainer=trainer,
                prompt_ids=prompts.train[0][0].prompt_ids,
                max_context_tokens=trainer.model.facts.max_position,
            ),
            saver=Saver(recorder.path / "checkpoints", config.checkpoint),
            remote_teacher=await _remote_teacher(config, prompts, stack),
            train_prompts=[prompt for source in prompts.train for prompt in source],
        )
        if lent is not None:
            _lend(controller, lent, prompts)
        stack.push_async_callback(controller.close)
        yield controller


async def _engines(parts: Parts, on_ray: RayParts | None) -> tuple[Router, Publisher, Replica | None]:
    """Where requests go, how weights get there, and the engine of `[lending]` where there is one."""
    config = parts.config
    if on_ray is not None:
        router = on_ray.pool.router = Router(on_ray.pool.engines)
        return router, on_ray.publisher, None
    replicas = await start_replicas(parts)
    source = as_sent(parts.trainer, config.sync.quantize)
    publisher = Publisher(source, replicas.ports, config.sync, buffers=replicas.buffers)
    return Router(replicas.engines), publisher, replicas.lent


def _end_exports(publisher: Publisher, recorder: Recorder) -> None:
    if why := publisher.close():
        recorder.finding(
            "export_hangs",
            why,
            remedy="look at the rank that a gather waits for; the process ends all the same",
        )


def _lend(controller: Controller, lent: Replica, prompts: Prompts) -> None:
    _require_room(controller.config, prompts)
    controller.lending = Lending(
        controller.config.lending,
        lent,
        router=controller.router,
        publisher=controller.publisher,
        probe=controller.probe_one,
        recorder=controller.recorder,
        deadline_s=controller.config.memory.move_deadline_s,
    )


async def _judges(config: RunConfig, stack: AsyncExitStack) -> dict[str, Judge]:
    """The models that score, by the name of their term; each was asked whether it is there."""
    judges: dict[str, Judge] = {}
    for term in config.reward.terms:
        if term.judge is not None:
            judge = HttpJudge(term.judge)
            stack.push_async_callback(judge.close)
            await judge.start()
            judges[term.name or JUDGE] = judge
    return judges


async def _baseline(config: RunConfig, scorer: Scorer, stack: AsyncExitStack) -> Baseline | None:
    """The model to compare with; it was asked whether it is there."""
    if config.eval.baseline is None:
        return None
    baseline = Baseline(config.eval.baseline, scorer)
    stack.push_async_callback(baseline.close)
    await baseline.start()
    return baseline


async def _remote_teacher(config: RunConfig, prompts: Prompts, stack: AsyncExitStack) -> HttpTeacher | None:
    """The model behind a server that the policy is drawn to; it was asked to score a prompt."""
    if config.teacher_endpoint is None:
        return None
    teacher = HttpTeacher(config.teacher_endpoint)
    stack.push_async_callback(teacher.close)
    await teacher.start(prompts.train[0][0].prompt_ids)
    return teacher


def _trainer_arguments(config: RunConfig) -> dict[str, Any]:
    """Of `Trainer`, wherever it is made."""
    trainer, algorithm, rollout = config.trainer, config.algorithm, config.rollout
    return {
        "config": trainer,
        "model_config": config.model,
        "critic_config": config.critic if algorithm.needs_values else None,
        "teacher_config": config.teacher if algorithm.needs_teacher else None,
        "with_reference": algorithm.needs_reference,
        "temperature": rollout.temperature,
        "max_response_tokens": rollout.max_response_tokens,
        "num_updates": config.run.num_steps * trainer.num_mini_batches * trainer.num_epochs,
        "export_dtype": None if rollout.dtype == "auto" else rollout.dtype,
    }


async def _on_ray(config: RunConfig, recorder: Recorder, stack: AsyncExitStack) -> RayParts | None:
    """Trainer and engines as Ray actors; None where they live in this process."""
    if config.cluster.kind == "inproc":
        return None
    from rollbook.cluster.ray import start_on_ray

    shares_device = SCHEDULES[config.run.schedule].pauses_for_training
    return await start_on_ray(
        config, recorder, stack, _trainer_arguments(config), shares_device=shares_device
    )


def with_threads(config: RunConfig, *, num_cores: int) -> RunConfig:
    """On a CPU, engines and trainer that run at the same time each get a share of the cores, where the config says
    nothing: on two cores one thread for the engine and one for the trainer."""
    devices = (config.model.device, config.rollout.device)
    if SCHEDULES[config.run.schedule].pauses_for_training or devices != ("cpu", "cpu"):
        return config
    share = max(num_cores // (config.rollout.num_replicas + 1), 1)
    rollout = {"num_threads": config.rollout.num_threads or config.trainer.num_threads or share}
    trainer = {"num_threads": config.trainer.num_threads or config.rollout.num_threads or share}
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "trainer": config.trainer.model_copy(update=trainer),
        }
    )


def compute_alone(config: RunConfig, stack: AsyncExitStack) -> None:
    """Where actors or accelerators compute, what is left to this process is small arrays, such as a step's corrections.
    Threads save nothing there, and lose much where one of them waits for a core that another process has: on a shared
    host 0.35 s instead of 0.01 for 65,536 tokens."""
    if config.cluster.kind == "ray" or config.trainer.num_threads is None:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


def _load_prompts(config: RunConfig, model: LoadedModel, tokenizer: Tokenizer) -> Prompts:
    room = model.facts.max_position - config.rollout.max_response_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_tokens is {config.rollout.max_response_tokens} and the model's context "
            f"{model.facts.max_position} tokens",
            "leave room for the prompt: lower the response limit",
        )
    prompts = load_prompts(config.data, tokenizer, max_prompt_tokens=room)
    require_enough(prompts, groups_per_step=config.run.groups_per_step)
    if config.eval.num_prompts > len(prompts.held_out):
        raise ConfigError(
            f"eval.num_prompts is {config.eval.num_prompts} and {len(prompts.held_out)} prompts are held out",
            "raise data.held_out_frac, add data.held_out sources, or evaluate on fewer",
        )
    return prompts


def _require_room(config: RunConfig, prompts: Prompts) -> None:
    """A request that the lent engine could never hold would be a failed trajectory."""
    longest = max(len(prompt.prompt_ids) for source in prompts.train for prompt in source)
    wanted = longest + config.rollout.max_response_tokens
    pool = config.lending.kv_pool_tokens or config.rollout.kv_pool_tokens
    held = pool // config.rollout.page_tokens * config.rollout.page_tokens
    if held < wanted:
        raise ConfigError(
            f"lending.kv_pool_tokens is {pool}, {held} of them in whole pages of {config.rollout.page_tokens}, and the "
            f"longest prompt with its response takes {wanted}",
            f"raise it to {wanted + config.rollout.page_tokens} at least, or leave it at 0 for rollout.kv_pool_tokens",
        )


def _rollout(
    config: RunConfig,
    buffer: GroupBuffer,
    stream: PromptStream,
    router: Router,
    make_env: EnvFactory,
    model: LoadedModel,
    recorder: Recorder,
) -> Rollout:
    sampling = config.rollout.sampling()

    async def produce(member: Member) -> Trajectory:
        def on_turn(turn_idx: int, replica_id: int | None) -> None:
            progress = member.progress
            progress.turn_idx, progress.replica_id = turn_idx, replica_id
            progress.has_response = replica_id is not None

        def on_sent(replica_id: int) -> None:
            member.progress.replica_id = replica_id

        return await run_trajectory(
            partial(router.generate, on_sent=on_sent),
            make_env(member.prompt),
            prompt=member.prompt,
            group_id=member.group_id,
            member_idx=member.member_idx,
            seed=config.run.seed,
            sampling=sampling,
            max_turns=config.run.max_turns,
            max_context_tokens=model.facts.max_position,
            clock=time.monotonic,
            on_turn=on_turn,
        )

    def shape(group: Group) -> None:
        shape_rewards([group], config.algorithm.overlong, max_response_tokens=sampling.max_response_tokens)

    return Rollout(
        buffer=buffer,
        stream=stream,
        produce=produce,
        shape=shape,
        drop_reason=lambda group: drop_reason(group, config.algorithm.filter),
        group_size=config.rollout.group_size,
        refill_dropped=config.algorithm.filter.refill,
        min_scored=2 if config.algorithm.needs_group else 1,
        max_failure_frac=config.run.max_failure_frac,
        clock=time.monotonic,
        warn=lambda summary, remedy: recorder.finding("one_reward", summary, remedy=remedy),
    )


def _evaluator(
    config: RunConfig, prompts: Prompts, make_env: EnvFactory, baseline: Baseline | None, model: LoadedModel
) -> Evaluator:
    return Evaluator(
        config=config.eval,
        prompts=prompts.held_out[: config.eval.num_prompts],
        make_env=make_env,
        baseline=baseline,
        sampling=SamplingParams(
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.eval.temperature,
            stop_strings=config.rollout.stop_strings,
        ),
        seed=config.run.seed + 1,
        max_turns=config.run.max_turns,
        max_context_tokens=model.facts.max_position,
        clock=time.monotonic,
    )
