"""The faults, each a function that wraps a part of a built run, and the table of them.

    engine   slow_replica, dead_replica, wrong_temperature, tail_burst, growing_lengths, mismatch_to_nan
    weights  skipped_bucket, stale_replica, quantized_engine, noisy_engine, ..., with the checks and without
    rollout  stuck_prompt, sandboxes_gone, leaked_leases, samples_held_back, loose_bound, skewed_filter
    scorer   source_all_zero, scorer_down
    trainer  blocked_publication, oom_in_sync, growing_lengths, fragmentation, object_store_spill, lost_state
    host     clock_jump

Without the checks means: the engine's live weights are changed after the digests were compared, and the probe is
off; that is what a system without proofs would do.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.drill.fault import Fault, Site, wrap
from rollbook.envs.rewards.result import RewardResult
from rollbook.errors import EnvError, SyncError
from rollbook.observe.clock import Clock
from rollbook.observe.values import Last, Peak, Ratio, Total, Value
from rollbook.rollout.engine import Engine, GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.native.mismatch import ROUNDINGS, is_rounded
from rollbook.sync.transport import arrived
from rollbook.types import Failure, FailureKind, Group, Prompt, Trajectory
from rollbook.weights import Bucket, CommitReport, LiveWeights, Manifest, Receiving, WeightPort

Generate = Callable[[GenerateRequest], Awaitable[Response]]
Produce = Callable[[Any], Awaitable[Trajectory]]
Receive = Callable[[Bucket], Receiving]

UNPROVEN: Mapping[str, Any] = {"sync.staging": "direct", "sync.probe": False}
"""Engines with weights of their own, and nothing that compares them after a publication."""


# ---- engines -----------------------------------------------------------------------------------------------------


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


def fragmentation(site: Site) -> None:
    """The allocator keeps a gibibyte more every step that nobody uses (simulated: this may run on a CPU)."""
    controller = site.controller

    def around(update: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            held = 24.0 + (site.age + 1.0 if site.is_on else 0.0)
            memory = {"perf/max_memory_allocated_gb": Peak(20.0), "perf/max_memory_reserved_gb": Peak(held)}
            controller.recorder.metrics(memory)
            return update(*args, **kwargs)

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


# ---- weights -----------------------------------------------------------------------------------------------------


def skipped_bucket(site: Site) -> None:
    """A bucket does not arrive at any replica."""

    def around(receive: Receive) -> Receive:
        async def lost(bucket: Bucket) -> None:
            if not site.is_on:
                await arrived(receive(bucket))

        return lost

    for port in site.controller.publisher.ports.values():
        wrap(port, "receive", around)


def skipped_bucket_unproven(site: Site) -> None:
    """The second half of the tensors keeps its old values on every replica, and no check sees it."""
    for port in site.controller.publisher.ports.values():
        _keep_old(site, port, share=0.5)


def stale_replica(site: Site) -> None:
    """The last replica takes no publication any more, and says so."""
    port = list(site.controller.publisher.ports.values())[-1]

    def around(
        open_: Callable[[Manifest], Awaitable[None]],
    ) -> Callable[[Manifest], Awaitable[None]]:
        async def refuse(manifest: Manifest) -> None:
            if site.is_on:
                raise SyncError("the replica does not answer (a drill)", "end the drill")
            await open_(manifest)

        return refuse

    wrap(port, "open", around)


def stale_replica_unproven(site: Site) -> None:
    """The last replica says that it took each version and samples with its old weights."""
    _keep_old(site, list(site.controller.publisher.ports.values())[-1], share=1.0)


def quantized_engine(site: Site) -> None:
    """The engines round their matrices to four bits after every publication."""

    def round_all(weights: LiveWeights) -> None:
        for name in weights.specs():
            live = weights.read(name)
            if is_rounded(name, live):
                weights.write(name, ROUNDINGS["int4"](live.float()).to(live.dtype))

    _after_commit(site, round_all)


def noisy_engine(site: Site) -> None:
    """After one publication the engines hold noise of the same size as their weights."""
    generator = torch.Generator().manual_seed(0)

    def spoil(weights: LiveWeights) -> None:
        for name in weights.specs():
            live = weights.read(name)
            if live.ndim >= 2:
                noise = torch.randn(live.shape, generator=generator).to(live.device, live.dtype)
                weights.write(name, noise * live.float().std())

    _after_commit(site, spoil)


def blocked_publication(site: Site) -> None:
    """A bucket never arrives at the replicas: a collective in which one side has stopped. Its deadline is a second."""
    publisher = site.controller.publisher

    def around(receive: Receive) -> Receive:
        async def hang(bucket: Bucket) -> None:
            if site.is_on:
                await asyncio.Event().wait()
            await arrived(receive(bucket))

        return hang

    def around_publish(publish: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def with_deadline(*args: Any, **kwargs: Any) -> Any:
            if site.is_on:
                soon = {"receive_deadline_s": 1.0}
                publisher.config = site.controller.config.sync.model_copy(update=soon)
            return await publish(*args, **kwargs)

        return with_deadline

    for port in publisher.ports.values():
        wrap(port, "receive", around)
    wrap(publisher, "publish", around_publish)


def oom_in_sync(site: Site) -> None:
    """The replicas have no memory left for the new weights."""

    def around(receive: Receive) -> Receive:
        def full(bucket: Bucket) -> Receiving:
            if site.is_on:
                raise SyncError(
                    "CUDA out of memory. Tried to allocate 512.00 MiB (simulated by a drill)", "end the drill"
                )
            return receive(bucket)

        return full

    for port in site.controller.publisher.ports.values():
        wrap(port, "receive", around)


def _keep_old(site: Site, port: WeightPort, *, share: float) -> None:
    """Below the checks: the last `share` of the tensors is put back to what it was when the fault began."""
    held: dict[str, Tensor] = {}

    def put_back(weights: LiveWeights) -> None:
        names = list(weights.specs())
        chosen = names[len(names) - max(int(share * len(names)), 1) :]
        if not held:
            held.update({name: before[name] for name in chosen})
        for name in chosen:
            weights.write(name, held[name])

    before: dict[str, Tensor] = {}

    def remember(weights: LiveWeights) -> None:
        before.update({name: weights.read(name).clone() for name in weights.specs()})

    _around_commit(site, port, before=remember, after=put_back)


def _after_commit(site: Site, change: Callable[[LiveWeights], None]) -> None:
    for port in site.controller.publisher.ports.values():
        _around_commit(site, port, before=None, after=change)


def _around_commit(
    site: Site,
    port: WeightPort,
    *,
    before: Callable[[LiveWeights], None] | None,
    after: Callable[[LiveWeights], None],
) -> None:
    """Change a replica's live weights once they have been proven and serve."""
    engine = next(e for e in site.controller.router.engines if e.replica_id == port.replica_id)
    assert isinstance(engine, NativeEngine)

    async def run(change: Callable[[LiveWeights], None]) -> None:
        weights = await engine.live_weights()
        await engine.run_between_steps(lambda: _without_grad(change, weights))

    def around_open(open_: Callable[[Manifest], Awaitable[None]]) -> Callable[[Manifest], Awaitable[None]]:
        async def opened(manifest: Manifest) -> None:
            if before is not None and not site.is_on:
                await run(before)
            await open_(manifest)

        return opened

    def around(commit: Callable[[], Awaitable[CommitReport]]) -> Callable[[], Awaitable[CommitReport]]:
        async def committed() -> CommitReport:
            report = await commit()
            if site.is_on:
                await run(after)
            return report

        return committed

    wrap(port, "open", around_open)
    wrap(port, "commit", around)


@torch.no_grad()
def _without_grad(change: Callable[[LiveWeights], None], weights: LiveWeights) -> None:
    change(weights)


# ---- rollout -----------------------------------------------------------------------------------------------------


def stuck_prompt(site: Site) -> None:
    """One prompt of every step never ends; its group's deadline does, after ten times what a group usually takes."""
    rollout = site.controller.rollout
    took_s: list[float] = []

    def around(produce: Produce) -> Produce:
        async def stuck(member: Any) -> Trajectory:
            if site.is_on and member.group_id % site.controller.config.run.groups_per_step == 0:
                await asyncio.Event().wait()
            started_at_s = time.monotonic()
            trajectory = await produce(member)
            took_s.append(time.monotonic() - started_at_s)
            return trajectory

        return stuck

    def around_admit(admit: Callable[[], None]) -> Callable[[], None]:
        def with_deadline() -> None:
            if site.is_on and site.age == 0:
                deadline = {"group_deadline_s": max(10 * float(np.median(took_s)), 0.2)}
                rollout.buffer.config = rollout.buffer.config.model_copy(update=deadline)
            admit()

        return with_deadline

    wrap(rollout, "produce", around)
    wrap(rollout, "admit", around_admit)


def sandboxes_gone(site: Site) -> None:
    """Every second trajectory finds its sandbox gone."""

    def around(produce: Produce) -> Produce:
        async def alone(member: Any) -> Trajectory:
            if site.is_on and member.member_idx % 2:
                raise EnvError("the sandbox is gone (a drill)", "end the drill")
            return await produce(member)

        return alone

    wrap(site.controller.rollout, "produce", around)


def leaked_leases(site: Site) -> None:
    """Trajectories need a lease of a pool that the drill brings along, and some leases are not given back: the wait
    for one grows."""
    controller = site.controller
    capacity = 2 * controller.num_sequences
    leased, leaked, waits = [0], [0], list[float]()

    def around(produce: Produce) -> Produce:
        async def with_lease(member: Any) -> Trajectory:
            leased[0] += 1
            started_at_s = time.monotonic()
            crowding = leaked[0] / capacity
            await asyncio.sleep(0.004 * (1 + 10 * crowding))  # a fuller host answers more slowly
            waits.append(time.monotonic() - started_at_s)
            try:
                return await produce(member)
            finally:
                if site.is_on and member.member_idx == 0:
                    leaked[0] += 1
                else:
                    leased[0] -= 1

        return with_lease

    def around_report(engine_values: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        async def reported() -> Any:
            values: dict[str, Value] = {"env/num_leased": Last(leased[0])}
            if waits:
                values["env/turn_s/mean"] = Ratio(sum(waits), len(waits))
                waits.clear()
            return await engine_values() | values

        return reported

    wrap(controller.rollout, "produce", around)
    wrap(controller, "_engine_values", around_report)


def samples_held_back(site: Site) -> None:
    """Finished trajectories reach the buffer late, by eight times what it takes to produce one."""
    took_s: list[float] = []

    def around(produce: Produce) -> Produce:
        async def late(member: Any) -> Trajectory:
            started_at_s = time.monotonic()
            trajectory = await produce(member)
            if site.is_on:
                await asyncio.sleep(8 * float(np.median(took_s)))
            else:
                took_s.append(time.monotonic() - started_at_s)
            return trajectory

        return late

    wrap(site.controller.rollout, "produce", around)


def loose_bound(site: Site) -> None:
    """The buffer forgets its staleness bound: prompts are admitted eight steps ahead."""
    buffer = site.controller.rollout.buffer

    def around(admit: Callable[[], None]) -> Callable[[], None]:
        def ahead() -> None:
            if site.is_on:
                buffer.config = buffer.config.model_copy(update={"max_staleness_steps": 8})
            admit()

        return ahead

    wrap(site.controller.rollout, "admit", around)


def skewed_filter(site: Site) -> None:
    """The filter takes four groups of five for flat."""

    def around(judge: Callable[[Group], str | None]) -> Callable[[Group], str | None]:
        def skewed(group: Group) -> str | None:
            return "flat" if site.is_on and group.group_id % 5 else judge(group)

        return skewed

    wrap(site.controller.rollout, "judge", around)


# ---- scorer ------------------------------------------------------------------------------------------------------

Score = Callable[[str, Prompt], Awaitable[RewardResult]]


def source_all_zero(site: Site) -> None:
    """The scorer gives 0 to everything from the first source."""
    first = site.controller.train_prompts[0].source

    def around(score: Score) -> Score:
        async def zero(response: str, prompt: Prompt) -> RewardResult:
            result = await score(response, prompt)
            if site.is_on and prompt.source == first and result.reward is not None:
                return replace(result, reward=0.0, terms=dict.fromkeys(result.terms, 0.0))
            return result

        return zero

    wrap(site.controller.scorer, "score", around)


def scorer_down(site: Site) -> None:
    """Every call of the scorer fails."""

    def around(score: Score) -> Score:
        async def down(response: str, prompt: Prompt) -> RewardResult:
            if site.is_on:
                failure = Failure(kind=FailureKind.REWARD, message="the scorer does not answer (a drill)")
                return RewardResult(reward=None, failure=failure)
            return await score(response, prompt)

        return down

    wrap(site.controller.scorer, "score", around)


# ---- trainer -----------------------------------------------------------------------------------------------------


def lost_state(site: Site) -> None:
    """The run is taken up again with the weights and the optimizer of its first step."""
    trainer = site.controller.trainer
    first = trainer.state_dict()["policy"]
    fresh: dict[str, Any] = _copied(first)

    def around(load: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, Any]], None]:
        def partial(state: Mapping[str, Any]) -> None:
            load({**state, "policy": fresh})

        return partial

    wrap(trainer, "load_state_dict", around)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def object_store_spill(site: Site) -> None:
    """Batches go over the disk on their way to the trainer, for as long again as a step usually takes."""
    controller = site.controller
    usual_s: list[float] = []
    began_s = [time.monotonic()]

    def around(make_batch: Callable[..., Any]) -> Callable[..., Any]:
        def spilled(sequences: Any, *args: Any, **kwargs: Any) -> Any:
            if len(sequences) == 1:  # a probe's
                return make_batch(sequences, *args, **kwargs)
            now_s = time.monotonic()
            if not site.is_on:
                usual_s.append(now_s - began_s[0])
                num_bytes = 0
            else:
                num_bytes = _over_the_disk(float(np.median(usual_s)))
            began_s[0] = time.monotonic()
            controller.recorder.metrics({"host/object_store_spilled_bytes": Total(num_bytes)})
            return make_batch(sequences, *args, **kwargs)

        return spilled

    wrap(controller.trainer, "make_batch", around)


def _over_the_disk(seconds: float) -> int:
    """Write blocks to a file and read them back for so long; the bytes that were written."""
    block = bytes(4 * 2**20)
    num_bytes, until_s = 0, time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until_s:
            file.seek(0)
            file.write(block)
            file.flush()
            file.seek(0)
            num_bytes += len(file.read())
    return num_bytes


# ---- host --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _JumpingClock:
    """A wall clock that is set back by an hour, and forward by two a few steps later; the monotonic one goes on."""

    clock: Clock
    site: Site

    def unix_s(self) -> float:
        hours = (0, -1, 1)[self.site.is_on + (self.site.age >= 6)]
        return self.clock.unix_s() + 3600.0 * hours

    def mono_s(self) -> float:
        return self.clock.mono_s()


def clock_jump(site: Site) -> None:
    """The host's wall clock jumps back and forth; nothing else happens."""
    recorder = site.controller.recorder
    recorder.clock = _JumpingClock(recorder.clock, site)


# ---- the table ---------------------------------------------------------------------------------------------------

_TWO_REPLICAS = {"rollout.num_replicas": 2}

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="slow_replica",
            says="one replica's steps take ten times as long",
            expects=("slow_replica",),
            inject=slow_replica,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="dead_replica",
            says="one replica's engine fails; the others take over what it was sampling",
            expects=("replica_died",),
            inject=dead_replica,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="sandboxes_gone",
            says="half of the trajectories find their sandbox gone",
            expects=("dead_sandbox_pool",),
            inject=sandboxes_gone,
            needs={"run.max_failure_frac": 0.9},
        ),
        Fault(
            name="leaked_leases",
            says="leases of sandboxes are not given back (of a pool that the drill brings along)",
            expects=("sandbox_leak",),
            inject=leaked_leases,
        ),
        Fault(
            name="source_all_zero",
            says="the scorer gives 0 to everything from one source",
            expects=("one_source_all_zero",),
            inject=source_all_zero,
            least_sources=2,
        ),
        Fault(
            name="scorer_down",
            says="every call of the scorer fails",
            expects=("dead_scorer",),
            inject=scorer_down,
            ends_run=True,
        ),
        Fault(
            name="skewed_filter",
            says="the filter drops four groups of five",
            expects=("filter_starvation",),
            inject=skewed_filter,
            needs={"algorithm.filter.drop_flat": True, "algorithm.filter.refill": True},
        ),
        Fault(
            name="skipped_bucket",
            says="a bucket of weights does not arrive; the digests refuse the version",
            expects=("refused_publication",),
            inject=skipped_bucket,
            ends_run=True,
        ),
        Fault(
            name="skipped_bucket_unproven",
            says="half of the tensors keep their old values, and nothing checks it",
            expects=("missed_weight_sync",),
            inject=skipped_bucket_unproven,
            needs=UNPROVEN,
        ),
        Fault(
            name="stale_replica",
            says="one replica takes no publication any more, and is taken out of service",
            expects=("version_drift",),
            inject=stale_replica,
            needs={"sync.staging": "direct"},
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="stale_replica_unproven",
            says="one replica samples with old weights under new labels, and nothing checks it",
            expects=("version_drift",),
            inject=stale_replica_unproven,
            needs=UNPROVEN,
            least=_TWO_REPLICAS,
        ),
        Fault(
            name="loose_bound",
            says="the buffer forgets its staleness bound",
            expects=("stale_samples",),
            inject=loose_bound,
            needs={"run.schedule": "separate_async"},
            least={  # slots for all that is admitted: what waits for one is sampled late, under a newer version
                "buffer.max_staleness_steps": 1,
                "rollout.num_slots": 256,
                "rollout.kv_pool_tokens": 16_384,
            },
        ),
        Fault(
            name="samples_held_back",
            says="finished trajectories reach the buffer late",
            expects=("buffer_never_fills",),
            inject=samples_held_back,
        ),
        Fault(
            name="stuck_prompt",
            says="one prompt of every step never ends before its deadline",
            expects=("buffer_never_fills",),
            inject=stuck_prompt,
            needs={"run.max_failure_frac": 0.9},
        ),
        Fault(
            name="quantized_engine",
            says="the engines round their matrices to four bits, and nothing checks it",
            expects=("engine_mismatch",),
            inject=quantized_engine,
            needs=UNPROVEN,
        ),
        Fault(
            name="wrong_temperature",
            says="the engines sample at another temperature, and nothing checks it",
            expects=("engine_mismatch",),
            inject=wrong_temperature,
            needs={"sync.probe": False},
        ),
        Fault(
            name="wrong_temperature_probed",
            says="the engines sample at another temperature; the probe refuses them",
            expects=("engine_mismatch",),
            inject=wrong_temperature,
            ends_run=True,
        ),
        Fault(
            name="noisy_engine",
            says="the engines hold noise after one publication, and nothing checks it",
            expects=("silent_error_after_wake",),
            inject=noisy_engine,
            needs=UNPROVEN,
        ),
        Fault(
            name="mismatch_to_nan",
            says="the engines' logprobs go astray until one is not a number",
            expects=("mismatch_to_nan",),
            inject=mismatch_to_nan,
            needs={"sync.probe": False},
            ends_run=True,
        ),
        Fault(
            name="blocked_publication",
            says="a publication never ends: a collective in which one side has stopped",
            expects=("collective_hang",),
            inject=blocked_publication,
            needs={"sync.staging": "direct"},
            ends_run=True,
        ),
        Fault(
            name="oom_in_sync",
            says="the replicas have no memory left for the new weights (simulated)",
            expects=("oom_in_sync",),
            inject=oom_in_sync,
            ends_run=True,
        ),
        Fault(
            name="growing_lengths",
            says="responses grow until an update no longer fits (memory is simulated)",
            expects=("late_oom_with_length",),
            inject=growing_lengths,
            ends_run=True,
        ),
        Fault(
            name="fragmentation",
            says="the allocator holds ever more that nobody uses (memory is simulated)",
            expects=("fragmentation",),
            inject=fragmentation,
        ),
        Fault(
            name="object_store_spill",
            says="batches go over the disk on their way to the trainer",
            expects=("object_store_spill",),
            inject=object_store_spill,
        ),
        Fault(
            name="clock_jump",
            says="the wall clock jumps back and forth: no alarm, and the log's clock is said to be wrong",
            expects=("well",),
            notes="the clock ran backwards",
            inject=clock_jump,
        ),
        Fault(
            name="tail_burst",
            says="in every third step one response runs on to eight times the usual limit",
            expects=("tail_burst",),
            inject=tail_burst,
        ),
        Fault(
            name="lost_state",
            says="the run is taken up again with the weights and optimizer of its beginning",
            expects=("discontinuity_after_resume",),
            inject=lost_state,
            takes_up_again=True,
        ),
    )
}
