"""The run directory: the files of one run, one writer at a time, never a half line.

    config.toml  plan.json  metrics.jsonl  events.jsonl  tokens.jsonl  trajectories/  checkpoints/  lock

A line is written with one system call in append mode, so a killed process leaves at most one line cut
short, and `open(resume=True)` repairs that. The lock is an advisory file lock: it dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.errors import RunError

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TOKENS = "tokens.jsonl"
CONFIG = "config.toml"
PLAN = "plan.json"
LOCK = "lock"


class AppendFile:
    """A file of JSON lines that only grows, by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def open(self) -> AppendFile:
        """Create the file or take it up. Raises OSError."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self

    def append(self, line: str) -> None:
        """Write `line` and its newline, or nothing. Raises RunError when the disk is full."""
        data = (line + "\n").encode()
        size_before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            with contextlib.suppress(
                OSError
            ):  # shrinking a file needs no space; if even that fails, resume repairs
                os.ftruncate(self._fd, size_before)
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def storage_error(path: Path, error: OSError) -> RunError:
    """What to tell the user when the run directory cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            f"no space left to write {path} (everything before it is on disk)",
            f"free space on that disk, then continue with `rollbook train --resume {_run_of(path)}`",
        )
    return RunError(
        f"cannot write {path}: {error.strerror or error}", "check the path, its permissions and the disk"
    )


def _run_of(path: Path) -> Path:
    return path.parent.parent if path.parent.name in ("trajectories", "checkpoints") else path.parent


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds, else vanishes."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise storage_error(path, error) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file that may still be written to: a line cut short or damaged is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


_held_locks: set[int] = set()
_fork_hook_set = False


def _drop_locks_in_forked_child() -> None:
    # A forked worker that outlives its parent must not keep the directory locked.
    for lock_fd in _held_locks:
        os.close(lock_fd)
    _held_locks.clear()


class RunDir:
    """One run's folder, held by this process until `close`.

    `claim` only takes the lock: until `begin`, no file of the run is made or changed, and `abandon` leaves the disk as
    `claim` found it.
    """

    def __init__(self, path: Path, lock_fd: int, made: list[Path]) -> None:
        self.path = path
        self.repaired: dict[str, str] = {}
        """File name -> the fragment of a line that a killed process left there."""
        self.metrics = AppendFile(path / METRICS)
        self.events = AppendFile(path / EVENTS)
        self.tokens = AppendFile(path / TOKENS)
        self._lock_fd = lock_fd
        self._made = made

    @classmethod
    def open(cls, path: Path, *, resume: bool = False) -> RunDir:
        """`claim` and `begin` at once."""
        run_dir = cls.claim(path, resume=resume)
        try:
            run_dir.begin()
        except BaseException:
            run_dir.close()
            raise
        return run_dir

    @classmethod
    def claim(cls, path: Path, *, resume: bool = False) -> RunDir:
        """Take `path` for a new run, or with `resume` the run that is there.

        Raises:
            RunError: another process holds it; or it already holds finished steps or a checkpoint and
                `resume` is False; or there is none and `resume` is True; or it cannot be written.
        """
        path = Path(path)
        if resume and not path.is_dir():
            raise RunError(
                f"there is no run directory {path} to resume", "check the path, or start without --resume"
            )
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file, not a run directory", "choose another run directory")
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        made = [*([] if (path / LOCK).exists() else [path / LOCK]), *made]
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_fd = _lock(path)
        except OSError as error:
            _remove(made)
            raise _cannot_take(path, error) from error
        try:
            metrics = path / METRICS
            holds_run = (metrics.exists() and metrics.stat().st_size) or any(path.glob("checkpoints/step_*"))
            if holds_run and not resume:
                raise RunError(
                    f"run directory {path} already holds a run ({last_step_line(path)})",
                    f"continue it with `rollbook train --resume {path}`, or choose another run directory",
                )
            return cls(path, lock_fd, made)
        except OSError as error:
            _unlock(lock_fd)
            _remove(made)
            raise storage_error(path, error) from error
        except BaseException:
            _unlock(lock_fd)
            _remove(made)
            raise

    def begin(self) -> None:
        """Repair what a killed process left, and open the files to write. Raises RunError."""
        try:
            for file in (self.metrics, self.events, self.tokens):
                fragment = repair_last_line(file.path)
                if fragment:
                    self.repaired[file.path.name] = fragment
            for folder in ("trajectories", "checkpoints"):
                (self.path / folder).mkdir(exist_ok=True)
            for file in (self.metrics, self.events, self.tokens):
                file.open()
        except OSError as error:
            raise storage_error(self.path, error) from error
        self._made = []

    def abandon(self) -> None:
        """Release a directory in which nothing began, without a trace."""
        made, self._made = self._made, []
        self.close()
        _remove(made)

    def write_config(self, toml: str) -> None:
        """Write the resolved config; a different one of an earlier start is kept as `config.N.toml`."""
        path = self.path / CONFIG
        if path.exists():
            if path.read_text() == toml:
                return
            earlier = len(list(self.path.glob("config.*.toml"))) + 1
            path.rename(self.path / f"config.{earlier}.toml")
        with written_aside(path) as aside:
            aside.write_text(toml)

    def write_plan(self, plan: object) -> None:
        """Write the ledger's expectation and the derivation record; `plan` holds JSON values only."""
        with written_aside(self.path / PLAN) as aside:
            aside.write_text(json.dumps(plan, indent=1) + "\n")

    def trajectories_path(self, step: int) -> Path:
        return self.path / "trajectories" / f"step_{step}.parquet"

    def close(self) -> None:
        for file in (self.metrics, self.events, self.tokens):
            file.close()
        if self._lock_fd >= 0:
            _unlock(self._lock_fd)
            self._lock_fd = -1


def _lock(path: Path) -> int:
    lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock_fd, 4096).decode(errors="replace").strip() or "an unknown process"
        os.close(lock_fd)
        raise RunError(
            f"run directory {path} is in use by {holder}",
            "wait for that run or stop it, or choose another run directory",
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
    global _fork_hook_set
    if not _fork_hook_set:
        os.register_at_fork(after_in_child=_drop_locks_in_forked_child)
        _fork_hook_set = True
    _held_locks.add(lock_fd)
    return lock_fd


def _remove(made: list[Path]) -> None:
    """Take away what `claim` made, as far as nobody put anything into it since."""
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _cannot_take(path: Path, error: OSError) -> RunError:
    """The nearest folder that exists is what stands in the way, not the file that would have lain below it."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and not (
        there == path and os.access(path, os.W_OK | os.X_OK)
    ):
        owner = f"it belongs to user id {there.stat().st_uid}, this process runs as {os.geteuid()}"
        reason = "it is on a read-only file system" if error.errno == errno.EROFS else owner
        return RunError(
            f"run directory {path} cannot be {'written' if there == path else 'made'}: no permission to write into "
            f"{there} ({reason})",
            "choose a folder of yours with run.dir, or change that folder's permissions",
        )
    if error.errno == errno.ENOTDIR or not there.is_dir():
        return RunError(
            f"run directory {path} cannot be made: {there} is a file, not a folder", "choose another run.dir"
        )
    if not path.exists():
        return RunError(
            f"run directory {path} cannot be made in {there}: {error.strerror or error}",
            "choose another folder with run.dir",
        )
    return storage_error(path / LOCK, error)


def _unlock(lock_fd: int) -> None:
    if lock_fd in _held_locks:  # not in a forked child, which never held it
        _held_locks.discard(lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
        os.close(lock_fd)


def is_in_use(path: Path) -> str | None:
    """Who writes to the run directory now ("process 12 on host a"), or None."""
    try:
        lock_fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(lock_fd, 4096).decode(errors="replace").strip() or "an unknown process"
    finally:
        os.close(lock_fd)
    return None


def repair_last_line(path: Path) -> str:
    """End a JSON-lines file with a whole line; returns the fragment that was cut off, or "".

    A last line that only misses its newline gets it; a line cut short is removed from the file.
    """
    if not path.exists() or not path.stat().st_size:
        return ""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        tail = b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65_536)
            file.seek(start)
            tail = file.read(end - start)
        fragment = tail.rpartition(b"\n")[2]
        if not fragment:
            return ""
        try:
            json.loads(fragment)
        except ValueError:
            file.truncate(end - len(fragment))
            return fragment.decode(errors="replace")
        file.seek(end)
        file.write(b"\n")
        return ""


def last_step_line(path: Path) -> str:
    """How far a run came, in words."""
    last = None
    for line in read_json_lines(path / METRICS):
        last = line.get("step", last)
    return "no step finished" if last is None else f"last finished step {last}"
