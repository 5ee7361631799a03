"""TensorBoard event files, read without TensorBoard: records of length, checksum, protocol buffer.

Format (tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto): a record is a uint64
length, its masked CRC, the bytes, and their CRC. Of an Event this reads wall_time (1), step (2) and summary
(5); of a Summary.Value the tag (1), simple_value (2), or the first float or double of a tensor (8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.text import open_binary
from rollbook.diagnose.series import Event, Row

MAX_RECORD_BYTES = 256 * 1024 * 1024


def find(folder: Path) -> list[Path]:
    """Event files under a folder, oldest first (their names begin with the time of writing)."""
    return sorted(folder.rglob("events.out.tfevents*"), key=lambda p: (p.name.split(".")[3:4], p.name))


def read(path: Path) -> Iterator[Row | Event]:
    """Scalars of one event file, or of all event files under a folder in the order in which they were begun."""
    for file in find(path) if path.is_dir() else [path]:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Row | Event]:
    step: int | None = None
    at_s = 0.0
    data: dict[str, float] = {}
    with open_binary(path) as file:
        while header := file.read(12):
            if len(header) < 12:
                yield Event(kind="truncated", step=step, text=f"{path.name} ends within a record")
                break
            (length,) = struct.unpack("<Q", header[:8])
            if length > MAX_RECORD_BYTES:
                yield Event(kind="damaged", step=step, text=f"{path.name} holds a record of {length} bytes")
                break
            record = file.read(length + 4)
            if len(record) < length + 4:
                yield Event(kind="truncated", step=step, text=f"{path.name} ends within a record")
                break
            record_at_s, record_step, scalars = _event(record[:length])
            if not scalars:
                continue
            if step is not None and record_step != step and data:
                yield Row(step=step, data=data, at_s=at_s)
                data = {}
            step, at_s = record_step, record_at_s
            data.update(scalars)
    if step is not None and data:
        yield Row(step=step, data=data, at_s=at_s)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protocol buffer: ints for varints, bytes for everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            yield key >> 3, message[at : at + size]
            at += size
        elif wire == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            return


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at


def _event(message: bytes) -> tuple[float, int, dict[str, float]]:
    at_s, step, scalars = 0.0, 0, {}
    for field, value in _fields(message):
        if field == 1 and isinstance(value, bytes) and len(value) == 8:
            (at_s,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for inner, entry in _fields(value):
                if inner == 1 and isinstance(entry, bytes):
                    tag, scalar = _summary_value(entry)
                    if scalar is not None:
                        scalars[tag] = scalar
    return at_s, step, scalars


def _summary_value(message: bytes) -> tuple[str, float | None]:
    tag = ""
    scalar: float | None = None
    for field, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode("utf-8", errors="replace")
        elif field == 2 and len(value) == 4:
            (scalar,) = struct.unpack("<f", value)
        elif field == 8:
            scalar = _tensor(value)
    return tag, scalar


def _tensor(message: bytes) -> float | None:
    """The first element of a float (dtype 1) or double (dtype 2) tensor."""
    dtype = 1
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif isinstance(value, bytes) and field in (4, 5, 6):
            code, size = ("<d", 8) if field == 6 or (field == 4 and dtype == 2) else ("<f", 4)
            if len(value) >= size:
                return float(struct.unpack(code, value[:size])[0])
    return None
