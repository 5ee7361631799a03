"""Shared memory between processes of one host: the trainer packs into it, the engine reads it where it lies.

Each slot is a file in a folder that lives in memory, created for this user alone and mapped by both
sides; a bucket crosses the process border without a copy. The trainer holds a lock on it, by which the next one knows
that it is nobody's: a process number may be another process's by then, or one of another container. On a machine with
CUDA the mapping is page-locked once, so that copies from and to a device run at the speed of the link.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.transport import Receiver, Sender, announced, wait_until_packed
from rollbook.sync.wire import Json, field
from rollbook.weights import Bucket

FILE_NAME = re.compile(r"rollbook-[0-9a-f]{16}-[0-7]")


class _Mapping:
    """A file mapped into memory as a [bytes] uint8 tensor."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)
        self.data: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._is_registered = torch.cuda.is_available() and _register(self.data)

    def close(self) -> None:
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())  # type: ignore[no-untyped-call,attr-defined,unused-ignore]
        del self.data  # the mapping itself goes with its last view


def _mapped(path: Path) -> _Mapping:
    """Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _Mapping(descriptor)
    finally:
        os.close(descriptor)


def _register(data: Tensor) -> bool:
    """Page-lock the mapping for fast copies; without it copies still work."""
    code = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)  # type: ignore[no-untyped-call,attr-defined,unused-ignore]
    return int(code) == 0


class _Slot:
    """A file of the trainer's, locked for as long as it has it. Raises OSError."""

    def __init__(self, folder: Path, slot_idx: int, num_bytes: int) -> None:
        name = f"rollbook-{secrets.token_hex(8)}-{slot_idx}"
        self.path = folder / f"{name}.partial"  # no slot before it is locked
        self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # On a file system without locks nobody can take it for an orphan either.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = self.path.rename(folder / name)
            os.posix_fallocate(
                self._lock, 0, num_bytes
            )  # a full /dev/shm is an error here, not a crash later
            self.mapping = _Mapping(self._lock)
        except BaseException:
            self._remove()
            raise

    def close(self) -> None:
        self._remove()
        self.mapping.close()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _remove_orphans(folder: Path) -> None:
    """Slots whose trainer was killed: nobody else would ever free that memory."""
    for path in folder.glob("rollbook-*"):
        if FILE_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):  # another user's, or locked
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)


class ShmSender(Sender):
    """The trainer's half: one file for each slot, removed when it closes."""

    is_quick = True

    def __init__(self, folder: str = "/dev/shm") -> None:
        self._folder = Path(folder)
        self._slots: dict[int, _Slot] = {}
        _remove_orphans(self._folder)

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        held = self._slots.get(slot_idx)
        if held is None or held.mapping.data.numel() < num_bytes:
            if held is not None:
                self._slots.pop(slot_idx).close()
            try:
                held = self._slots[slot_idx] = _Slot(self._folder, slot_idx, num_bytes)
            except OSError as error:
                raise SyncError(
                    f"{num_bytes} bytes of shared memory could not be had in {self._folder}: {error.strerror}",
                    "lower sync.bucket_bytes or sync.max_buckets, or enlarge or change sync.shm_dir",
                ) from error
        return held.mapping.data[:num_bytes]

    def announce(self, bucket: Bucket) -> Json:
        assert bucket.data is not None
        wait_until_packed(bucket)
        address = bucket.data.untyped_storage().data_ptr()
        for slot in self._slots.values():
            if slot.mapping.data.untyped_storage().data_ptr() == address:
                return {"file": slot.path.name, "num_bytes": bucket.data.numel()}
        raise SyncError(
            "a bucket does not lie in shared memory", "pass this sender's `buffer` to the Publisher"
        )

    def close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


class ShmReceiver(Receiver):
    """The engine's half: maps a slot's file when it first hears of it."""

    is_quick = True

    def __init__(self, folder: str = "/dev/shm") -> None:
        self._folder = Path(folder)
        self._mappings: dict[str, _Mapping] = {}

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        name = field(place, "file", str)
        mapping = self._mappings.get(name)
        if mapping is None:
            if not FILE_NAME.fullmatch(name):
                raise SyncError(f"{name!r} is not a slot of shared memory", "look at who talks to this port")
            try:
                mapping = _mapped(self._folder / name)
            except (OSError, ValueError) as error:
                raise SyncError(
                    f"the slot {name} cannot be opened in {self._folder}: {error}",
                    "trainer and engine must run on one host, as one user, with one sync.shm_dir",
                ) from error
            slot = name[-1]
            for old in [held for held in self._mappings if held[-1] == slot]:
                self._mappings.pop(old).close()
            self._mappings[name] = mapping
        return replace(bucket, data=announced(mapping.data, bucket, place))

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
