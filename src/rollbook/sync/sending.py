"""The buckets of one publication: packed on the export thread, on their way to all replicas while the next is packed.

export thread   pack 0 ─► send 0 ─► pack 1 ─► send 1 ─► wait for 0 ─► pack 2 ─► ...
event loop      watches that a bucket is packed within its deadline; carries what is sent
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rollbook.errors import RunError
from rollbook.sync.bucket import Packer
from rollbook.sync.config import SyncConfig
from rollbook.sync.export_thread import ExportThread
from rollbook.sync.publication import Publication, Sent
from rollbook.weights import Arrival, Bucket, WeightPort

Settle = Callable[[str, Sequence[WeightPort], Sequence[BaseException | None]], Coroutine[Any, Any, object]]


class Sending:
    """Made on the event loop.

    Args:
        settled: lets replicas that failed the phase leave the publication.
        late: the error of a replica that did not answer to a phase in time.
    """

    def __init__(
        self,
        publication: Publication,
        packer: Packer,
        export: ExportThread,
        config: SyncConfig,
        *,
        settled: Settle,
        late: Callable[[str, int, float], Exception],
    ) -> None:
        self.publication = publication
        self.config = config
        self._packer, self._export = packer, export
        self._settled, self._late = settled, late
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """The export thread packs buckets and sends them on their way; this watches that it goes on."""
        publication = self.publication
        # From now on: the thread may still hang in an export that was given up.
        publication.packing_ends_at_s = time.monotonic() + self.config.export_deadline_s
        streaming = asyncio.wrap_future(self._export.submit(self._send_all))
        try:
            while not streaming.done():
                wait_s = publication.packing_ends_at_s - time.monotonic()
                if wait_s < 0:
                    raise publication.hangs(
                        f"bucket {publication.num_buckets}", self.config.export_deadline_s
                    )
                await asyncio.wait({streaming}, timeout=min(wait_s, self.config.export_deadline_s))
            try:
                streaming.result()
            except (RunError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise publication.export_failed(f"bucket {publication.num_buckets}", error) from error
        finally:
            publication.is_over = True
            for sent in list(publication.under_way):
                sent.cancel()
            if publication.packing_ends_at_s == math.inf:  # it waits for nothing any more
                await asyncio.wait({streaming}, timeout=self.config.abort_deadline_s)
            if streaming.done() and not streaming.cancelled():
                streaming.exception()
            streaming.cancel()  # what hangs on has nobody to tell

    def _send_all(self) -> None:
        """On the export thread. With two slots, bucket i+2 is packed as soon as bucket i has arrived, while i+1
        travels."""
        publication = self.publication
        buckets: Iterator[Bucket | None] = iter(self._packer.buckets())
        travelling: deque[list[Sent]] = deque()
        try:
            while not publication.is_over:
                began_at_s = time.perf_counter()
                publication.packing_ends_at_s = time.monotonic() + self.config.export_deadline_s
                bucket = next(buckets, None)
                publication.packing_ends_at_s = math.inf
                publication.export_s += time.perf_counter() - began_at_s
                # Given up while it was packed, a bucket is sent to nobody.
                if bucket is None or publication.is_over:
                    break
                publication.num_buckets += 1
                travelling.append(self._send(bucket))
                if len(travelling) == self.config.max_buckets:
                    self._arrive(travelling.popleft())
            while travelling and not publication.is_over:
                self._arrive(travelling.popleft())
        finally:
            for sent in itertools.chain.from_iterable(travelling):
                sent.cancel()

    def _send(self, bucket: Bucket) -> list[Sent]:
        """The bucket on its way to every replica that is still in the publication."""
        publication = self.publication
        ports = list(publication.ports.values())
        bucket = replace(bucket, attempt=publication.attempt, replica_ids=tuple(publication.ports))
        sent = []
        for port in ports:
            arrival: Arrival | None = None
            failed: Exception | None = None
            try:
                receiving = port.receive(bucket)
                if isinstance(receiving, Coroutine):
                    receiving = asyncio.run_coroutine_threadsafe(receiving, self._loop)
                arrival = receiving
            except Exception as error:
                failed = error
            sent.append(Sent(port, arrival, failed, time.monotonic() + self.config.receive_deadline_s))
        publication.under_way.update(sent)
        return sent

    def _arrive(self, bucket: Sequence[Sent]) -> None:
        """Wait until a bucket has arrived; replicas that it does not reach leave the publication."""
        publication = self.publication
        outcomes: list[BaseException | None] = []
        for sent in bucket:
            try:
                sent.wait()
                outcomes.append(None)
            except TimeoutError:
                sent.cancel()
                deadline_s = self.config.receive_deadline_s
                outcomes.append(self._late("receive", sent.port.replica_id, deadline_s))
            except BaseException as error:
                outcomes.append(error)
        publication.under_way.difference_update(bucket)
        if publication.is_over or not any(outcomes):
            return
        ports = [sent.port for sent in bucket]
        settling = self._settled("receive", ports, outcomes)
        asyncio.run_coroutine_threadsafe(settling, self._loop).result()
