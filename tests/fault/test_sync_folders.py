"""Folders that weights travel through: asked before a run begins, and named when a write fails later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import start_run
from rollbook.errors import ConfigError, SyncError
from rollbook.sync import disk
from rollbook.sync.disk import DiskSender
from rollbook.weights import Bucket, BucketEntry, TensorSpec
from tiny_run import as_set, run_tiny, write_tiny


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            {"sync.transport": "shm", "sync.shm_dir": "{}/gone"},
            "sync.shm_dir is '{}/gone', which does not exist",
        ),
        ({"sync.transport": "shm", "sync.shm_dir": "{}/file"}, "'{}/file', and {}/file is no folder"),
        ({"sync.transport": "shm", "sync.shm_dir": "/proc"}, "'/proc', where nothing can be written: "),
        (
            {"cluster.kind": "ray", "sync.shm_dir": "{}/gone"},
            "sync.shm_dir is '{}/gone', which does not exist",
        ),
        ({"sync.transport": "disk", "sync.disk_dir": "{}/file/w"}, "'{}/file/w', and {}/file is no folder"),
        ({"sync.transport": "disk", "sync.disk_dir": "/proc/w"}, "'/proc/w', where nothing can be written: "),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    overrides: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    path = write_tiny(tmp_path)
    given = {name: value.replace("{}", str(tmp_path)) for name, value in overrides.items()}
    with pytest.raises(ConfigError) as refused:
        start_run(path, as_set(given))
    assert told.replace("{}", str(tmp_path)) in refused.value.what
    assert not (tmp_path / "run").exists()


def test_folders_that_no_transport_uses_are_not_asked_for(tmp_path: Path) -> None:
    unused = {"sync.shm_dir": str(tmp_path / "gone"), "sync.disk_dir": "/proc/w"}
    assert len(run_tiny(tmp_path, num_steps=1, **unused).metrics) == 1


def test_a_folder_on_the_disk_is_made_and_known_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_tiny(tmp_path, num_steps=1, **{"sync.transport": "disk", "sync.disk_dir": "a/w"})
    assert list((tmp_path / "a" / "w").glob("rollbook-*/v1"))
    written = load_config(run.folder / "config.toml", [], RunConfig)
    assert written.sync.disk_dir == str(tmp_path / "a" / "w"), "a resume from elsewhere writes there, too"


def test_a_key_file_that_is_not_there_is_reported_with_everything_else(tmp_path: Path) -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "m", "token_file": "no.key"}
    with pytest.raises(ConfigError, match=r"eval\.baseline\.token_file 'no\.key' does not exist"):
        start_run(write_tiny(tmp_path), as_set({"eval.baseline": endpoint, "eval.num_prompts": 2}))


def test_a_full_disk_is_an_error_of_the_publication_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TensorSpec(name="w", shape=(4,), dtype="uint8", num_bytes=4)
    entry = BucketEntry(name="w", offset_bytes=0, num_bytes=4)
    bucket = Bucket(weight_version=3, bucket_idx=0, entries=(entry,), data=torch.zeros(4, dtype=torch.uint8))

    def save_file(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "save_file", save_file)
    with pytest.raises(SyncError, match=r"v3/bucket_0\.safetensors: .*No space left") as failed:
        DiskSender(str(tmp_path), [spec]).announce(bucket)
    assert "sync.disk_dir" in failed.value.remedy
    assert not list(tmp_path.rglob("*.partial"))
