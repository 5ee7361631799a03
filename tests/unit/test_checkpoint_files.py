"""A checkpoint is whole or refused, and gives back exactly what it was given."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollbook.checkpoint import checkpoint as checkpoint_module
from rollbook.checkpoint.checkpoint import (
    Written,
    commit_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prepare_checkpoint,
    write_arrays,
)
from rollbook.errors import CheckpointError, DeadlineError

STATE: dict[str, Any] = {
    "trainer": {
        "w": torch.tensor([1.5, -0.0, float("nan")]),
        "step": 3,
        "lists": [torch.arange(3), "x", None],
    },
    "buffer": [{"ids": np.array([1, 2], np.int32)}],
}


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """With the trainer's part written by the trainer."""
    run = {key: value for key, value in state.items() if key != "trainer"}
    prepare_checkpoint(
        folder, step, run, {"trainer": lambda aside: write_arrays(aside, state["trainer"], "trainer")}
    )
    return commit_checkpoint(folder, step, keep=keep)


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, STATE, keep=2)
    state = load_checkpoint(path)
    assert state["trainer"]["w"].view(torch.int32).equal(STATE["trainer"]["w"].view(torch.int32))
    assert state["trainer"]["lists"][0].tolist() == [0, 1, 2]
    assert state["trainer"]["lists"][1:] == ["x", None]
    assert state["buffer"][0]["ids"].dtype == np.int32


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, STATE, keep=2)
    assert list_checkpoints(tmp_path) == [2, 10]


def test_a_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    file = path / "trainer_00.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="trainer_00.safetensors"):
        load_checkpoint(path)


def test_a_half_written_checkpoint_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "step_5.partial").mkdir()
    assert list_checkpoints(tmp_path) == []


def test_a_large_state_lies_in_several_files_and_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file holds PART_BYTES, or one larger array; arrays that share memory are written each for itself."""
    monkeypatch.setattr(checkpoint_module, "PART_BYTES", 64)
    whole = torch.arange(40, dtype=torch.float32)
    trainer = {
        "large": whole,
        "tied": whole,
        "part": whole[3:9],
        **{f"w{i}": torch.full((4,), i) for i in range(9)},
    }
    path = save_checkpoint(tmp_path, 1, {"trainer": trainer}, keep=1)
    assert len(list(path.glob("trainer_*.safetensors"))) > 5
    state = load_checkpoint(path)["trainer"]
    assert list(state) == list(trainer)
    for name, tensor in trainer.items():
        assert torch.equal(state[name], tensor), name


def test_a_state_that_shrank_leaves_no_file_of_the_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "PART_BYTES", 8)
    save_checkpoint(tmp_path, 1, STATE, keep=1)
    monkeypatch.setattr(checkpoint_module, "PART_BYTES", 1 << 20)
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    assert [file.name for file in path.glob("trainer_*")] == ["trainer_00.safetensors"]


def test_a_checkpoint_of_one_file_as_older_versions_wrote_it_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    arrays = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in path.glob("*.safetensors"):
        file.unlink()
    save_file(arrays, path / "tensors.safetensors")
    names = ("tensors.safetensors", "state.json")
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    (path / "manifest.json").write_text(json.dumps({"step": 1, "sha256": digests}))
    assert load_checkpoint(path)["trainer"]["lists"][0].tolist() == [0, 1, 2]


def test_what_another_process_wrote_elsewhere_is_no_checkpoint(tmp_path: Path) -> None:
    elsewhere = Written({}, {"trainer_00.safetensors": "0"})
    with pytest.raises(CheckpointError, match="trainer_00.safetensors was written by another process"):
        prepare_checkpoint(tmp_path, 1, {}, {"trainer": lambda aside: elsewhere})
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_whose_deletion_is_cut_short_is_none_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, STATE, keep=1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: (path / "manifest.json").unlink(missing_ok=True))
    save_checkpoint(tmp_path, 2, STATE, keep=1)
    assert list_checkpoints(tmp_path) == [2]
    monkeypatch.undo()
    save_checkpoint(tmp_path, 3, STATE, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"], "and the next one clears it away"


def test_what_a_killed_write_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    for name in ("step_5.partial", "step_4.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_00.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path, 6, STATE, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_6"]


def test_a_write_that_anything_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    """A trainer's process that is gone or late, as well as a full disk."""

    def late(aside: Path) -> Written:
        (aside / "trainer_00.safetensors").write_bytes(b"half")
        raise DeadlineError("rank 0 did not answer", "raise cluster.step_deadline_s")

    with pytest.raises(DeadlineError):
        prepare_checkpoint(tmp_path, 1, {}, {"trainer": late})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "manifest",
    ["[]", "{}", '{"sha256": 3}', '{"sha256": {}}', '{"step": 1, "sha256": {"run_00.safetensors": 1}}'],
)
def test_a_damaged_manifest_is_an_error_that_says_what_to_do(tmp_path: Path, manifest: str) -> None:
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="delete this checkpoint and resume from the one before"):
        load_checkpoint(path)


def test_a_file_that_was_damaged_since_it_was_proven_is_an_error(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, STATE, keep=1)
    (path / "trainer_00.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path, prove=False)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """The run would go on from step 4, and drop what it saves next as older than step 8."""
    save_checkpoint(tmp_path, 4, STATE, keep=1).rename(tmp_path / "step_8")
    with pytest.raises(CheckpointError, match="step_8 is of step 4"):
        load_checkpoint(tmp_path / "step_8")
