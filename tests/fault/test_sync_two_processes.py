"""Trainer and replica in two processes, over shared memory, with a real kill between receive and commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sync_fakes import FakeSource, tiny_tensors

from rollbook.sync.config import SyncConfig
from rollbook.sync.digest import digest, fold
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort
from rollbook.sync.shm import ShmSender
from rollbook.weights import CommitReport

CONFIG = SyncConfig.model_construct(**{**SyncConfig().model_dump(), "bucket_bytes": 300, "delta": True})


class Replica:
    """The child process."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("sync_replica_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def finish(self) -> list[str]:
        """Its version and the fold of its live digests."""
        out, _ = self.process.communicate("\n", timeout=30)
        return out.split()


class DoomedPort(RemotePort):
    """Kills its replica when it is told to commit."""

    victim: Replica | None = None

    async def commit(self) -> CommitReport:
        if self.victim is not None:
            self.victim.process.kill()
            self.victim.process.wait()
        return await super().commit()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    made = [Replica(tmp_path), Replica(tmp_path)]
    yield made
    for replica in made:
        replica.process.kill()
        replica.process.communicate()


@pytest.mark.timeout(120)
async def test_a_replica_killed_between_receive_and_commit_and_its_successor(
    replicas: list[Replica], tmp_path: Path
) -> None:
    first, successor = replicas
    source, sender = FakeSource(tiny_tensors()), ShmSender(str(tmp_path))
    survivor_port = RemotePort(0, sender, port=successor.port)
    port = DoomedPort(0, sender, port=first.port)
    publisher = Publisher(source, [port], CONFIG, buffers=sender.buffer)
    await publisher.publish(1)
    source.tensors["model.norm.weight"][0] = -0.0
    assert (await publisher.publish(2)).base_version == 1
    source.step()
    port.victim = first
    with pytest.raises(Exception, match="commit failed on replica 0: the connection to replica 0"):
        await publisher.publish(3)
    assert publisher.weight_version == 2
    assert 0 in publisher.quarantined

    publisher.ports[0] = survivor_port
    report = await publisher.publish(3)
    assert (report.base_version, report.committed) == (None, (0,))
    trainer = fold({name: digest(tensor) for name, tensor in source.tensors.items()})
    assert successor.finish() == ["3", trainer]
    await port.close()
    await survivor_port.close()
    sender.close()
    publisher.close()
