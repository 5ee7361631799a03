"""Buckets as safetensors files in a folder that trainer and engines share.

    <folder>/rollbook-<id>/v<version>/bucket_<idx>.safetensors      written aside, flushed, renamed when whole

A tensor that travels whole and plain keeps its Hugging Face name, so that any loader can read the folder; a part is
called `name@<offset>` and a delta `name@<offset>+<encoding>`. The reader maps the file and never copies it. Which
version is proven is said over the connection, not by the files. A trainer writes into a folder of its own and touches
nothing else; the two newest versions stay there until another trainer of this host begins beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.bucket import SlotBuffers
from rollbook.sync.transport import Once, Receiver, Sender, settled, wait_until_packed
from rollbook.sync.wire import MAX_HEADER_BYTES, Json, field
from rollbook.weights import Bucket, BucketEntry, TensorSpec

OWN_FOLDER = re.compile(r"rollbook-[0-9a-f]{16}")
"""What one trainer writes into."""
FILE_NAME = re.compile(OWN_FOLDER.pattern + r"/v[0-9]+/bucket_[0-9]+\.safetensors")
"""The only paths a message may name, below the shared folder."""
LOCK = "lock"
"""File of an own folder, locked while its trainer lives; it says on which boot of which host that is."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskSender(Sender):
    """The trainer's half. `specs` gives whole tensors their shape and dtype in the file."""

    is_quick = False

    def __init__(self, folder: str, specs: Iterable[TensorSpec]) -> None:
        self._shared = Path(folder)
        self._own: Path | None = None
        """Made with the first bucket."""
        self._lock = -1
        self._specs = {spec.name: spec for spec in specs}
        self._buffers = SlotBuffers()
        self._once = Once()

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        return self._buffers(slot_idx, num_bytes, torch.device("cpu"))

    def announce(self, bucket: Bucket) -> Json:
        def write() -> Future[Json]:
            return settled({"file": self._write(bucket)})

        wait_until_packed(bucket)
        return self._once.run(bucket, write).result()

    def _write(self, bucket: Bucket) -> str:
        assert bucket.data is not None
        tensors = {}
        for entry in bucket.entries:
            data = bucket.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
            spec = self._specs[entry.name]
            if entry_name(entry, spec.num_bytes) == entry.name:
                data = data.view(getattr(torch, spec.dtype)).view(spec.shape)
            tensors[entry_name(entry, spec.num_bytes)] = data
        name = f"v{bucket.weight_version}/bucket_{bucket.bucket_idx}.safetensors"
        aside: Path | None = None
        try:
            own = self._own_folder()
            if bucket.bucket_idx == 0:
                _remove_old_versions(own, bucket.weight_version)
            path = own / name
            path.parent.mkdir(exist_ok=True)
            aside = path.with_suffix(".partial")
            save_file(tensors, aside)
            flushed(aside)
            aside.rename(path)
        except (OSError, SafetensorError) as error:
            if aside is not None:
                with contextlib.suppress(OSError):
                    aside.unlink()
            raise SyncError(
                f"bucket {bucket.bucket_idx} cannot be written to {(self._own or self._shared) / name}: {error}",
                "make room in sync.disk_dir, or name another folder that trainer and engines share",
            ) from error
        return f"{own.name}/{name}"

    def _own_folder(self) -> Path:
        """Raises OSError."""
        if self._own is None:
            self._shared.mkdir(parents=True, exist_ok=True)
            _remove_orphans(self._shared)
            name = f"rollbook-{secrets.token_hex(8)}"
            aside = self._shared / f"{name}.partial"  # not an own folder before it is locked
            aside.mkdir()
            self._lock = os.open(aside / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._lock, BOOT_ID.read_bytes())
            # On a file system without locks nobody can take it for an orphan either.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own = aside.rename(self._shared / name)
        return self._own

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_old_versions(own: Path, weight_version: int) -> None:
    versions = sorted(int(p.name[1:]) for p in own.glob("v*") if p.name[1:].isdigit())
    for old in [v for v in versions if v < weight_version][:-1]:
        shutil.rmtree(own / f"v{old}", ignore_errors=True)


def _remove_orphans(shared: Path) -> None:
    """Folders of trainers of this host that are gone; what runs on another one cannot be seen from here."""
    for own in shared.iterdir():
        if OWN_FOLDER.fullmatch(own.name):
            with contextlib.suppress(OSError), (own / LOCK).open("rb") as lock:
                if lock.read() == BOOT_ID.read_bytes():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(own, ignore_errors=True)


class DiskReceiver(Receiver):
    """The engine's half: reads the file a message names, below its own folder."""

    is_quick = False

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        name = field(place, "file", str)
        if not FILE_NAME.fullmatch(name):
            raise SyncError(f"{name!r} is not a bucket's file", "look at who talks to this port")
        try:
            data, spans = read_safetensors(self._folder / name)
        except OSError as error:
            raise SyncError(
                f"bucket {bucket.bucket_idx} cannot be read from {self._folder / name}: {error.strerror}",
                "trainer and engine must share sync.disk_dir",
            ) from error
        entries = []
        for entry in bucket.entries:
            named = [
                name_in_file for name_in_file in (entry.name, entry_name(entry, -1)) if name_in_file in spans
            ]
            if not named:
                raise SyncError(
                    f"{self._folder / name} does not hold {entry.name}",
                    "the file is not the one that was written; the publication is repeated in full",
                )
            begin, end = spans[named[0]]
            if end - begin != entry.num_bytes:
                raise SyncError(
                    f"{self._folder / name} holds {end - begin} bytes of {entry.name}, the message says "
                    f"{entry.num_bytes}",
                    "the file was cut short; the publication is repeated in full",
                )
            entries.append(replace(entry, offset_bytes=begin))
        return replace(bucket, data=data, entries=tuple(entries))


def entry_name(entry: BucketEntry, whole_bytes: int) -> str:
    """What an entry is called in the file: the tensor's own name if it is all of the tensor, undisguised."""
    if entry.encoding == "dense" and entry.num_bytes == whole_bytes:
        return entry.name
    encoding = "" if entry.encoding == "dense" else f"+{entry.encoding}"
    return f"{entry.name}@{entry.tensor_offset_bytes}{encoding}"


def read_safetensors(path: Path) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """A file mapped into memory and the byte span of each tensor in it.

    Returns:
        [bytes] uint8 view of the whole file; name -> (begin, end) in it.
    Raises:
        SyncError: not a safetensors file, or one that was cut short.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise SyncError(f"{path} of {size} bytes was cut short", "the publication is repeated in full")
        try:
            header = json.loads(file.read(header_bytes))
            spans = {
                name: (
                    8 + header_bytes + int(row["data_offsets"][0]),
                    8 + header_bytes + int(row["data_offsets"][1]),
                )
                for name, row in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise SyncError(
                f"{path} is not a safetensors file: {error}", "look at who writes into it"
            ) from None
        if any(not 8 <= begin <= end <= size for begin, end in spans.values()):
            raise SyncError(f"{path} of {size} bytes was cut short", "the publication is repeated in full")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapping, dtype=torch.uint8), spans


def flushed(path: Path) -> None:
    """Bytes on the disk before the rename makes them visible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
