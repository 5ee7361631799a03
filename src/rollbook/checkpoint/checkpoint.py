"""One checkpoint: nested state in, a folder that is whole or absent out.

checkpoints/step_12/
  state.json              everything that is not an array; arrays are named by their path
  trainer_00.safetensors  tensors and numpy arrays under their paths, PART_BYTES of them a file
  manifest.json           step, and the sha256 of the files above

A state on a GPU is copied to the host, written and digested file by file, NUM_WRITERS at a time: never more than those
files is held beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollbook.errors import CheckpointError

State = Mapping[str, Any]
"""Nested dicts and lists of tensors, numpy arrays, and JSON values. Keys are strings."""

PART_BYTES = 512 << 20
"""Of arrays in one file; a larger array has a file of its own."""
NUM_WRITERS = 4
"""Files that are written, or proven, at a time: copies, the disk and SHA-256 then work at once."""
_FOLDER = re.compile(r"step_(\d+)")
_LEFT_BEHIND = re.compile(r"step_\d+\.(partial|replaced|dropped)")
_ARRAY = "__array__"


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a state whose arrays are in files already."""

    plain: Any
    """The part without its arrays, each of which is named by its path."""
    sha256: dict[str, str]
    """By file."""


def prepare_checkpoint(
    folder: Path, step: int, state: State, parts: Mapping[str, Callable[[Path], Written]]
) -> int:
    """Write `folder/step_N.partial`, which no reader takes for a checkpoint yet; returns its bytes.

    Args:
        parts: of the state beside `state`, by their keys; each writes its arrays into the folder it is given, by
            `write_arrays`, wherever it lives.

    Raises:
        CheckpointError: the disk is full or cannot be written; nothing that was there is lost.
    """

    def write(aside: Path) -> None:
        run = write_arrays(aside, state, "run")
        plain, digests = dict(run.plain), dict(run.sha256)
        for key, write_part in parts.items():
            part = write_part(aside)
            plain[key] = part.plain
            digests |= part.sha256
        if missing := [name for name in digests if not (aside / name).exists()]:
            raise CheckpointError(
                f"{aside / missing[0]} was written by another process and is not here",
                "run.dir must be a folder that all processes of the run share",
            )
        (aside / "state.json").write_text(json.dumps(plain), encoding="utf-8")
        digests["state.json"] = _sha256(aside / "state.json")
        (aside / "manifest.json").write_text(json.dumps({"step": step, "sha256": digests}), encoding="utf-8")

    return write_aside(folder / f"step_{step}", write)


def write_arrays(folder: Path, state: State, name: str) -> Written:
    """Write the arrays of a state into `name_00.safetensors` and so on, and return the rest of it.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    arrays: dict[str, torch.Tensor] = {}
    plain = _split(state, name, arrays)

    def write(numbered: tuple[int, list[str]]) -> tuple[str, str]:
        number, paths = numbered
        file = folder / f"{name}_{number:02d}.safetensors"
        save_file({path: arrays[path].to("cpu", copy=True).contiguous() for path in paths}, file)
        return file.name, _sha256(file)

    try:
        with ThreadPoolExecutor(NUM_WRITERS) as writers:
            return Written(plain, dict(writers.map(write, enumerate(_in_parts(arrays)))))
    except (OSError, SafetensorError) as error:
        raise _cannot_write(folder.with_suffix(""), error) from error


def _in_parts(arrays: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Paths of the arrays of each file."""
    part: list[str] = []
    num_bytes = 0
    for path, array in arrays.items():
        if part and num_bytes + array.nbytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(path)
        num_bytes += array.nbytes
    if part:
        yield part


def commit_checkpoint(folder: Path, step: int, *, keep: int) -> Path:
    """Make the prepared `step_N` a checkpoint, and drop all but the newest `keep`, with what writes that were killed
    have left.

    Raises:
        CheckpointError: the disk cannot be written; nothing that was there is lost.
    """
    final = take_place(folder / f"step_{step}")
    for old in list_checkpoints(folder)[:-keep]:
        path = folder / f"step_{old}"
        with contextlib.suppress(OSError):  # half deleted it would pass for a checkpoint
            path.rename(path.with_name(f"{path.name}.dropped"))
    for path in folder.iterdir():
        if _LEFT_BEHIND.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return final


def write_aside(final: Path, write: Callable[[Path], None]) -> int:
    """Let `write` fill a folder beside `final`, and see that all of it reaches the disk; returns its bytes.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    aside = _aside(final)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        for path in aside.iterdir():
            _flush(path)
        _flush(aside)
        return sum(path.stat().st_size for path in aside.iterdir())
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _cannot_write(final, error) from error
        raise


def take_place(final: Path) -> Path:
    """Give the folder written aside its name.

    Raises:
        CheckpointError: the disk cannot be written.
    """
    replaced = final.with_name(f"{final.name}.replaced")
    try:
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        _aside(final).rename(final)
        _flush(final.parent)
    except OSError as error:
        raise _cannot_write(final, error) from error
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _aside(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial")


def _cannot_write(final: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{final} could not be written: {error}",
        "free disk space or choose another run.dir; earlier checkpoints are untouched",
    )


def list_checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    matches = (_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def load_checkpoint(path: Path, *, prove: bool = True) -> dict[str, Any]:
    """The state of one checkpoint, proven against its manifest.

    Args:
        prove: False where another process of the run has just done it.

    Raises:
        CheckpointError: a file is missing, its digest differs, or the folder has another step's name; names it.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        expected: dict[str, str] = manifest["sha256"]
        if prove:
            _prove(path, expected)
        arrays: dict[str, torch.Tensor] = {}
        for name in expected:
            if name.endswith(".safetensors"):
                arrays |= load_file(path / name)
        plain = json.loads((path / "state.json").read_text(encoding="utf-8"))
        joined: dict[str, Any] = dict(_join(plain, arrays))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {type(error).__name__}: {error}",
            "delete this checkpoint and resume from the one before",
        ) from error
    if (step := manifest.get("step")) is not None and path.name != f"step_{step}":
        raise CheckpointError(
            f"checkpoint {path} is of step {step}, by its manifest",
            f"give it back its name, step_{step}, or delete it",
        )
    return joined


def _prove(path: Path, expected: Mapping[str, str]) -> None:
    """Every file of `path` has the digest that its manifest expects of it."""
    with ThreadPoolExecutor(NUM_WRITERS) as readers:
        found = dict(zip(expected, readers.map(lambda name: _sha256(path / name), expected)))
    for name, digest in expected.items():
        if found[name] != digest:
            raise CheckpointError(
                f"{path / name} does not have the digest of its manifest",
                "the file was changed or damaged: delete this checkpoint and resume from the one before",
            )


def _split(value: Any, path: str, arrays: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        arrays[path] = value.detach()
        return {_ARRAY: path, "as": "torch"}
    if isinstance(value, np.ndarray):
        arrays[path] = torch.from_numpy(np.ascontiguousarray(value))
        return {_ARRAY: path, "as": "numpy"}
    if isinstance(value, Mapping):
        return {str(k): _split(v, f"{path}/{k}" if path else str(k), arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_split(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _join(value: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            array = arrays[value[_ARRAY]]
            return array.numpy() if value["as"] == "numpy" else array
        return {k: _join(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_join(v, arrays) for v in value]
    return value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bytes and directory entries reach the disk before the rename makes them count."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
