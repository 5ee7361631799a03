"""One checkpoint: nested state in, a folder that is whole or absent out.

checkpoints/step_12/
  state.json            everything that is not an array; arrays are named by their path
  tensors.safetensors   every tensor and numpy array, under that path
  manifest.json         step, and the sha256 of the two files above
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollbook.errors import CheckpointError

State = Mapping[str, Any]
"""Nested dicts and lists of tensors, numpy arrays, and JSON values. Keys are strings."""

_FOLDER = re.compile(r"step_(\d+)")
_ARRAY = "__array__"


def save_checkpoint(folder: Path, step: int, state: State, *, keep: int) -> Path:
    """`prepare_checkpoint` and `commit_checkpoint` at once."""
    prepare_checkpoint(folder, step, state)
    return commit_checkpoint(folder, step, keep=keep)


def prepare_checkpoint(folder: Path, step: int, state: State) -> int:
    """Write `folder/step_N.partial`, which no reader takes for a checkpoint yet; returns its bytes.

    Raises:
        CheckpointError: the disk is full or cannot be written; nothing that was there is lost.
    """
    arrays: dict[str, torch.Tensor] = {}
    plain = _split(state, "", arrays)

    def write(aside: Path) -> None:
        save_file(arrays, aside / "tensors.safetensors")
        (aside / "state.json").write_text(json.dumps(plain), encoding="utf-8")
        digests = {name: _sha256(aside / name) for name in ("tensors.safetensors", "state.json")}
        (aside / "manifest.json").write_text(json.dumps({"step": step, "sha256": digests}), encoding="utf-8")

    return write_aside(folder / f"step_{step}", write)


def commit_checkpoint(folder: Path, step: int, *, keep: int) -> Path:
    """Make the prepared `step_N` a checkpoint, and drop all but the newest `keep`.

    Raises:
        CheckpointError: the disk cannot be written; nothing that was there is lost.
    """
    final = take_place(folder / f"step_{step}")
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(folder / f"step_{old}", ignore_errors=True)
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
        return sum(path.stat().st_size for path in aside.iterdir())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _cannot_write(final, error) from error


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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of one checkpoint, proven against its manifest.

    Raises:
        CheckpointError: a file is missing or its digest differs; names the file.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name, digest in manifest["sha256"].items():
            if _sha256(path / name) != digest:
                raise CheckpointError(
                    f"{path / name} does not have the digest of its manifest",
                    "the file was changed or damaged: delete this checkpoint and resume from the one before",
                )
        arrays = load_file(path / "tensors.safetensors")
        plain = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}", "resume from an earlier checkpoint"
        ) from error
    joined = _join(plain, arrays)
    assert isinstance(joined, dict)
    return joined


def _split(value: Any, path: str, arrays: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        arrays[path] = value.detach().cpu().contiguous().clone()
        return {_ARRAY: path, "as": "torch"}
    if isinstance(value, np.ndarray):
        arrays[path] = torch.from_numpy(np.ascontiguousarray(value).copy())
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
