"""A replica in a process of its own: `python sync_replica_process.py SHM_FOLDER`; prints its port, ends with stdin."""

from __future__ import annotations

import asyncio
import sys

from sync_engine import StepEngine
from sync_fakes import fused_engine, live_digests

from rollbook.sync.digest import fold
from rollbook.sync.inproc import InprocPort
from rollbook.sync.remote import ReplicaServer
from rollbook.sync.shm import ShmReceiver


async def main(folder: str) -> None:
    engine = StepEngine(fused_engine(is_tied=False))
    server = ReplicaServer(InprocPort(engine), ShmReceiver(folder))
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(engine.version, fold(live_digests(engine.live)), flush=True)
    await server.close()
    engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
