"""Messages between a trainer and an engine in another process: a typed header in JSON, then raw bytes. No pickle.

    frame = "RBW1" · header bytes (u32) · payload bytes (u64) · header (UTF-8 JSON object) · payload

Every length is checked against a limit before anything is allocated, every field of a header is checked for its
type before it is used, and nothing in a message names code. An endpoint listens on loopback unless it is given a
token; with a token, a connection must present it in its first frame.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, cast

import torch
from torch import Tensor

from rollbook.errors import ConfigError, DeadlineError, EngineError, RunError, SyncError
from rollbook.weights import Bucket, BucketEntry, CommitReport, Manifest, TensorSpec

MAGIC = b"RBW1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 64 << 20
"""A manifest of 100,000 tensors takes about 15 MB."""
MAX_GREETING_BYTES = 1 << 16
"""Of a header from whom nothing is known yet."""
ERRORS: dict[str, type[RunError]] = {
    kind.__name__: kind for kind in (SyncError, DeadlineError, EngineError, RunError)
}
"""Errors that cross as what they are; any other is a SyncError on the trainer's side."""

Json = dict[str, Any]
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: a JSON object and raw bytes."""

    header: Json
    payload: Tensor
    """[bytes] uint8, on the host; empty for most messages."""


class Channel:
    """Frames over one connected socket: one thread reads, any may write. Until `trust` only a greeting is read.

    Args:
        greeting_s: longest wait for it; then the other side counts as gone.
    """

    def __init__(self, connection: socket.socket, *, greeting_s: float) -> None:
        self._connection = connection
        self._incoming = cast(BufferedReader, connection.makefile("rb", buffering=1 << 16))
        self._max_header_bytes, self._max_payload_bytes = MAX_GREETING_BYTES, 0
        connection.settimeout(greeting_s)
        self._writing = threading.Lock()
        with contextlib.suppress(OSError):  # not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self, *, max_payload_bytes: int) -> None:
        """Who is there has shown the token: longer messages are read, and waited for."""
        self._max_header_bytes, self._max_payload_bytes = MAX_HEADER_BYTES, max_payload_bytes
        self._connection.settimeout(None)

    def send(self, header: Json, payload: Tensor | None = None) -> None:
        """
        Raises:
            OSError: the other side is gone.
        """
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        num_bytes = 0 if payload is None else payload.numel()
        with self._writing:
            self._connection.sendall(PREFIX.pack(MAGIC, len(text), num_bytes) + text)
            if payload is not None and num_bytes:
                self._connection.sendall(payload.cpu().numpy().data)

    def receive(self) -> Frame:
        """
        Raises:
            SyncError: not a frame, a length above its limit, or a header that is not a JSON object.
            EOFError: the other side is gone.
        """
        magic, header_bytes, payload_bytes = PREFIX.unpack(self._exactly(PREFIX.size))
        if magic != MAGIC:
            raise SyncError(
                f"a message begins with {magic!r}, not {MAGIC!r}",
                "something else talks to this port; only rollbook's sync messages are accepted",
            )
        if header_bytes > self._max_header_bytes or payload_bytes > self._max_payload_bytes:
            raise SyncError(
                f"a message announces {header_bytes} bytes of header and {payload_bytes} of payload; the limits are "
                f"{self._max_header_bytes} and {self._max_payload_bytes}",
                "use the same sync.bucket_bytes on both sides",
            )
        text = self._exactly(header_bytes)
        payload = _NOTHING
        if payload_bytes:
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            if self._incoming.readinto(payload.numpy().data) != payload_bytes:
                raise EOFError(f"the connection ended within {payload_bytes} bytes")
        try:
            header = json.loads(text)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise SyncError(
                f"a message's header is not JSON: {error}", "look at who talks to this port"
            ) from None
        if not isinstance(header, dict):
            raise SyncError("a message's header is not a JSON object", "look at who talks to this port")
        return Frame(header, payload)

    def _exactly(self, num_bytes: int) -> bytes:
        data = self._incoming.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError(f"the connection ended after {len(data)} of {num_bytes} bytes")
        return data

    def has_ended(self) -> bool:
        """The other side is gone and has nothing more to say."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Whoever reads or writes in another thread is told."""
        with contextlib.suppress(OSError):  # the other side went first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def require_token(host: str, token: str) -> None:
    """An endpoint that can change weights listens on loopback, or asks for a token.

    Raises:
        ConfigError: another address without a token.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and not token:
        raise ConfigError(
            f"an endpoint that changes weights was to listen on {host} without a token",
            "listen on 127.0.0.1, or give it a token that the trainer is told too",
        )


def tokens_match(expected: str, presented: object) -> bool:
    if not isinstance(presented, str):
        return False
    # JSON may hold half a pair of surrogates.
    return hmac.compare_digest(expected.encode(), presented.encode(errors="replace"))


# ---- typed fields


def field(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a header, of the wanted type (bool is not an int).

    Raises:
        SyncError: missing, or of another type.
    """
    value = header.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        raise SyncError(
            f"field {name!r} of a message is {type(value).__name__}, not {wanted}",
            "trainer and engine run different releases, or something else talks to this port",
        )
    return value


def text_map(header: Mapping[str, Any], name: str) -> dict[str, str]:
    value = field(header, name, dict)
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise SyncError(f"field {name!r} of a message is not text by text", "both sides must run one release")
    return cast(dict[str, str], value)


def manifest_to_json(manifest: Manifest) -> Json:
    return {
        "weight_version": manifest.weight_version,
        "base_version": manifest.base_version,
        "base_digest": manifest.base_digest,
        "is_resync": manifest.is_resync,
        "tensors": [[s.name, list(s.shape), s.dtype, s.num_bytes] for s in manifest.tensors],
    }


def manifest_from_json(header: Json) -> Manifest:
    tensors = []
    for row in field(header, "tensors", list):
        is_row = isinstance(row, list) and len(row) == 4 and isinstance(row[1], list)
        named = dict(zip(("name", "shape", "dtype", "num_bytes"), row, strict=True)) if is_row else {}
        shape = tuple(field({"n": n}, "n", int) for n in field(named, "shape", list))
        spec = TensorSpec(
            name=field(named, "name", str),
            shape=shape,
            dtype=field(named, "dtype", str),
            num_bytes=field(named, "num_bytes", int),
        )
        tensors.append(spec)
    return Manifest(
        weight_version=field(header, "weight_version", int),
        base_version=field(header, "base_version", (int, type(None))),
        base_digest=field(header, "base_digest", (str, type(None))),
        is_resync=field(header, "is_resync", bool),
        tensors=tuple(tensors),
    )


def bucket_to_json(bucket: Bucket) -> Json:
    return {
        "weight_version": bucket.weight_version,
        "bucket_idx": bucket.bucket_idx,
        "entries": [
            [e.name, e.offset_bytes, e.num_bytes, e.encoding, e.tensor_offset_bytes, e.tensor_num_bytes]
            for e in bucket.entries
        ],
    }


def bucket_from_json(header: Json, data: Tensor) -> Bucket:
    names = ("name", "offset_bytes", "num_bytes", "encoding", "tensor_offset_bytes", "tensor_num_bytes")
    entries = []
    for row in field(header, "entries", list):
        named = dict(zip(names, row, strict=True)) if isinstance(row, list) and len(row) == len(names) else {}
        entry = BucketEntry(
            name=field(named, "name", str),
            offset_bytes=field(named, "offset_bytes", int),
            num_bytes=field(named, "num_bytes", int),
            encoding=field(named, "encoding", str),
            tensor_offset_bytes=field(named, "tensor_offset_bytes", int),
            tensor_num_bytes=field(named, "tensor_num_bytes", (int, type(None))),
        )
        entries.append(entry)
    return Bucket(
        weight_version=field(header, "weight_version", int),
        bucket_idx=field(header, "bucket_idx", int),
        entries=tuple(entries),
        data=data,
    )


def error_to_json(error: Exception) -> Json:
    """What the engine's side answers instead. An engine's own failure is told to the trainer, kept from ending the
    server."""
    if not isinstance(error, RunError):
        error = SyncError(f"{type(error).__name__}: {error}", "look at the replica's own log")
    return {"error": {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}}


def error_from_json(answer: Json) -> RunError:
    fields = field(answer, "error", dict)
    kind = ERRORS.get(field(fields, "kind", str), SyncError)
    return kind(field(fields, "what", str), field(fields, "remedy", str))


def report_to_json(report: CommitReport) -> Json:
    return {
        "replica_id": report.replica_id,
        "weight_version": report.weight_version,
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "write_s": report.write_s,
        "digest_s": report.digest_s,
        "coverage": dict(report.coverage),
    }


def report_from_json(header: Json) -> CommitReport:
    coverage = field(header, "coverage", dict)
    return CommitReport(
        replica_id=field(header, "replica_id", int),
        weight_version=field(header, "weight_version", int),
        num_tensors=field(header, "num_tensors", int),
        num_bytes=field(header, "num_bytes", int),
        write_s=float(field(header, "write_s", (int, float))),
        digest_s=float(field(header, "digest_s", (int, float))),
        coverage={str(kind): field(coverage, kind, int) for kind in coverage},
    )
