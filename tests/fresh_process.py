"""Runs in processes of their own, forked from a server that holds the imports but has run nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.errors import RunError

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["rollbook.controller.build", "rollbook.controller.entry", "pyarrow.parquet", "pytest"]
)


def in_fresh_process(work: Callable[..., object], *args: Any, log: Path, timeout_s: float = 240.0) -> int:
    """Run `work(*args)` in a new process that writes stdout and stderr to `log`; returns its exit code as a shell
    sees it: 0, 2 for a RunError, 130 for Ctrl-C, -9 when it was killed."""
    process = start_process(work, *args, log=log)
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout_s:g} s:\n{log.read_text()}")
    assert process.exitcode is not None
    return process.exitcode


def start_process(work: Callable[..., object], *args: Any, log: Path) -> Any:
    """The same, without waiting."""
    process = _context.Process(target=_child, args=(work, args, log), daemon=True)
    process.start()
    return process


def _child(work: Callable[..., object], args: tuple[Any, ...], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with contextlib.suppress(BrokenPipeError):
        try:
            work(*args)
        except RunError as error:  # as the command line ends it
            print(f"error: {error.what}\nhint: {error.remedy}", file=sys.stderr, flush=True)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            sys.exit(130)
