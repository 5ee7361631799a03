"""A replica in another process: `RemotePort` on the trainer's side, `ReplicaServer` beside the engine.

The server carries a `WeightPort` of its own process (`InprocPort`). It carries out one request at a time, except that
buckets follow each other without a pause: the next one is fetched while the last one is taken in. Answers go back in
the order of the requests. When a connection ends with a publication open, the server aborts it: a trainer that dies
leaves the replica serving the version it held. When a call of the port is cancelled or fails, its connection is
dropped, because the answer that may still come belongs to nobody; the next call connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rollbook.errors import DeadlineError, EngineError, RunError, SyncError
from rollbook.sync.transport import Receiver, Sender
from rollbook.sync.wire import (
    Channel,
    Frame,
    Json,
    bucket_from_json,
    bucket_to_json,
    field,
    manifest_from_json,
    manifest_to_json,
    report_from_json,
    report_to_json,
    require_token,
    text_map,
    tokens_match,
)
from rollbook.weights import Bucket, CommitReport, Digests, Manifest, WeightPort

PROTOCOL = 1
STREAM_BYTES = 1 << 20
MAX_IN_FLIGHT = 8
"""Requests of one connection that may wait for their answers; a publisher has a few buckets on their way."""
ERRORS: dict[str, type[RunError]] = {
    kind.__name__: kind for kind in (SyncError, DeadlineError, EngineError, RunError)
}


class ReplicaServer:
    """Listens for one trainer's publications and hands them to the engine's port.

    Args:
        port: the replica in this process.
        receiver: the engine's half of the transport.
        token: secret that a connection must present; needed unless `host` is loopback.
        max_payload_bytes: largest payload accepted in a message (the inline transport needs `bucket_bytes`).
    """

    def __init__(
        self, port: WeightPort, receiver: Receiver, *, token: str = "", max_payload_bytes: int = 0
    ) -> None:
        self.port = port
        self.receiver = receiver
        self._token = token
        self._max_payload_bytes = max_payload_bytes
        self._server: asyncio.Server | None = None
        self._lock = asyncio.Lock()
        self._receiving: set[asyncio.Future[None]] = set()
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port number.

        Raises:
            ConfigError: an address other hosts can reach, and no token.
        """
        require_token(host, self._token)
        self._server = await asyncio.start_server(self._connected, host, port, limit=STREAM_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._fetching.shutdown(wait=False)
        self.receiver.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        channel = Channel(reader, writer, max_payload_bytes=self._max_payload_bytes)
        opened = [False]
        serving: deque[asyncio.Task[None]] = deque()
        try:
            await self._greet(channel)
            while True:
                frame = await channel.receive()
                before = serving[-1] if serving else None
                serving.append(asyncio.create_task(self._serve(frame, channel, opened, before)))
                while serving and (len(serving) > MAX_IN_FLIGHT or serving[0].done()):
                    await serving.popleft()
        except (EOFError, OSError):
            pass  # the trainer is gone
        except asyncio.CancelledError:  # this server is being closed
            for request in serving:
                request.cancel()
        except SyncError as error:
            await _ended(serving)
            with contextlib.suppress(OSError):
                await channel.send(_error(error))
        finally:
            await _ended(serving)
            if opened[0]:
                async with self._exclusive():
                    await asyncio.shield(self.port.abort())
            await channel.close()
            self._connections.discard(task)

    async def _greet(self, channel: Channel) -> None:
        header = (await channel.receive()).header
        if self._token and not tokens_match(self._token, header.get("token")):
            raise SyncError(
                "a connection did not present the token", "use the same sync.token_file on both sides"
            )
        if field(header, "protocol", int) != PROTOCOL:
            raise SyncError(
                f"the trainer speaks protocol {header['protocol']}, this engine {PROTOCOL}",
                "install the same release on both sides",
            )
        await channel.send({"replica_id": self.port.replica_id})

    async def _serve(
        self, frame: Frame, channel: Channel, opened: list[bool], before: asyncio.Task[None] | None
    ) -> None:
        """Carry out one request, and answer it after the one `before` it was answered."""
        try:
            if frame.header.get("do") == "receive":
                answer = await self._receive(frame)
            else:
                async with self._exclusive():
                    answer = await self._do(frame, opened)
        except RunError as error:
            answer = _error(error)
        except (
            Exception
        ) as error:  # an engine's own failure: told to the trainer, kept from ending the server
            answer = _error(SyncError(f"{type(error).__name__}: {error}", "look at the replica's own log"))
        if before is not None:
            await asyncio.wait([before])
        await channel.send(answer)

    async def _receive(self, frame: Frame) -> Json:
        """While one bucket is taken in, the next one may be fetched already, in the order of the requests."""
        async with self._lock:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._receiving.add(done)
        try:
            bucket = bucket_from_json(frame.header, frame.payload)
            place = field(frame.header, "place", dict)
            fetching = asyncio.get_running_loop().run_in_executor(
                self._fetching, self.receiver.take, bucket, place
            )
            await self.port.receive(await fetching)
        finally:
            self._receiving.discard(done)
            done.set_result(None)
        return {}

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Every request but `receive` has the replica for itself."""
        async with self._lock:
            if self._receiving:
                await asyncio.wait(self._receiving)
            yield

    async def _do(self, frame: Frame, opened: list[bool]) -> Json:
        header = frame.header
        action = field(header, "do", str)
        if action == "version":
            return {"weight_version": await self.port.weight_version()}
        if action == "open":
            await self.port.open(manifest_from_json(header))
            opened[0] = True
            return {}
        if action == "prove":
            await self.port.prove(text_map(header, "digests"))
            return {}
        if action == "commit":
            report = await self.port.commit()
            opened[0] = False
            return report_to_json(report)
        if action == "abort":
            await self.port.abort()
            opened[0] = False
            return {}
        raise SyncError(f"a message asks for {action!r}", "trainer and engine run different releases")


class RemotePort:
    """A `WeightPort` for a replica behind a `ReplicaServer`."""

    def __init__(
        self, replica_id: int, sender: Sender, *, host: str = "127.0.0.1", port: int, token: str = ""
    ) -> None:
        self.replica_id = replica_id
        self.sender = sender
        self._address = (host, port)
        self._token = token
        self._channel: Channel | None = None
        self._announcing, self._sending = asyncio.Lock(), asyncio.Lock()
        self._last_answer: asyncio.Event | None = None

    async def weight_version(self) -> int:
        return int(field(await self._ask({"do": "version"}), "weight_version", int))

    async def open(self, manifest: Manifest) -> None:
        await self._ask({"do": "open", **manifest_to_json(manifest)})

    async def receive(self, bucket: Bucket) -> None:
        """Announce the bucket and take part in its transfer; returns when the replica has it. The next bucket may be
        sent before; they are announced in the order of the calls."""
        try:
            async with self._announcing:
                place = await self.sender.announce(bucket)
                message = {"do": "receive", "place": place, **bucket_to_json(bucket)}
                asking = await self._send(message, self.sender.payload(bucket))
            transferring = asyncio.ensure_future(self.sender.transfer(bucket))
            try:
                await asyncio.gather(asking, transferring)
            finally:
                asking.cancel()
                transferring.cancel()
                await asyncio.gather(asking, transferring, return_exceptions=True)
        except BaseException:
            self.sender.missed(bucket)
            raise

    async def prove(self, digests: Digests) -> None:
        await self._ask({"do": "prove", "digests": dict(digests)})

    async def commit(self) -> CommitReport:
        return report_from_json(await self._ask({"do": "commit"}))

    async def abort(self) -> None:
        await self._ask({"do": "abort"})

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _ask(self, header: Json) -> Json:
        return await (await self._send(header))

    async def _send(self, header: Json, payload: torch.Tensor | None = None) -> asyncio.Task[Json]:
        """Send a request; the task reads its answer, after the answers to earlier requests."""
        async with self._sending:
            async with self._failing_as_one():
                channel = await self._connected()
                await channel.send(header, payload)
            before, self._last_answer = self._last_answer, asyncio.Event()
            return asyncio.create_task(self._answer(channel, before, self._last_answer))

    async def _answer(self, channel: Channel, before: asyncio.Event | None, done: asyncio.Event) -> Json:
        try:
            async with self._failing_as_one():
                if before is not None:
                    await before.wait()
                answer = (await channel.receive()).header
        finally:
            done.set()
        if "error" in answer:
            error_fields = field(answer, "error", dict)
            kind = ERRORS.get(field(error_fields, "kind", str), SyncError)
            raise kind(field(error_fields, "what", str), field(error_fields, "remedy", str))
        return answer

    @contextlib.asynccontextmanager
    async def _failing_as_one(self) -> AsyncIterator[None]:
        """A connection with a lost request or answer is good for nothing more."""
        try:
            yield
        except BaseException as error:
            await asyncio.shield(self.close())
            if isinstance(error, (EOFError, OSError)):
                raise SyncError(
                    f"the connection to replica {self.replica_id} at {self._address[0]}:{self._address[1]} ended: "
                    f"{type(error).__name__}",
                    "look at the replica's process; it is re-synced in full when it is back",
                ) from error
            raise

    async def _connected(self) -> Channel:
        if self._channel is None:
            reader, writer = await asyncio.open_connection(*self._address, limit=STREAM_BYTES)
            channel = Channel(reader, writer, max_payload_bytes=0)
            try:
                await channel.send({"protocol": PROTOCOL, "token": self._token})
                answer: dict[str, Any] = (await channel.receive()).header
                if answer.get("replica_id") != self.replica_id:
                    told = answer.get("error", {})
                    what = told.get("what") if isinstance(told, dict) else None
                    raise SyncError(
                        f"{self._address[0]}:{self._address[1]} is not replica {self.replica_id}: "
                        f"{what or answer.get('replica_id')}",
                        "look at the replica's address and token",
                    )
            except BaseException:
                await asyncio.shield(channel.close())
                raise
            self._channel = channel
        return self._channel


async def _ended(requests: Iterable[asyncio.Task[None]]) -> None:
    """Wait for requests whose answers may have nobody to read them."""
    await asyncio.gather(*requests, return_exceptions=True)


def _error(error: RunError) -> Json:
    return {"error": {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}}
