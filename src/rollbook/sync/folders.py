"""Whether the folders that a transport writes into can be written, asked before the first publication."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollbook.sync.config import SyncConfig


def uses_shm(sync: SyncConfig, *, is_on_ray: bool) -> bool:
    """Weights travel through shared memory: on Ray nothing is in one process."""
    return sync.transport == "shm" or (is_on_ray and sync.transport == "inproc")


def folder_problems(sync: SyncConfig, *, by_shm: bool) -> Iterator[tuple[str, str]]:
    """(what, remedy) for what stands in the way on this host.

    Args:
        by_shm: weights travel through shared memory, whatever `sync.transport` is called.
    """
    if sync.transport == "disk" and (why := _why_not(Path(sync.disk_dir), is_made=True)):
        yield (
            f"sync.disk_dir is '{sync.disk_dir}', {why}",
            "name a folder that trainer and engines share and may write, or use another sync.transport",
        )
    if by_shm and (why := _why_not(Path(sync.shm_dir), is_made=False)):
        yield (
            f"sync.shm_dir is '{sync.shm_dir}', {why}",
            "name a folder that lies in memory and may be written, such as /dev/shm",
        )


def _why_not(folder: Path, *, is_made: bool) -> str:
    """Empty where files can be made in it. A folder that `is_made` with the first file only needs room for it."""
    try:
        place = folder
        while is_made and not place.exists() and place != place.parent:
            place = place.parent
        if not place.exists():
            return "which does not exist"
        if not place.is_dir():
            return f"and {place} is no folder"
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"where nothing can be written: {error.strerror}"
