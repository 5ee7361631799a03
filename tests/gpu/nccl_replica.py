"""A replica on the second GPU, in a process of its own.

Lines of stdin: `serve FAULT STORE` joins a group and prints its server's port; `on` and `off` switch the fault and
print the version that the engine serves, with the fold of its digests.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

import sync_faults
import torch
from sync_engine import StepEngine
from sync_fakes import fused_engine, live_digests
from sync_transports import BehindTransport

from rollbook.config.environment import environment
from rollbook.sync.broadcast import WATCHDOG, BroadcastGroup, BroadcastReceiver
from rollbook.sync.digest import fold
from rollbook.sync.remote import ReplicaServer

DEVICE = torch.device("cuda", 1)


async def serve(kind: str, store: str) -> tuple[BehindTransport, ReplicaServer, StepEngine]:
    with environment(**WATCHDOG):
        group = await asyncio.to_thread(
            BroadcastGroup.create, "nccl", rank=1, size=2, device=DEVICE, deadline_s=30, file=store
        )
    engine = StepEngine(fused_engine(is_tied=False, device=str(DEVICE)))
    port = BehindTransport(engine)
    port.fault = getattr(sync_faults, kind)()
    server = ReplicaServer(port, BroadcastReceiver(group, max_bucket_bytes=512), max_payload_bytes=1024)
    print(await server.start(), flush=True)
    return port, server, engine


async def main() -> None:
    held: list[tuple[BehindTransport, ReplicaServer, StepEngine]] = []
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        if line[0] == "serve":
            held.append(await serve(*line[1:]))
            continue
        port, _, engine = held[-1]
        port.fault.is_on = line[0] == "on"
        print(engine.version, fold(live_digests(engine.live)), flush=True)
    for _, server, engine in held:
        await server.close()
        engine.close()


if __name__ == "__main__":
    asyncio.run(main())
