"""The port of a vLLM engine whose weights lie in vLLM's own processes: one transaction per rank, inside the workers.

    open ─► begin, open       receive ─► receive       prove ─► prove       commit ─► commit on all ranks, label
            on every rank                on every rank          on every rank         in one go, no step in between

Staged, vLLM goes on decoding until `commit`, which pauses its scheduler; direct, the engine is paused from `open` on.
A version is adopted only when every rank has proven its live parameters. If one rank fails to commit, the ranks may
hold different versions: the replica is put to sleep at level 2 and woken, so that it takes no step until a full
re-sync commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Literal

from rollbook.errors import RunError, SyncError
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.sync.transport import InlineSender, Sender
from rollbook.sync.wire import (
    Json,
    bucket_to_json,
    error_from_json,
    field,
    manifest_to_json,
    report_from_json,
)
from rollbook.weights import Bucket, CommitReport, Digests, Manifest


class VllmPort:
    """A `WeightPort` for `VllmEngine(in_process=False)`; works in process as well.

    Args:
        sender: the trainer's half of the transport; pass its `buffer` to the Publisher. None: bytes in the message.
        transport: the workers' half: "inline", "shm" (one host) or "ipc" (one host, CUDA).
        staging: "direct" pauses the engine from `open` to `commit` and needs no second copy of the weights.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        sender: Sender | None = None,
        transport: Literal["inline", "shm", "ipc"] = "inline",
        staging: Literal["staged", "direct"] = "staged",
    ) -> None:
        self.engine = engine
        self.replica_id = engine.replica_id
        self.sender: Sender = sender or InlineSender()
        self._transport = transport
        self._staging = staging
        self._has_begun = False
        self._is_open = False
        self._is_broken = False
        self._holds_pause = False

    async def weight_version(self) -> int:
        if self._is_broken:
            raise SyncError(f"replica {self.replica_id} holds no proven version", "re-sync it in full")
        return await self.engine.weight_version()

    async def open(self, manifest: Manifest) -> None:
        if not self._has_begun:
            await self._ask(
                "rollbook_begin",
                {
                    "replica_id": self.replica_id,
                    "weight_version": await self.engine.weight_version(),
                    "staging": self._staging,
                    "transport": self._transport,
                },
            )
            self._has_begun = True
        if manifest.is_resync and self._is_open:
            await self.abort()  # left behind by a trainer that is gone
        await self._ask("rollbook_open", manifest_to_json(manifest))
        self._pending_version = manifest.weight_version
        self._is_open = True
        if self._staging == "direct":
            self._holds_pause = True
            await self.engine.pause("keep")

    async def receive(self, bucket: Bucket) -> None:
        place = await asyncio.to_thread(self.sender.announce, bucket)
        payload = self.sender.payload(bucket)
        raw = b"" if payload is None else payload.cpu().numpy().tobytes()
        await self._ask("rollbook_receive", {"place": place, **bucket_to_json(bucket)}, raw)

    async def prove(self, digests: Digests) -> None:
        await self._ask("rollbook_prove", {"digests": dict(digests)})

    async def commit(self) -> CommitReport:
        """Swap and prove on every rank, adopt, without a step in between. The report is rank 0's, with the slowest
        rank's seconds."""

        def commit() -> CommitReport:
            reports = [
                report_from_json(answer)
                for answer in self._answers(self.engine.ask_workers_on_thread("rollbook_commit"))
            ]
            self.engine.adopt_on_thread(self._pending_version)
            first = reports[0]
            return CommitReport(
                replica_id=self.replica_id,
                weight_version=first.weight_version,
                num_tensors=first.num_tensors,
                num_bytes=first.num_bytes,
                write_s=max(report.write_s for report in reports),
                digest_s=max(report.digest_s for report in reports),
                coverage=first.coverage,
            )

        try:
            report = await self.engine.run_between_steps(commit)
        except BaseException:
            if not await self._is_whole():
                await self._block()
            raise
        self._is_open = self._is_broken = False
        await self._end_pause()
        return report

    async def abort(self) -> None:
        if not self._has_begun:
            return
        await self._ask("rollbook_abort")
        self._is_open = False
        if not await self._is_whole():
            await self._block()
        await self._end_pause()

    async def _is_whole(self) -> bool:
        """Every rank holds the version that the engine serves."""
        try:
            states = self._answers(await self.engine.ask_workers("rollbook_state"))
        except RunError:
            return False
        version = await self.engine.weight_version()
        return all(
            field(state, "state", str) != "broken" and field(state, "weight_version", int) == version
            for state in states
        )

    async def _block(self) -> None:
        self._is_broken = True
        with contextlib.suppress(RunError):  # an engine that is dead takes no step either
            await self.engine.sleep(2)
            await self.engine.wake()

    async def _end_pause(self) -> None:
        if self._holds_pause:
            self._holds_pause = False
            await self.engine.resume()

    async def _ask(self, method: str, header: Json | None = None, payload: bytes | None = None) -> list[Json]:
        args: list[str | bytes] = [] if header is None else [json.dumps(header)]
        if payload is not None:
            args.append(payload)
        return self._answers(await self.engine.ask_workers(method, *args))

    def _answers(self, texts: list[str]) -> list[Json]:
        """One answer a rank; the first error of any rank is raised."""
        answers = [json.loads(text) for text in texts]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                error = error_from_json(answer)
                where = f"rank {rank}: " if len(answers) > 1 else ""
                raise type(error)(where + error.what, error.remedy)
        return [field(answer, "ok", dict) for answer in answers]
