"""The port of an engine in this process: the transaction runs beside it, the swap runs on its thread.

Staged: buckets are received on the caller's thread while the engine decodes; only the commit runs on the engine's
thread, between two steps. Direct: the engine is paused from `open` to `commit`, and every write runs on its thread.

A replica whose live weights are of no version must not take another step. It is put to sleep (level 2: "serves
only once a publication committed") and woken again, so that nothing but a proven re-sync lets it decode: a
`resume` by somebody else does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch

from rollbook.errors import RunError, SyncError
from rollbook.sync.quantized import Scheme, as_sent_to
from rollbook.sync.transaction import ReplicaTransaction, Staging, State
from rollbook.weights import Bucket, CommitReport, Digests, LiveWeights, Manifest, Receiving

Result = TypeVar("Result")

COPIED_POLL_S = 2e-5
"""How often a publisher looks whether a copy within its own process is done."""
LABEL_POLL_S = 1.0
"""How often the engine's thread, held for the new version label, looks whether the event loop still lives."""


class SwapEngine(Protocol):
    """What a port needs of an engine; `rollout.engine.Engine` with the methods for weights.

    Calls are carried out between steps, in the order in which they were queued; several that are queued together
    are carried out without a step in between.
    """

    replica_id: int

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...

    async def run_between_steps(self, fn: Callable[[], Result]) -> Result: ...

    async def adopt_version(self, weight_version: int) -> None: ...

    async def live_weights(self) -> LiveWeights: ...

    async def weight_version(self) -> int: ...


class Copied:
    """The arrival of a bucket whose copies are queued on a device."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def result(self, timeout: float | None = None) -> None:
        """
        Raises:
            TimeoutError: the device has not come to it after `timeout` seconds.
        """
        if self._event is None:
            return
        if timeout is None:
            self._event.synchronize()
            return
        ends_at_s = time.monotonic() + timeout
        while not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > ends_at_s:
                raise TimeoutError
            time.sleep(COPIED_POLL_S)

    def cancel(self) -> None:
        return None


class InprocPort:
    """A `WeightPort` for an engine of this process. Tensors by reference (`Bucket.shared`) are not copied where the
    trainer's tensor and the engine's are the same memory; digests and transaction stay the same.

    Args:
        quantize: what stands between the engine's weights and the publication (`sync.quantize`).
    """

    def __init__(
        self, engine: SwapEngine, *, staging: Staging = "staged", quantize: Literal["none"] | Scheme = "none"
    ) -> None:
        self.engine = engine
        self.replica_id = engine.replica_id
        self.staging = staging
        self._quantize: Literal["none"] | Scheme = quantize
        self.transaction: ReplicaTransaction | None = None
        """Made at the first `open`; its state says whether the replica is sound."""
        self._holds_pause = False
        self._beside_engine: asyncio.Future[Any] | None = None
        self._in_order = asyncio.Lock()
        self._queued: set[int] = set()
        """Buckets of the open publication that wait for the engine's thread."""
        self._at_work = threading.Lock()
        """Held by whoever takes a bucket in beside the engine, or drops the publication."""
        self._blocking: asyncio.Future[None] | None = None

    async def weight_version(self) -> int:
        await self._blocked()
        if self.transaction is not None and self.transaction.state is State.BROKEN:
            raise SyncError(
                f"replica {self.replica_id} holds no proven version",
                "re-sync it in full",
            )
        return await self.engine.weight_version()

    async def open(self, manifest: Manifest) -> None:
        await self._blocked()
        if self.transaction is None:
            self.transaction = ReplicaTransaction(
                as_sent_to(await self.engine.live_weights(), self._quantize),
                replica_id=self.replica_id,
                weight_version=await self.engine.weight_version(),
                staging=self.staging,
            )
        transaction = self.transaction
        self._queued = set()
        if manifest.is_resync and transaction.state in (State.OPEN, State.PROVEN):
            await self.abort()  # left behind by a trainer that is gone
        await self.engine.run_between_steps(lambda: transaction.open(manifest))
        if self.staging == "direct":
            self._holds_pause = True
            await self.engine.pause("keep")

    def receive(self, bucket: Bucket) -> Receiving:
        """On the caller's thread, of whose work none is handed to another; what touches live weights is left to the
        engine's thread, and so is whatever comes behind it."""
        transaction = self._opened()
        if self._touches_live(bucket) or self._queued:
            self._queued.add(bucket.bucket_idx)
            return self._receive_between_steps(transaction, bucket, self._queued)
        with self._at_work:
            return Copied(transaction.begin_receive(bucket))

    async def _receive_between_steps(
        self, transaction: ReplicaTransaction, bucket: Bucket, queued: set[int]
    ) -> None:
        try:
            async with self._in_order:  # the next bucket may be on its way already
                await self.engine.run_between_steps(lambda: transaction.receive(bucket))
        finally:
            queued.discard(bucket.bucket_idx)

    def _touches_live(self, bucket: Bucket) -> bool:
        return self.staging == "direct" or any(entry.encoding != "dense" for entry in bucket.entries)

    async def prove(self, digests: Digests) -> None:
        transaction = self._opened()
        await self._beside(lambda: transaction.prove(digests))

    async def commit(self) -> CommitReport:
        """Swap, prove, adopt, without a step in between. Cancelled on the way, the replica is taken out of service:
        nobody could say under which version its next token was sampled."""
        transaction = self._opened()
        version = transaction.pending_version
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[CommitReport] = loop.create_future()
        labeled = threading.Event()

        def swap() -> None:
            try:
                report = transaction.commit()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, outcome, error)
            else:
                loop.call_soon_threadsafe(_answer, outcome, report)
                while not labeled.wait(LABEL_POLL_S) and not loop.is_closed():
                    pass  # no step before the label is queued behind this call

        def ended(swapping: asyncio.Future[None]) -> None:
            error = None if swapping.cancelled() else swapping.exception()
            if error is not None:  # the engine is gone: nothing was swapped, or nobody will say so
                _fail(outcome, error)

        swapping = asyncio.ensure_future(self.engine.run_between_steps(swap))
        swapping.add_done_callback(ended)
        try:
            report = await outcome
            adopting = asyncio.ensure_future(self.engine.adopt_version(version))
            await asyncio.sleep(0)
            labeled.set()
            await adopting
            await swapping
        except BaseException as error:
            if transaction.state is State.BROKEN or not isinstance(error, SyncError):
                # Not awaited: the engine may hang.
                self._blocking = asyncio.ensure_future(self._block(labeled))
            raise
        await self._end_pause()
        return report

    async def abort(self) -> None:
        transaction = self.transaction
        if transaction is None:
            return
        if self._beside_engine is not None:  # a call that was cancelled still runs on its thread
            await asyncio.wait([self._beside_engine])
        await self.engine.run_between_steps(lambda: self._drop(transaction))
        if transaction.state is State.BROKEN:
            self._blocking = asyncio.ensure_future(self._block())
            await asyncio.shield(self._blocking)
        await self._end_pause()

    def _drop(self, transaction: ReplicaTransaction) -> None:
        with self._at_work:
            transaction.abort()

    async def _beside(self, work: Callable[[], Result]) -> Result:
        """Run on a worker thread, while the engine goes on; a cancelled caller does not end the work."""
        running = asyncio.get_running_loop().run_in_executor(None, work)
        self._beside_engine = running
        return await asyncio.shield(running)

    async def _block(self, held: threading.Event | None = None) -> None:
        """No step until a publication was committed; `held` lets go of the engine's thread once that is queued."""
        sleeping = asyncio.ensure_future(self.engine.sleep(2))
        await asyncio.sleep(0)
        if held is not None:
            held.set()
        with contextlib.suppress(RunError):  # an engine that is dead takes no step either
            await sleeping
            await self.engine.wake()
        if self.transaction is not None:
            self.transaction.state = State.BROKEN

    async def _blocked(self) -> None:
        """Wait until a replica that is being taken out of service is out."""
        if self._blocking is not None:
            await asyncio.shield(self._blocking)

    async def _end_pause(self) -> None:
        if self._holds_pause:
            self._holds_pause = False
            await self.engine.resume()

    def _opened(self) -> ReplicaTransaction:
        if self.transaction is None:
            raise SyncError(
                f"replica {self.replica_id} has no publication open",
                "the order is open, receive, prove, commit",
            )
        return self.transaction


def _answer(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Result], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
