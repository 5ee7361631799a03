"""Host memory of a process and of all that it started, as Linux counts it; nothing on other systems.

Pages that several of them map (a forked child's, a library's, a shared buffer's) count once: of every process
the memory of its own, and of the one that shares most what it shares.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def tree_bytes(pid: int | None = None, *, proc: Path = PROC) -> int | None:
    """Resident bytes of the process (None: this one) and its descendants; None where the system does not say.

    A process that ends while it is looked at is left out.
    """
    own, shared, is_known = 0, 0, False
    for member in _tree(os.getpid() if pid is None else pid, proc):
        try:
            _, resident, mapped, *_ = (proc / str(member) / "statm").read_text().split()
        except (OSError, ValueError):
            continue
        own += int(resident) - int(mapped)
        shared = max(shared, int(mapped))
        is_known = True
    return (own + shared) * os.sysconf("SC_PAGE_SIZE") if is_known else None


def _tree(pid: int, proc: Path) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    tree = [pid]
    for member in tree:
        tree += children.get(member, ())
    return tree
