"""The part of a publication that runs inside vLLM's worker processes, one transaction per rank.

vLLM mixes `PublicationExtension` into its worker class; its methods are reached by name (`collective_rpc`) with JSON
texts and raw bytes, never pickled objects, and answer with JSON text, errors included. Buckets come in the message,
or from shared memory or CUDA IPC handles, which every rank maps for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rollbook.errors import SyncError
from rollbook.sync.transaction import ReplicaTransaction, Staging
from rollbook.sync.wire import (
    Json,
    bucket_from_json,
    error_to_json,
    field,
    manifest_from_json,
    report_to_json,
    text_map,
)

if TYPE_CHECKING:
    from rollbook.sync.transport import Receiver

TRANSPORTS = ("inline", "shm", "ipc")


class PublicationExtension:
    """Methods of vLLM's worker. Each returns JSON text: {"ok": {...}} or {"error": {kind, what, remedy}}."""

    def rollbook_begin(self, text: str) -> str:
        """Make the transaction: {"replica_id", "weight_version", "staging", "transport"}."""
        return _answer(lambda: self._rollbook_begin(json.loads(text)))

    def rollbook_open(self, text: str) -> str:
        return _answer(lambda: {"coverage": _of(self).transaction.open(manifest_from_json(json.loads(text)))})

    def rollbook_receive(self, text: str, payload: bytes) -> str:
        """Header of a bucket with its "place"; `payload` is empty unless the bytes travel in the message."""
        return _answer(lambda: _of(self).receive(json.loads(text), payload))

    def rollbook_prove(self, text: str) -> str:
        return _answer(lambda: _of(self).transaction.prove(text_map(json.loads(text), "digests")))

    def rollbook_commit(self) -> str:
        return _answer(lambda: report_to_json(_of(self).transaction.commit()))

    def rollbook_abort(self) -> str:
        return _answer(lambda: _of(self).transaction.abort())

    def rollbook_state(self) -> str:
        """{"state": idle, open, proven or broken, "weight_version": the last proven one}."""

        def state() -> Json:
            transaction = _of(self).transaction
            return {"state": transaction.state.value, "weight_version": transaction.weight_version}

        return _answer(state)

    def _rollbook_begin(self, options: Json) -> Json:
        from rollbook.rollout.vllm.weights import VllmWeights

        model = self.get_model()  # type: ignore[attr-defined]  # the worker's own method
        staging: Staging = "direct" if field(options, "staging", str) == "direct" else "staged"
        transaction = ReplicaTransaction(
            VllmWeights(model),
            replica_id=field(options, "replica_id", int),
            weight_version=field(options, "weight_version", int),
            staging=staging,
        )
        self.rollbook_publication = _Publication(transaction, _receiver(field(options, "transport", str)))
        return {"num_tensors": len(transaction.live.specs())}


class _Publication:
    """The state a worker keeps between calls."""

    def __init__(self, transaction: ReplicaTransaction, receiver: Receiver) -> None:
        self.transaction = transaction
        self.receiver = receiver

    def receive(self, header: Json, payload: bytes) -> None:
        data = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if payload
            else torch.zeros(0, dtype=torch.uint8)
        )
        bucket = bucket_from_json(header, data)
        self.transaction.receive(self.receiver.take(bucket, field(header, "place", dict)))


def _of(worker: Any) -> _Publication:
    publication: _Publication | None = getattr(worker, "rollbook_publication", None)
    if publication is None:
        raise SyncError("vLLM's worker has no publication open", "the order is open, receive, prove, commit")
    return publication


def _receiver(transport: str) -> Receiver:
    if transport == "inline":
        from rollbook.sync.transport import InlineReceiver

        return InlineReceiver()
    if transport == "shm":
        from rollbook.sync.shm import ShmReceiver

        return ShmReceiver()
    if transport == "ipc":
        from rollbook.sync.ipc import IpcReceiver

        return IpcReceiver()
    raise SyncError(
        f"vLLM's workers know no transport {transport!r}", f"choose one of: {', '.join(TRANSPORTS)}"
    )


def _answer(work: Callable[[], Json | None]) -> str:
    try:
        with torch.no_grad():
            return json.dumps({"ok": work() or {}})
    except Exception as error:
        return json.dumps(error_to_json(error))
