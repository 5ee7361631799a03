"""Faults of weights: what does not arrive, and what is changed below the checks after a publication."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import Tensor

from rollbook.drill.fault import Site, wrap
from rollbook.errors import SyncError
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.native.mismatch import ROUNDINGS, is_rounded
from rollbook.sync.transport import arrived
from rollbook.weights import Bucket, CommitReport, LiveWeights, Manifest, Receiving, WeightPort

Receive = Callable[[Bucket], Receiving]


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
