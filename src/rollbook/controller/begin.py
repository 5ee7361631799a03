"""Everything before the first step: weights proven on every replica, checks, warm-up, and the plan.

    state ──► publish ──► preflight ──► accept ──► warm-up ──► probe ──► checkpoint 0 ──► plan ──► evaluate
    loaded    proven      can it        the run    (a fresh                               the      how good
    or new                work at all?  is kept    run only)                              promise  it begins

Up to `accept` nothing of the run is on disk: what a user can get wrong is refused before that.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

from rollbook.controller.expectation import make_plan
from rollbook.controller.plan import Plan
from rollbook.controller.preflight import preflight
from rollbook.controller.step_plan import StepPlan
from rollbook.controller.warmup import answer_sequences, warmup_lr
from rollbook.errors import ConfigError
from rollbook.observe.core_waits import Waited
from rollbook.trainer.objective import SupervisedObjective

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller


async def begin(controller: Controller, *, resume: bool) -> None:
    """Bring a run that was built to where its loop can start, or a resumed one to where it stopped.

    Raises:
        ConfigError: a check says that this run cannot work.
        RunError: a part failed.
    """
    config, recorder = controller.config, controller.recorder
    step = controller.saver.load(controller) if resume else None
    if step is not None and controller.is_complete:
        recorder.accept()
        recorder.event("already_complete", num_steps_done=controller.num_steps_done)
        return
    if config.cluster.kind == "inproc":
        recorder.event("threads", **controller.num_threads)
    if controller.rollout.buffer.serving_step < controller.num_steps_done:
        controller.weight_version += 1  # the checkpoint's weights were in no publication
    with recorder.span("publish"):
        publication = await controller.publish(controller.weight_version)
        await _note_mismatch(controller)
    with recorder.span("preflight"):
        await preflight(
            scorer=controller.scorer,
            prompts=controller.train_prompts,
            num_self_test_prompts=config.reward.self_test_prompts,
            rollout=controller.rollout,
            recorder=recorder,
            deadline_s=config.buffer.group_deadline_s,
            versions=await _versions(controller),
            publication=publication,
        )
        await _check_deadlines(controller)
    recorder.accept()  # all that a user can get wrong was checked: from here on the run is on disk
    if step is None:
        await warm_up(controller)
    controller.rollout.buffer.published(controller.weight_version, controller.num_steps_done)
    if controller.probes:
        with recorder.span("probe"):
            await controller.probe()
    if controller.lending is not None:
        with recorder.span("lending"):
            await controller.lending.rehearse()
    if step is None:
        await controller.write_checkpoint(0)
    else:
        controller.saver.take_up_last_write(recorder.run_dir.events.path)
    if config.plan.is_on:  # which freezes likewise before it measures
        plan, core_wait_frac = await _measured_plan(controller)
        _show_plan(controller, plan, core_wait_frac)
    else:
        gc.collect()
        gc.freeze()  # what was imported and built stays: a full collection no longer goes through all of it
    if step is None:
        await controller.evaluate(-1)
        controller.commit_checkpoint()


async def _measured_plan(controller: Controller) -> tuple[Plan, float]:
    """The plan, and the share of its measuring in which a thread waited for a core: no cost of the run's steps."""
    with Waited() as waited, controller.recorder.span("plan") as span:
        plan = await make_plan(controller)
    assert span.duration_s is not None
    # Of a calibrated machine most was measured then, and little is measured now.
    return plan, max(waited.seconds / max(span.duration_s, 1e-9), plan.machine.core_wait_frac)


def _show_plan(controller: Controller, plan: Plan, core_wait_frac: float) -> None:
    """Write the plan and say it, before the first step: the promise that the measurements stand beside."""
    controller.recorder.run_dir.write_plan(plan.as_json() | {"core_wait_frac": core_wait_frac})
    seconds = plan.mean_seconds()
    controller.expected = StepPlan(plan=plan, stages=plan.stages)
    step_s = (controller.expected.step_s() or 0.0) + seconds.get("checkpoint", 0.0)
    num_left = controller.config.run.num_steps - controller.num_steps_done
    controller.recorder.event(
        "plan",
        topology=_topology(controller),
        stages=seconds,
        step_s=step_s,
        total_s=num_left * (step_s + seconds.get("eval", 0.0)),
    )


def _topology(controller: Controller) -> str:
    """Who computes where, in words."""
    rollout, num_replicas = controller.config.rollout, controller.config.rollout.num_replicas
    engines = f"{num_replicas} {rollout.engine} engine{'s' if num_replicas > 1 else ''}"
    beside = "in turn with" if controller.schedule.pauses_for_training else "beside"
    cluster, device = controller.config.cluster, controller.config.model.device
    ranks = f"'s {cluster.num_trainer_ranks} ranks" if cluster.num_trainer_ranks > 1 else ""
    where = ", in processes on Ray" if cluster.kind == "ray" else ""
    of_engines = f"{controller.config.run.schedule}: {engines} on {rollout.device}"
    return f"{of_engines}, {beside} the trainer{ranks} on {device}{where}"


async def _note_mismatch(controller: Controller) -> None:
    """A run that samples from rounded weights on purpose says so before its first token."""
    if controller.config.rollout.mismatch != "none":
        stats = {str(engine.replica_id): await engine.stats() for engine in controller.router.engines}
        controller.recorder.event(
            "mismatch",
            mismatch=controller.config.rollout.mismatch,
            error_frac={replica_id: held.mismatch_error_frac for replica_id, held in stats.items()},
        )


async def _versions(controller: Controller) -> dict[int, int]:
    """Replica -> the weight version it reports, of those in service."""
    serving = [e for e in controller.router.engines if e.replica_id not in controller.router.out_of_service]
    return {engine.replica_id: (await engine.stats()).weight_version for engine in serving}


async def _check_deadlines(controller: Controller) -> None:
    """A response of full length must fit its deadlines, at the pace of the trial (one sequence alone: the fastest).

    Raises:
        ConfigError: it cannot.
    """
    stats = [await engine.stats() for engine in controller.router.engines]
    num_steps = sum(held.decode_steps for held in stats)
    if not num_steps:
        return
    step_s = sum(held.decode_s for held in stats) / num_steps
    longest_s = step_s * controller.config.rollout.max_response_tokens
    for name, deadline_s in (
        ("buffer.group_deadline_s", controller.config.buffer.group_deadline_s),
        ("rollout.response_deadline_s", controller.config.rollout.response_deadline_s),
    ):
        if longest_s > deadline_s:
            raise ConfigError(
                f"{name} is {deadline_s:g} s, and a response of rollout.max_response_tokens "
                f"{controller.config.rollout.max_response_tokens} takes at least {longest_s:.3g} s "
                f"({step_s:.3g} s a token in the trial)",
                "every long response would fail as a timeout: raise the deadline, or lower the limit",
            )


async def warm_up(controller: Controller) -> None:
    """Supervised updates on reference answers, until enough held-out prompts are answered or they are used up."""
    config = controller.config.warmup
    if not config.num_updates:
        return
    objective = SupervisedObjective()
    tokenizer = controller.trainer.model.tokenizer
    assert tokenizer is not None
    batches = answer_sequences(
        controller.train_prompts,
        tokenizer,
        batch_sequences=config.batch_sequences,
        num_batches=config.num_updates,
        seed=controller.config.run.seed,
    )
    with controller.recorder.span("warmup"):
        for update, sequences in enumerate(batches, start=1):
            batch = controller.trainer.make_batch(
                sequences, step=update, weight_version=controller.weight_version
            )
            batch.mini_batches = [
                list(range(len(sequences)))
            ]  # one update, whatever a step makes of its batch
            lr = warmup_lr(config.learning_rate, update, config.num_updates)
            values = await controller.compute(partial(controller.trainer.update, batch, objective, lr=lr))
            controller.note_movement(values)
            controller.recorder.event(
                "warmup",
                update=update,
                num_updates=config.num_updates,
                loss=values["warmup/loss"].result(),
            )
            if update % config.check_every_updates == 0 or update == config.num_updates:
                await controller.publish(controller.weight_version + 1)
                if await _is_warm(controller):
                    break
        controller.trainer.reset_moments()
        controller.trainer.freeze_reference()


async def _is_warm(controller: Controller) -> bool:
    """Whether held-out prompts are answered well enough; asks the engines."""
    config = controller.config.warmup
    if config.until_exact_frac >= 1 or not controller.evaluator.prompts:
        return False
    values = await controller.evaluator.run(controller.router)
    exact = [value.result() for name, value in values.items() if name.endswith("/exact_match")]
    controller.recorder.event("warmup_check", exact_match=exact)
    return bool(exact) and min(exact) >= config.until_exact_frac
