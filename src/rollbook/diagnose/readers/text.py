"""Reading logs as text: lines streamed from files of any size, colour codes and Ray prefixes taken off, numbers as
people and programs write them."""

from __future__ import annotations

import codecs
import io
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollbook.diagnose.readers.floods import Floods, Listener
from rollbook.errors import DataError

BLOCK_BYTES = 1024 * 1024
MAX_LINE_BYTES = 32 * 1024 * 1024
"""A longer line is cut, so that a binary file does not fill the memory."""

NUMBER = (
    r"(?:np\.|numpy\.)?(?:(?:float|int|uint)\d*|bfloat16|bool_?|tensor|array)\(\s*[-+]?[\w.+-]+[^()]{0,60}\)"
    r"|[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf(?:inity)?|Inf(?:inity)?|None|null)"
)
_WRAPPED = re.compile(r"^[\w.]+\(\s*([-+]?[\w.+-]+)")
_COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_RAY_PREFIX = re.compile(
    r"^\s*(?:\([^()\s]+(?:\s+[^()]*)?pid=\d+[^()]*\)|\((?:raylet|autoscaler|gcs_server)[^()]*\))\s?"
)


_BOMS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_GZIP = b"\x1f\x8b"


def open_binary(path: Path) -> BinaryIO:
    """Open a log as UTF-8, compressed or not; what PowerShell wrote as UTF-16 is told by its first bytes.

    Raises:
        DataError: it cannot be read, with the reason.
    """
    try:
        file = path.open("rb")
        if file.peek(2)[:2] == _GZIP:
            file.close()
            file = io.BufferedReader(_Unpacked(path))
        for bom, encoding in _BOMS:
            if file.peek(len(bom))[: len(bom)] == bom:
                file.read(len(bom))
                return file if encoding == "utf-8" else io.BufferedReader(_Recoded(file, encoding))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    return file


class _Unpacked(io.RawIOBase):
    """What a gzip file holds, up to where it can be unpacked: a copy that was cut short ends there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = self._packed or self._file.read(BLOCK_BYTES)
            try:
                data = self._unpacker.decompress(packed, len(buffer))
            except zlib.error:
                return 0
            if not packed and not data:
                return 0
            self._packed = self._unpacker.unconsumed_tail
            if self._unpacker.eof:  # another member may follow: `cat a.gz b.gz`
                self._packed = self._unpacker.unused_data
                self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Recoded(io.RawIOBase):
    """A stream of another encoding, read as UTF-8; what is no character of it reads as U+FFFD."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = self._file.read(BLOCK_BYTES)
            self._left = self._decoder.decode(block, final=not block).encode("utf-8", errors="replace")
            if not block:
                break
        num = min(len(buffer), len(self._left))
        buffer[:num], self._left = self._left[:num], self._left[num:]
        return num

    def close(self) -> None:
        self._file.close()
        super().close()


def is_ended_by_newline(path: Path) -> bool:
    """Whether the last line of a log is whole; a compressed one is unpacked again for it."""
    with path.open("rb") as file:
        head = file.read(4)
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(-min(4, size), os.SEEK_END)
        tail = file.read()
    if head[:2] == _GZIP:
        with open_binary(path) as file:
            while block := file.read(BLOCK_BYTES):
                tail = block[-1:]
    if any(head.startswith(bom) for bom, encoding in _BOMS if encoding != "utf-8"):
        tail = tail.rstrip(b"\0")  # of the wide character
    return tail[-1:] in (b"\r", b"\n")


TROUBLE_BYTES = (
    b"emory", b"imeout", b"imed out", b"TIMEOUT", b"atchdog", b"pill", b"esum", b"ecover", b"heckpoint", b"global step",
    b"andbox", b"nv_server", b"update_actor", b"update_weights", b"generate_seq", b"wake_up", b"Crash",
    b"OOM", b"oom", b"OUT_OF_MEM",
    b"ALLOC", b"is full", b", line ", b"Error", b"xception", b"Traceback", b"Final ", b"class_name", b"EngineDead",
    b"ncountered a", b" died", b" dead", b"crashed", b"nhealthy", b" gone", b"ealth check", b"estarted", b"elaunched",
    b"egistered", b"ejoined", b"is back", b"was back", b"back online", b"back up", b"back in service", b"back after",
    b"healthy again",
    b"sigquit", b"ollective", b"times out", b"joined", b"enqueued", b"Docker daemon", b"docker.errors", b"ddress pool",
    b"exceeded quota", b"distributed_c10d", b"unshard", b"ontainers",
)  # fmt: skip
"""Every line in which a log reports trouble, or in which stage it was, holds one of these; what a server or a sampled
text says all the time must hold none of them, or a log of gigabytes is read line by line."""


def lines(path: Path, wanted: tuple[bytes, ...] = (), listener: Listener | None = None) -> Iterator[str]:
    """The lines of a log, one at a time, without line ends; a progress bar's carriage returns end lines too.

    Args:
        wanted: only lines that hold one of these (and they may be few in gigabytes); empty: all.
        listener: is told every line that is no step, and those that it knows are left out.
    """
    sieve = _Sieve(wanted) if wanted else None
    floods = Floods(lambda raw: any(True for _ in sieve.lines(raw)), listener) if sieve and listener else None
    with open_binary(path) as file:
        while block := file.read(BLOCK_BYTES):
            if not block.endswith(b"\n"):
                block += file.readline(MAX_LINE_BYTES)
            if floods is not None and floods.holds(block):
                found = floods.lines(block)
            else:
                found = (
                    iter(block.splitlines()) if sieve is None else sieve.lines(block)
                )  # at carriage returns too
            for raw in found:
                yield raw[:MAX_LINE_BYTES].decode("utf-8", errors="replace")


class _Sieve:
    """Finds the lines of a block that hold one of many words. A table tells at every three bytes which words may be
    there, and only such places are looked at: a tenth of a second for every ten megabytes, however many words."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self._places: list[list[tuple[bytes, int]]] = [[]]
        """By code: words, and where in each the three bytes stand."""
        self._code = np.zeros(1 << 24, np.uint8)
        for word in words:
            if len(word) < 3:  # whatever follows
                for rest in itertools.product(range(256), repeat=3 - len(word)):
                    self._add(word + bytes(rest), word, 0)
            else:
                starts = range(len(word) - 2)
                at = max(starts, key=lambda i: sum(_RARITY.get(b, len(_COMMON)) for b in word[i : i + 3]))
                self._add(word[at : at + 3], word, at)

    def _add(self, three: bytes, word: bytes, at: int) -> None:
        key = int.from_bytes(three, "little")
        places = [*self._places[self._code[key]], (word, at)]
        if places not in self._places:
            self._places.append(places)
        self._code[key] = self._places.index(places)

    def lines(self, block: bytes) -> Iterator[bytes]:
        text = np.frombuffer(block + b"\0\0", np.uint8)
        threes = text[2:].astype(np.uint32)
        for earlier in (text[1:-1], text[:-2]):
            threes <<= 8
            threes |= earlier
        codes = self._code[threes]
        end = 0
        for at in np.flatnonzero(codes).tolist():
            if at < end or not any(
                block.startswith(w, at - i) for w, i in self._places[codes[at]] if at >= i
            ):
                continue
            start = max(block.rfind(b"\n", end, at), block.rfind(b"\r", end, at)) + 1 or end
            end = len(block)
            for stop in (b"\n", b"\r"):
                found = block.find(stop, at, end)
                end = found if found >= 0 else end
            yield block[start:end]


_COMMON = b" etaoinsrhldcumfpgwybvkxjqz"
_RARITY = {byte: i for i, byte in enumerate(_COMMON)}
"""How rare a byte is in a log, roughly; one that is not in here is rarer."""


def plain(line: str) -> str:
    """The line without colour codes and without the prefixes that Ray puts before a worker's output.

    >>> plain("\\x1b[36m(TaskRunnerV1 pid=81)\\x1b[0m step:3 - a/b:1.0")
    'step:3 - a/b:1.0'
    """
    if "\x1b" in line:
        line = _COLOR.sub("", line)
    while line[:1] in "( " and (match := _RAY_PREFIX.match(line)):
        line = line[match.end() :]
    return line


def number(text: object) -> float | None:
    """The float that a value in a log stands for; NaN for null, None and NaN; None when it is no number.

    >>> [number(v) for v in ("1.5", "np.float64(1.5)", "1e-3", True, "abc", None)]
    [1.5, 1.5, 0.001, 1.0, None, nan]
    """
    if text is None:
        return math.nan
    if isinstance(text, bool | int | float):
        try:
            return float(text)
        except OverflowError:  # an integer of hundreds of digits
            return math.inf
    if not isinstance(text, str):
        return None
    text = text.strip().strip("'\"")
    if (match := _WRAPPED.match(text)) is not None:
        text = match.group(1)
    if text in ("None", "null", "NaN", "NA", ""):
        return math.nan if text else None
    try:
        return float(text)
    except ValueError:
        return None


_DICT_PAIR = re.compile(rf"""['"]([^'"\s][^'"]*)['"]\s*:\s*['"]?({NUMBER})['"]?(?=\s*[,}}\])]|\s*$|\s)""")


def dict_pairs(text: str) -> dict[str, float]:
    """The numeric entries of a printed Python or JSON dict, whatever else stands around or between them.

    >>> dict_pairs("perf 3: {'a/b': np.float64(2.0), 'note': 'x', 'c': nan}")
    {'a/b': 2.0, 'c': nan}
    """
    pairs: dict[str, float] = {}
    for key, value in _DICT_PAIR.findall(text):
        parsed = number(value)
        if parsed is not None:
            pairs[key] = parsed
    return pairs
