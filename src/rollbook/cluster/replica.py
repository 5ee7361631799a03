"""A process of an engine: inside the actor."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from rollbook.cluster.meeting import EngineFacts, ReplicaAddress, join_broadcast
from rollbook.config.run_config import RunConfig
from rollbook.errors import EngineError
from rollbook.modeling.load import DTYPES, LoadedModel, load_model, load_tokenizer
from rollbook.modeling.lora import adapter_tensors, base_digest
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.broadcast import BroadcastReceiver
from rollbook.sync.inproc import InprocPort
from rollbook.sync.remote import ReplicaServer
from rollbook.sync.transport import Receiver

if TYPE_CHECKING:
    from rollbook.rollout.vllm.engine import VllmEngine


class ReplicaActor:
    """One engine and the server through which its weights come."""

    def __init__(self, config: RunConfig, replica_id: int, *, host: str) -> None:
        self.config, self.replica_id = config, replica_id
        self._host = host or ray.util.get_node_ip_address()

    def warm_up(self) -> None:
        """What takes long and needs to know nothing of the trainer, which is being made meanwhile."""
        device = self.config.rollout.device
        if device != "cpu":
            torch.zeros(1, device=device)  # its context

    async def start(self, facts: EngineFacts) -> ReplicaAddress:
        """Load the model, start the engine and listen for publications; its weights come by the first of them."""
        self._facts = facts
        config, rollout = self.config, self.config.rollout
        if rollout.num_threads:
            torch.set_num_threads(rollout.num_threads)
        self.engine = await (self._vllm() if rollout.engine == "vllm" else self._native())
        receiver: Receiver
        if config.sync.transport == "disk":
            from rollbook.sync.disk import DiskReceiver

            receiver = DiskReceiver(config.sync.disk_dir)
        elif config.sync.transport == "broadcast":
            receiver = BroadcastReceiver(None, max_bucket_bytes=config.sync.bucket_bytes)
        else:
            from rollbook.sync.shm import ShmReceiver

            receiver = ShmReceiver(config.sync.shm_dir)
        token = secrets.token_hex(16)
        in_message_bytes = config.sync.bucket_bytes if config.sync.transport == "broadcast" else 0
        self.server = ReplicaServer(
            InprocPort(self.engine, staging=config.sync.staging, quantize=config.sync.quantize),
            receiver,
            token=token,
            max_payload_bytes=in_message_bytes,
        )
        port = await self.server.start(self._host)
        return ReplicaAddress(
            replica_id=self.replica_id, host=self._host, port=port, token=token, pid=os.getpid()
        )

    async def _native(self) -> NativeEngine:
        engine = NativeEngine(
            await asyncio.to_thread(self._load),
            self.config.rollout,
            replica_id=self.replica_id,
            eos_token_ids=self._facts.eos_ids,
            tokenizer=self._tokenizer(),
        )
        await engine.start()
        await engine.sleep(2)  # nothing is sampled from these weights: they are of no version
        await engine.wake()
        return engine

    async def _vllm(self) -> VllmEngine:
        """vLLM in this process. It starts from the trainer's config alone, and serves nothing before a publication."""
        from rollbook.rollout.vllm.engine import VllmEngine

        rollout, tokenizer = self.config.rollout, self._tokenizer()
        with tempfile.TemporaryDirectory(prefix="rollbook-vllm-") as folder:
            Path(folder, "config.json").write_text(self._facts.config_json, encoding="utf-8")
            engine = VllmEngine(
                folder,
                rollout.model_copy(update={"dtype": self._facts.dtype}),
                rollout.vllm.model_copy(update={"load_format": "dummy"}),
                replica_id=self.replica_id,
                eos_token_ids=self._facts.eos_ids,
                tokenizer=tokenizer,
            )
            await engine.start()
        return engine

    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.config.model) if self.config.rollout.stop_strings else None

    def _load(self) -> LoadedModel:
        """
        Raises:
            EngineError: adapters are published alone, and the base here is another one than the trainer's.
        """
        config, device, facts = self.config.model, self.config.rollout.device, self._facts
        if not facts.base_digest:
            whole = config.model_copy(update={"lora": None})  # adapters come merged
            return load_model(whole, dtype=facts.dtype, device=device, with_tokenizer=False)
        # As the trainer does.
        model = load_model(config, dtype="float32", device=device, with_tokenizer=False)
        found = base_digest(model)
        if found != facts.base_digest:
            raise EngineError(
                f"the base of replica {self.replica_id} has the digest {found}, the trainer's {facts.base_digest}",
                "adapters alone need one base everywhere: give all hosts the same files, or use "
                "model.lora.publish = 'merged'",
            )
        for adapter in adapter_tensors(model).values():
            adapter.data = adapter.data.to(DTYPES[facts.dtype])
        return model

    async def join(self, meeting: str) -> None:
        """Meet the trainer and the other replicas, before the first publication."""
        group = await asyncio.to_thread(join_broadcast, self.config, meeting, rank=self.replica_id + 1)
        self.server.receiver = BroadcastReceiver(group, max_bucket_bytes=self.config.sync.bucket_bytes)

    async def do(self, method: str, *args: Any) -> Any:
        return await getattr(self.engine, method)(*args)
