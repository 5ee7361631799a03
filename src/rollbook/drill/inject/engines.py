"""Faults of engines: slow, dead, at another temperature, endless responses, logprobs that go astray."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollbook.drill.fault import Site, wrap
from rollbook.observe.values import Peak
from rollbook.rollout.engine import Engine, GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine

Generate = Callable[[GenerateRequest], Awaitable[Response]]


def slow_replica(site: Site) -> None:
    """The last replica's steps take ten times as long as they usually did."""
    engine = site.controller.router.engines[-1]
    assert isinstance(engine, NativeEngine)
    usual_s: list[float] = []
    last = [0.0, 0]

    def around(draws: Callable[..., Any]) -> Callable[..., Any]:
        def slower(plan: Any) -> Any:
            if site.is_on:
                time.sleep(9 * float(np.median(usual_s)))
            else:
                now_s, num_steps = engine._decode_s, engine._scheduler.counters.decode_steps
                if num_steps > last[1]:
                    usual_s.append((now_s - last[0]) / (num_steps - last[1]))
                last[:] = now_s, num_steps
            return draws(plan)

        return slower

    wrap(engine, "_draws", around)


def dead_replica(site: Site) -> None:
    """The last replica's engine fails in the middle of its work, and nothing starts it again."""
    engine = site.controller.router.engines[-1]

    def around(draws: Callable[..., Any]) -> Callable[..., Any]:
        def failing(plan: Any) -> Any:
            if site.is_on:
                raise RuntimeError("the device is gone (a drill)")
            return draws(plan)

        return failing

    wrap(engine, "_draws", around)


def wrong_temperature(site: Site) -> None:
    """The engines sample at one and a half times the temperature that the trainer assumes."""

    def other(request: GenerateRequest) -> GenerateRequest:
        hotter = replace(request.sampling, temperature=1.5 * request.sampling.temperature)
        return replace(request, sampling=hotter)

    _requests(site, lambda request, engine: other(request))


def tail_burst(site: Site) -> None:
    """In every third step one response runs on to eight times the usual limit."""
    limit = site.controller.config.rollout.max_response_tokens // 8

    def longer(request: GenerateRequest, engine: Engine) -> GenerateRequest:
        per_step = site.controller.config.run.groups_per_step
        is_hit = site.is_on and request.member_idx == 0 and request.group_id % (3 * per_step) == 0
        if is_hit:
            return replace(request, sampling=replace(request.sampling, ignore_eos=True))
        return _limited(request, limit)

    _requests(site, longer, always=True)


def growing_lengths(site: Site) -> None:
    """Responses grow by a tenth of their limit every other step, and device memory (simulated: this may run on a CPU)
    with them, until an update does not fit."""
    controller = site.controller
    top = controller.config.rollout.max_response_tokens
    limit = max(top // 4, 1)

    def longer(request: GenerateRequest, engine: Engine) -> GenerateRequest:
        if not site.is_on:
            return _limited(request, limit)
        grown = min(limit + (top - limit) * site.age // 20, top)
        params = replace(request.sampling, max_response_tokens=grown, ignore_eos=True)
        return replace(request, sampling=params)

    _requests(site, longer, always=True)
    _simulated_memory(site, gib_per_token=40.0 / (top * controller.num_sequences), capacity_gib=56.0)


def _simulated_memory(site: Site, *, gib_per_token: float, capacity_gib: float) -> None:
    """A device of 20 GiB of weights plus what the batch's response tokens take; full beyond its capacity."""
    controller = site.controller

    def around(update: Callable[..., Any]) -> Callable[..., Any]:
        def measured(batch: Any, *args: Any, **kwargs: Any) -> Any:
            used = 20.0 + gib_per_token * sum(int(s.action_mask.sum()) for s in batch.sequences)
            if used > capacity_gib:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate 2.00 GiB. {used:.1f} of {capacity_gib:g} GiB in use "
                    "(simulated by a drill)"
                )
            controller.recorder.metrics({"perf/max_memory_allocated_gb": Peak(used)})
            return update(batch, *args, **kwargs)

        return measured

    wrap(controller.trainer, "update", around)


def mismatch_to_nan(site: Site) -> None:
    """The engines' logprobs go astray, by a third more every step, until one is not a number."""

    def around(generate: Generate) -> Generate:
        async def astray(request: GenerateRequest) -> Response:
            response = await generate(request)
            if not site.is_on:
                return response
            rng = np.random.default_rng((abs(request.group_id), request.member_idx))
            size = 1e-3 * 1.33 ** min(site.age, 40)
            noise = rng.normal(0.0, size, len(response.logprobs)).astype(np.float32)
            logprobs = np.minimum(response.logprobs + noise, np.float32(0))
            if site.age >= 18:
                logprobs[:1] = np.nan
            return replace(response, logprobs=logprobs)

        return astray

    for engine in site.controller.router.engines:
        wrap(engine, "generate", around)


def _requests(
    site: Site, change: Callable[[GenerateRequest, Engine], GenerateRequest], *, always: bool = False
) -> None:
    """Every request passes through `change`, from the fault's step on or always."""
    for engine in site.controller.router.engines:

        def around(generate: Generate, engine: Engine = engine) -> Generate:
            async def changed(request: GenerateRequest) -> Response:
                is_training = request.group_id >= 0
                changes = (always and is_training) or site.is_on
                return await generate(change(request, engine) if changes else request)

            return changed

        wrap(engine, "generate", around)


def _limited(request: GenerateRequest, limit: int) -> GenerateRequest:
    tokens = min(limit, request.sampling.max_response_tokens)
    return replace(request, sampling=replace(request.sampling, max_response_tokens=max(tokens, 1)))
