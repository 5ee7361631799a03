"""Each fault of a publication by name, over each transport: refused, the old version serves, the next one is proven.

A fault is injected on the engine's side, behind the transport, or on the trainer's, before it. A broadcast's
collectives leave nothing to inject on the trainer's side but the bytes (`test_sync_ports.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, tiny_tensors
from sync_faults import OF_BUCKETS, OF_MANIFESTS, Duplicated, Fault, Missing, Reordered
from sync_transports import (
    FULL,
    BeforeTransport,
    BehindTransport,
    Pair,
    broadcast,
    disk,
    inline,
    linked,
    refused_then_taken,
    shm,
)

from rollbook.sync.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("transport", [inline, shm, disk, broadcast])
@pytest.mark.parametrize("kind", [*OF_BUCKETS, *OF_MANIFESTS])
async def test_a_fault_behind_the_transport(
    kind: type[Fault], transport: Callable[..., Awaitable[Pair]], tmp_path: Path
) -> None:
    async with linked(transport, tmp_path, FULL, port=BehindTransport) as link:
        link.port.fault = kind()
        await refused_then_taken(link.publisher, link.source, link.engine, link.port.fault)


@pytest.mark.parametrize("transport", [inline, shm, disk])
@pytest.mark.parametrize("kind", [Missing, Duplicated, Reordered, *OF_MANIFESTS])
async def test_a_fault_before_the_transport(
    kind: type[Fault], transport: Callable[..., Awaitable[Pair]], tmp_path: Path
) -> None:
    async with linked(transport, tmp_path, FULL, remote=BeforeTransport) as link:
        link.remote.fault = kind()
        await refused_then_taken(link.publisher, link.source, link.engine, link.remote.fault)


@pytest.mark.parametrize("kind", [Missing, Duplicated, Reordered, *OF_MANIFESTS])
async def test_a_fault_within_one_process(kind: type[Fault]) -> None:
    """Tensors by reference: there are no bytes to cut or to flip (`test_sync_ports.py` replaces a tensor)."""
    source, engine, fault = FakeSource(tiny_tensors()), StepEngine(fused_engine(is_tied=False)), kind()
    port = BehindTransport(engine)
    port.fault = fault
    publisher = Publisher(source, [port], FULL)
    try:
        await refused_then_taken(publisher, source, engine, fault)
    finally:
        publisher.close()
        engine.close()
