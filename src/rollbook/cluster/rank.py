"""A process of the trainer: inside the actor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor

from rollbook.cluster.meeting import RemoteFacts, ReplicaAddress, config_json, join_broadcast
from rollbook.config.run_config import RunConfig
from rollbook.errors import RunError, refuse
from rollbook.modeling.lora import base_digest
from rollbook.sync.broadcast import BroadcastSender
from rollbook.sync.folders import folder_problems, uses_shm
from rollbook.sync.publisher import Publisher
from rollbook.sync.quantized import as_sent
from rollbook.sync.remote import RemotePort
from rollbook.sync.report import PublicationReport
from rollbook.sync.transport import Sender
from rollbook.trainer.objective import NotingObjective
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainBatch
from rollbook.weights import TensorSpec


class TrainerRank:
    """One rank of the trainer; rank 0 also publishes. Calls are carried out one at a time, in their order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.trainer: Trainer
        self.publisher: Publisher | None = None
        self._loop = asyncio.new_event_loop()
        self._sender: Sender | None = None

    def free_port(self) -> tuple[str, int]:
        """Where the ranks meet: rank 0's host, and a port of it."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            return host, int(listener.getsockname()[1])

    def build(
        self, store: str, timeout_s: float, keywords: dict[str, Any], *, tells_config: bool
    ) -> RemoteFacts:
        """Meet the other ranks and make the trainer.

        Args:
            tells_config: engines start from the model's config alone.
        Raises:
            ConfigError: the model cannot be loaded.
        """
        device = torch.device(keywords["model_config"].device)
        ranks = ALONE
        if self.size > 1:
            import torch.distributed as dist

            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )
            ranks = Ranks(dist.group.WORLD, device)
        self.trainer = Trainer(**keywords, ranks=ranks)
        model, specs = self.trainer.model, self.trainer.weight_specs()
        sends_adapters = model.lora is not None and model.lora.publish == "adapter"
        return RemoteFacts(
            facts=model.facts,
            source=model.source,
            dtype=model.dtype,
            hf_config=model.hf_config(),
            specs=specs,
            num_trained_params=self.trainer.num_trained_params,
            base_digest=base_digest(model) if sends_adapters else "",
            config_json=config_json(model, specs[0].dtype) if tells_config else "",
        )

    def pid(self) -> int:
        return os.getpid()

    def do(self, method: str, *args: Any, **keywords: Any) -> Any:
        """A method of the trainer whose answer is small."""
        return self._mine(getattr(self.trainer, method)(*args, **keywords))

    def fill(self, method: str, batch: TrainBatch, name: str) -> Any:
        """A forward pass: its readings, and what it wrote into each sequence."""
        values = getattr(self.trainer, method)(batch)
        return self._mine((values, [getattr(s, name) for s in batch.sequences]))

    def carry(self, batch: TrainBatch) -> Any:
        """A forward pass that computes nothing: what it takes to bring the batch here, and an answer back."""
        return self._mine([s.behavior_logprobs for s in batch.sequences])

    def update(self, method: str, batch: TrainBatch, objective: Any, keywords: dict[str, Any]) -> Any:
        """Optimizer updates: their readings, and what the objective noted."""
        values = getattr(self.trainer, method)(batch, objective, **keywords)
        noted = objective.noted if isinstance(objective, NotingObjective) else {}
        return self._mine((values, noted))

    def _mine(self, answer: Any) -> Any:
        """Rank 0 answers for all."""
        return answer if self.rank == 0 else None

    # ---- publications

    def open_publisher(self, config: RunConfig, addresses: Sequence[ReplicaAddress], meeting: str) -> None:
        """
        Raises:
            ConfigError: this host cannot write the transport's folder.
        """
        sync = config.sync
        self._stream = FinishedStream(self.trainer)
        source = as_sent(self._stream, sync.quantize)
        refuse(list(folder_problems(sync, by_shm=uses_shm(sync, is_on_ray=True))))
        if sync.transport == "disk":
            from rollbook.sync.disk import DiskSender

            self._sender = DiskSender(sync.disk_dir, source.weight_specs())
        elif sync.transport == "broadcast":
            self._sender = BroadcastSender(join_broadcast(config, meeting, rank=0))
        else:
            from rollbook.sync.shm import ShmSender

            self._sender = ShmSender(sync.shm_dir)
        ports = [self._port(address) for address in addresses]
        self.publisher = Publisher(source, ports, sync, buffers=self._sender.buffer)

    def set_port(self, address: ReplicaAddress) -> None:
        """A replica was started again: it listens elsewhere and holds nothing."""
        assert self.publisher is not None
        if isinstance(self._sender, BroadcastSender):
            self._sender.dissolve()
        self.publisher.ports[address.replica_id] = self._port(address)
        self.publisher.quarantined[address.replica_id] = "it was started again"

    def publish(
        self, weight_version: int, moved: bool, quarantined: Mapping[int, str], only: int | None
    ) -> tuple[PublicationReport | RunError, dict[int, str]]:
        """One publication (or, with `only`, the re-sync of one replica), and who is out of service after it."""
        publisher = self.publisher
        assert publisher is not None
        publisher.quarantined.update(quarantined)
        self._stream.begin()
        answer: PublicationReport | RunError
        try:
            work = publisher.publish(weight_version, moved=moved) if only is None else publisher.resync(only)
            answer = self._loop.run_until_complete(work)
        except RunError as error:
            answer = error
        if self.size > 1:
            self._stream.finish()
        return answer, dict(publisher.quarantined)

    def close(self) -> None:
        """Give shared memory back."""
        if self.publisher is not None:
            self.publisher.close()
        if self._sender is not None:
            self._sender.close()

    def drain(self) -> None:
        """Another rank's part of a publication."""
        for _ in self.trainer.export_weights():
            pass

    def _port(self, address: ReplicaAddress) -> RemotePort:
        assert self._sender is not None
        return RemotePort(
            address.replica_id, self._sender, host=address.host, port=address.port, token=address.token
        )


class FinishedStream:
    """The trainer's export, which rank 0 always goes through to its end: the others do too."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._stream: Iterator[tuple[str, Tensor]] | None = None

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self.trainer.weight_specs()

    def begin(self) -> None:
        self._stream = None

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._stream = self.trainer.export_weights()
        return self._stream

    def finish(self) -> None:
        for _ in self._stream or self.trainer.export_weights():
            pass
