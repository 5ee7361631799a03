"""A checkpoint is whole or refused, and gives back exactly what it was given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from rollbook.errors import CheckpointError

STATE = {
    "trainer": {
        "w": torch.tensor([1.5, -0.0, float("nan")]),
        "step": 3,
        "lists": [torch.arange(3), "x", None],
    },
    "buffer": [{"ids": np.array([1, 2], np.int32)}],
}


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, STATE, keep=2)
    state = load_checkpoint(path)
    assert state["trainer"]["w"].view(torch.int32).equal(STATE["trainer"]["w"].view(torch.int32))  # type: ignore[index]
    assert state["trainer"]["lists"][0].tolist() == [0, 1, 2]
    assert state["trainer"]["lists"][1:] == ["x", None]
    assert state["buffer"][0]["ids"].dtype == np.int32


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, STATE, keep=2)
    assert list_checkpoints(tmp_path) == [2, 10]


def test_a_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    file = path / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="tensors.safetensors"):
        load_checkpoint(path)


def test_a_half_written_checkpoint_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "step_5.partial").mkdir()
    assert list_checkpoints(tmp_path) == []
