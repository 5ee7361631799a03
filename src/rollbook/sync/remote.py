"""A replica in another process: `RemotePort` on the trainer's side, `ReplicaServer` beside the engine.

    trainer's process                               engine's process
    export thread ── RemotePort.begin ─ bucket ───► reader thread ── take, begin ──► the device's copies
    answer thread ◄───────────────────── answer ─── answer thread ◄─ copied

A publication's control goes through the event loops of both sides; its buckets do not. A bucket costs each side one
message, read by a thread that does nothing else, because over a link that carries 256 MiB in less than a millisecond
changes of thread are what takes the time. A connection has one thread that reads its requests and carries them out in
their order, and one that answers in the same order: while one bucket is taken in, the next one may be fetched.

The server carries a `WeightPort` of its own process (`InprocPort`). When a connection ends with a publication open, the
server aborts it: a trainer that dies leaves the replica serving the version it held. When a call of the port is
cancelled or its connection fails, the connection is dropped, because the answer that may still come belongs to nobody;
the next call connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import torch

from rollbook.errors import RunError, SyncError
from rollbook.sync.transport import Receiver, Sender, arrived
from rollbook.sync.wire import (
    Channel,
    Frame,
    Json,
    bucket_from_json,
    bucket_to_json,
    error_from_json,
    error_to_json,
    field,
    manifest_from_json,
    manifest_to_json,
    report_from_json,
    report_to_json,
    require_token,
    text_map,
    tokens_match,
)
from rollbook.weights import Arrival, Bucket, CommitReport, Digests, Manifest, Receiving, WeightPort

Result = TypeVar("Result")

PROTOCOL = 1
MAX_IN_FLIGHT = 8
"""Requests of one connection that may wait for their answers; a publisher has a few buckets on their way."""
CONNECT_S = 30.0
"""Longest wait for a connection and its greeting, on both sides."""
ACCEPT_AGAIN_S = 0.2
"""How long a server that could not accept a connection waits before it tries again."""
SEND_S = 120.0
"""Longest wait for the other side to make room for a part of a message."""
CLOSE_S = 5.0
"""How long a server that is closed waits for what its connections are at."""


class ReplicaServer:
    """Listens for one trainer's publications and hands them to the engine's port.

    Args:
        port: the replica in this process; its coroutines run on the event loop that calls `start`.
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
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop
        self._in_turn = threading.Lock()
        """Held while a request is carried out, whatever connection it came by."""
        self._owner: Channel | None = None
        """The connection that opened the publication under way: no other one may add to it or commit it."""
        self._receiving: list[Future[None]] = []
        """Buckets that are taken in on the event loop."""
        self._in_order = asyncio.Lock()
        self._threads: set[threading.Thread] = set()
        self._channels: set[Channel] = set()
        self._is_closed = threading.Event()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port number.

        Raises:
            ConfigError: an address other hosts can reach, and no token.
        """
        require_token(host, self._token)
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._run(self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        self._is_closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes whoever accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for channel in list(self._channels):
            channel.close()
        for thread in list(self._threads):
            await asyncio.to_thread(thread.join, CLOSE_S)
        self.receiver.close()

    def _run(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        """On a thread that does not keep the process alive."""

        def run() -> None:
            try:
                work(*args)
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="replica-server", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # it was closed; else one connection failed, or no file was left for it
                self._is_closed.wait(ACCEPT_AGAIN_S)
                continue
            self._run(self._serve, Channel(connection, greeting_s=CONNECT_S))

    def _serve(self, channel: Channel) -> None:
        """One connection, from its greeting to its end."""
        self._channels.add(channel)
        answers: queue.Queue[Arrival | Json | None] = queue.Queue(MAX_IN_FLIGHT)
        answering = self._run(self._answer, channel, answers)
        try:
            answers.put(self._greeted(channel.receive()))
            channel.trust(max_payload_bytes=self._max_payload_bytes)
            while True:
                answers.put(self._carried_out(channel.receive(), channel))
        except (EOFError, OSError):
            pass  # the trainer is gone, or this server is being closed
        except SyncError as error:
            answers.put(error_to_json(error))
        finally:
            answers.put(None)
            answering.join()
            with self._in_turn:
                self._wait_for_buckets()
                if self._owner is channel:
                    self._owner = None
                    with contextlib.suppress(RunError):  # an engine that is dead serves nothing either
                        self._on_loop(self.port.abort())
            channel.close()
            self._channels.discard(channel)

    def _greeted(self, frame: Frame) -> Json:
        header = frame.header
        if self._token and not tokens_match(self._token, header.get("token")):
            raise SyncError(
                "a connection did not present the token",
                "connect with the token that this server was started with",
            )
        if field(header, "protocol", int) != PROTOCOL:
            raise SyncError(
                f"the trainer speaks protocol {header['protocol']}, this engine {PROTOCOL}",
                "install the same release on both sides",
            )
        return {"replica_id": self.port.replica_id}

    def _answer(self, channel: Channel, answers: queue.Queue[Arrival | Json | None]) -> None:
        """Answers go back in the order of the requests, each when it is there."""
        while (answer := answers.get()) is not None:
            if not isinstance(answer, dict):
                answer = _outcome(lambda arrival=answer: arrival.result())  # type: ignore[misc]
            with contextlib.suppress(OSError):  # nobody reads it any more
                channel.send(answer)

    def _carried_out(self, frame: Frame, channel: Channel) -> Arrival | Json:
        """The answer, or what to wait for before the answer is that the bucket was taken."""
        held: list[Arrival] = []

        def receive() -> None:
            held.append(self._receive(frame, channel))

        def do() -> Json:
            self._wait_for_buckets()
            return self._do(frame.header, channel)

        with self._in_turn:
            answer = _outcome(receive if frame.header.get("do") == "receive" else do)
        return held[0] if held else answer

    def _receive(self, frame: Frame, channel: Channel) -> Arrival:
        bucket = bucket_from_json(frame.header, frame.payload)
        place = field(frame.header, "place", dict)
        self._require_owner(channel)
        bucket = self.receiver.take(bucket, place)
        receiving: Receiving
        if self.receiver.is_quick:
            self._wait_for_buckets()  # of this publication, that are taken in on the event loop
            receiving = self.port.receive(bucket)
        else:  # meanwhile this thread fetches the next one
            receiving = self._receive_beside(bucket)
        if not isinstance(receiving, Coroutine):
            return receiving
        arrival = asyncio.run_coroutine_threadsafe(receiving, self._loop)
        self._receiving = [each for each in self._receiving if not each.done()] + [arrival]
        return arrival

    async def _receive_beside(self, bucket: Bucket) -> None:
        async with self._in_order:
            await arrived(await asyncio.to_thread(self.port.receive, bucket))

    def _require_owner(self, channel: Channel) -> None:
        """Messages of a publication that was given up may be read late, when the next one is open already."""
        if self._owner is not channel:
            raise SyncError(
                f"replica {self.port.replica_id} has no publication open on this connection",
                "the order is open, receive, prove, commit, on one connection",
            )

    def _wait_for_buckets(self) -> None:
        for receiving in self._receiving:
            with contextlib.suppress(Exception):  # its own answer tells
                receiving.result()
        self._receiving = []

    def _do(self, header: Json, channel: Channel) -> Json:
        action = field(header, "do", str)
        if action == "version":
            return {"weight_version": self._on_loop(self.port.weight_version())}
        if action == "open":
            self._on_loop(self.port.open(manifest_from_json(header)))
            self._owner = channel
            return {}
        if action == "prove":
            digests = text_map(header, "digests")
            self._require_owner(channel)
            self._on_loop(self.port.prove(digests))
            return {}
        if action == "commit":
            self._require_owner(channel)
            report = self._on_loop(self.port.commit())
            self._owner = None
            return report_to_json(report)
        if action == "abort":
            is_late = self._owner is not channel and channel.has_ended()
            if not is_late:  # else another publication may be open by now
                self._owner = None
                self._on_loop(self.port.abort())
            return {}
        raise SyncError(f"a message asks for {action!r}", "trainer and engine run different releases")

    def _on_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class RemotePort:
    """A `WeightPort` for a replica behind a `ReplicaServer`."""

    def __init__(
        self, replica_id: int, sender: Sender, *, host: str = "127.0.0.1", port: int, token: str = ""
    ) -> None:
        self.replica_id = replica_id
        self.sender = sender
        self._address = (host, port)
        self._token = token
        self._connection: _Connection | None = None
        self._connecting = threading.Lock()
        self._announcing = asyncio.Lock()

    async def weight_version(self) -> int:
        return int(field(await self._ask({"do": "version"}), "weight_version", int))

    async def open(self, manifest: Manifest) -> None:
        await self._ask({"do": "open", **manifest_to_json(manifest)})

    def receive(self, bucket: Bucket) -> Receiving:
        """Announce the bucket and take part in its transfer, on another thread where that takes a while. The next
        bucket may be sent before the replica has it; they are announced in the order of the calls."""
        connection = self._connection  # which opened the publication: of another one the bucket is no part
        if self.sender.is_quick:
            return self._begin(bucket, connection)
        return self._begin_beside(bucket, connection)

    async def _begin_beside(self, bucket: Bucket, connection: _Connection | None) -> None:
        try:
            await self._announcing.acquire()
            beginning = asyncio.ensure_future(asyncio.to_thread(self._begin, bucket, connection))
            beginning.add_done_callback(self._announced)
            arriving = await asyncio.shield(beginning)
            await asyncio.wrap_future(arriving)
        except asyncio.CancelledError:
            self._missed(bucket)
            raise

    def _announced(self, beginning: asyncio.Future[Future[None]]) -> None:
        """Cancelling does not stop the thread: what comes next, perhaps the same file again, waits for its end."""
        self._announcing.release()
        if not beginning.cancelled():
            beginning.exception()

    async def prove(self, digests: Digests) -> None:
        await self._ask({"do": "prove", "digests": dict(digests)})

    async def commit(self) -> CommitReport:
        return report_from_json(await self._ask({"do": "commit"}))

    async def abort(self) -> None:
        await self._ask({"do": "abort"})

    async def close(self) -> None:
        self._drop()

    def _begin(self, bucket: Bucket, connection: _Connection | None) -> Future[None]:
        try:
            place = self.sender.announce(bucket)
            message = {"do": "receive", "place": place, **bucket_to_json(bucket)}
            if connection is None or connection.has_ended:
                raise _ended(f"replica {self.replica_id}", EOFError("it was given up"))
            answered = connection.ask(message, self.sender.payload(bucket))
            # A replica that may not have read of the bucket does not come to its collective.
            transferred = None if connection.has_ended else self.sender.transfer(bucket)
            arriving = _both(answered, transferred)
        except BaseException:
            self.sender.missed(bucket)
            raise

        def told(outcome: Future[None]) -> None:
            if outcome.cancelled():
                self._missed(bucket)
            elif outcome.exception() is not None:
                self.sender.missed(bucket)

        arriving.add_done_callback(told)
        return arriving

    def _missed(self, bucket: Bucket) -> None:
        """Nobody waits for the answer any more."""
        self.sender.missed(bucket)
        self._drop()

    async def _ask(self, header: Json) -> Json:
        try:
            asking = await asyncio.to_thread(lambda: self._connected().ask(header))
            return await asyncio.wrap_future(asking)
        except asyncio.CancelledError:
            self._drop()
            raise

    def _drop(self) -> None:
        """A connection with a lost request or answer is good for nothing more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(EOFError("it was given up"))

    def _connected(self) -> _Connection:
        """
        Raises:
            SyncError: nobody listens there, or not this replica.
        """
        with self._connecting:
            held = self._connection
            if held is not None and not held.has_ended:
                return held
            where = f"replica {self.replica_id} at {self._address[0]}:{self._address[1]}"
            try:
                plain = socket.create_connection(self._address, timeout=CONNECT_S)
            except OSError as error:
                raise _ended(where, error) from error
            channel = Channel(plain, greeting_s=CONNECT_S)
            try:
                channel.send({"protocol": PROTOCOL, "token": self._token})
                answer: dict[str, Any] = channel.receive().header
                if answer.get("replica_id") != self.replica_id:
                    told = answer.get("error", {})
                    what = told.get("what") if isinstance(told, dict) else None
                    raise SyncError(
                        f"{self._address[0]}:{self._address[1]} is not replica {self.replica_id}: "
                        f"{what or answer.get('replica_id')}",
                        "look at the replica's address and token",
                    )
            except (EOFError, OSError) as error:
                channel.close()
                raise _ended(where, error) from error
            except BaseException:
                channel.close()
                raise
            channel.trust(max_payload_bytes=0)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
            self._connection = _Connection(channel, where)
            return self._connection


class _Connection:
    """A channel, and the requests on it that have no answer yet."""

    def __init__(self, channel: Channel, where: str) -> None:
        self.has_ended = False
        self._channel = channel
        self._where = where
        self._waiting: deque[Future[Json]] = deque()
        self._asking = threading.Lock()
        threading.Thread(target=self._read, name="replica-answers", daemon=True).start()

    def ask(self, header: Json, payload: torch.Tensor | None = None) -> Future[Json]:
        """Send a request; its answer comes after the answers to earlier ones."""
        answered: Future[Json] = Future()
        with self._asking:  # sent in the order in which they wait
            self._waiting.append(answered)
            try:
                self._channel.send(header, payload)
            except OSError as error:
                self.end(error)
        if self.has_ended:  # perhaps after its reader looked for the last time
            self.end(EOFError("it ended"))
        return answered

    def end(self, error: BaseException) -> None:
        self.has_ended = True
        self._channel.close()
        while self._waiting:
            with contextlib.suppress(IndexError, InvalidStateError):  # two threads may end it
                self._waiting.popleft().set_exception(_ended(self._where, error))

    def _read(self) -> None:
        try:
            while True:
                answer = self._channel.receive().header
                answered = self._waiting.popleft()
                with contextlib.suppress(InvalidStateError):  # it was cancelled
                    if "error" in answer:
                        answered.set_exception(error_from_json(answer))
                    else:
                        answered.set_result(answer)
        except (EOFError, OSError, SyncError, IndexError, ValueError) as error:
            self.end(error)


def _both(answered: Future[Json], transferred: Future[Json] | None) -> Future[None]:
    """There when both are; the first error ends it. Cancelling it cancels neither."""
    arriving: Future[None] = Future()
    left = [answered] if transferred is None else [answered, transferred]

    def told(outcome: Future[Json]) -> None:
        error = EOFError("it was given up") if outcome.cancelled() else outcome.exception()
        with contextlib.suppress(InvalidStateError):  # the other one failed before, or nobody waits any more
            if error is not None:
                arriving.set_exception(error)
            elif all(each.done() for each in left):
                arriving.set_result(None)

    for each in left:
        each.add_done_callback(told)
    return arriving


def _ended(where: str, error: BaseException) -> SyncError:
    return SyncError(
        f"the connection to {where} ended: {type(error).__name__}",
        "look at the replica's process; it is re-synced in full when it is back",
    )


def _outcome(work: Callable[[], object]) -> Json:
    """What to answer: what the work returns if that is an answer, an empty one, or its error."""
    try:
        answer = work()
    except Exception as error:
        return error_to_json(error)
    return answer if isinstance(answer, dict) else {}
