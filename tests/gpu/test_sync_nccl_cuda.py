"""Publications by NCCL from one GPU to another: a refused bucket holds up no rank, and the next version is proven."""

from __future__ import annotations

import asyncio
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from sync_faults import OF_BUCKETS, OF_MANIFESTS, Fault
from sync_transports import FULL, BehindTransport, broadcast, linked, refused_then_taken

from rollbook.sync.broadcast import BroadcastGroup
from rollbook.sync.inproc import Copied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("kind", [*OF_BUCKETS, *OF_MANIFESTS])
def test_a_replica_that_refuses_what_nccl_brought(kind: type[Fault], tmp_path: Path) -> None:
    async def publish() -> None:
        by_nccl = functools.partial(broadcast, backend="nccl")
        devices = ("cuda:0", "cuda:1")
        async with linked(by_nccl, tmp_path, FULL, port=BehindTransport, devices=devices) as link:
            link.port.fault = kind()
            await refused_then_taken(link.publisher, link.source, link.engine, link.port.fault)

    asyncio.run(asyncio.wait_for(publish(), 60))


def test_a_broadcast_that_nobody_joins_is_given_up_and_the_process_lives(tmp_path: Path) -> None:
    def join(rank: int) -> BroadcastGroup:
        device, file = torch.device("cuda", rank), str(tmp_path / "store")
        group = BroadcastGroup.create("nccl", rank=rank, size=2, device=device, deadline_s=10, file=file)
        group.broadcast(torch.full((8,), 1 - rank, dtype=torch.uint8, device=group.device))
        return group

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, range(2)))
    queued = groups[0].begin(torch.zeros(8, dtype=torch.uint8, device=groups[0].device))
    assert queued is not None
    Copied(queued).result(timeout=60)
