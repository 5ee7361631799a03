"""Publications by NCCL to a GPU of another process: a refused bucket holds up no rank, the next version is proven."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from sync_fakes import FakeSource, tiny_tensors
from sync_faults import OF_BUCKETS, OF_MANIFESTS, Fault
from sync_transports import FULL

from rollbook.config.environment import environment
from rollbook.errors import SyncError
from rollbook.sync.broadcast import WATCHDOG, BroadcastGroup, BroadcastSender
from rollbook.sync.digest import digest, fold
from rollbook.sync.inproc import Copied
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
OURS = torch.device("cuda", 0)


class Replica:
    """`nccl_replica.py` in its process."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("nccl_replica.py"))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, script], stdin=pipe, stdout=pipe, text=True)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    made = Replica()
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def joined(store: Path, rank: int = 0, deadline_s: float = 30) -> BroadcastGroup:
    device = torch.device("cuda", rank)
    return BroadcastGroup.create(
        "nccl", rank=rank, size=2, device=device, deadline_s=deadline_s, file=str(store)
    )


@pytest.fixture(autouse=True)
def given_up_on_the_device() -> Iterator[None]:
    with environment(**WATCHDOG):
        yield


@pytest.mark.parametrize("kind", [*OF_BUCKETS, *OF_MANIFESTS])
def test_a_replica_that_refuses_what_nccl_brought(
    kind: type[Fault], replica: Replica, tmp_path: Path
) -> None:
    async def publish() -> None:
        replica.tell(f"serve {kind.__name__} {tmp_path / 'store'}")
        sender = BroadcastSender(await asyncio.to_thread(joined, tmp_path / "store"))
        port = RemotePort(0, sender, port=int(replica.answer()))
        source = FakeSource({name: tensor.to(OURS) for name, tensor in tiny_tensors().items()})
        publisher = Publisher(source, [port], FULL, buffers=sender.buffer)
        try:
            assert (await publisher.publish(1)).committed == (0,)
            held = replica.ask("on")
            source.step()
            with pytest.raises(SyncError, match=f"version 2 was not published.*({kind.told})"):
                await publisher.publish(2)
            assert replica.ask("off") == held
            assert (await publisher.publish(2)).committed == (0,)
            trainer = {name: digest(tensor) for name, tensor in source.tensors.items()}
            assert replica.ask("off") == f"2 {fold(trainer)}"
        finally:
            publisher.close()
            await port.close()
            sender.close()

    asyncio.run(asyncio.wait_for(publish(), 60))


def test_a_broadcast_that_nobody_joins_is_given_up_and_the_process_lives(tmp_path: Path) -> None:
    """Soon after its deadline: torch would wait another minute for a dump that nobody reads."""

    def meet(rank: int) -> BroadcastGroup:
        group = joined(tmp_path / "store", rank, deadline_s=10)
        group.broadcast(torch.zeros(8, dtype=torch.uint8, device=group.device))
        return group

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(meet, range(2)))
    queued = groups[0].begin(
        torch.zeros(1 << 28, dtype=torch.uint8, device=OURS)
    )  # more than NCCL sends ahead
    assert queued is not None
    Copied(queued).result(timeout=10 + 20)
