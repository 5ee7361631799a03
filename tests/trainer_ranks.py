"""Work on several ranks: fresh processes of this machine that meet in a gloo group, with a deadline."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from fresh_process import start_process

Work = Callable[..., Any]
"""(ranks, *args) -> anything that pickles. A function of a module, so that a fresh process finds it."""


def on_ranks(folder: Path, num_ranks: int, work: Work, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """What `work` returned on each rank.

    A collective that waits longer than `timeout_s` is an error there; a process that does is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        start_process(_rank, rank, num_ranks, folder, timeout_s, work, args, log=folder / f"rank_{rank}.log")
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.join(timeout_s + 30)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    logs = "\n".join((folder / f"rank_{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
    assert not late, f"ranks {late} hang\n{logs}"
    assert all(process.exitcode == 0 for process in processes), logs
    return [pickle.loads((folder / f"answer_{rank}").read_bytes()) for rank in range(num_ranks)]


def _rank(
    rank: int, num_ranks: int, folder: Path, timeout_s: float, work: Work, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from rollbook.trainer.parallel import Ranks

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    answer = work(Ranks(dist.group.WORLD), *args)
    (folder / f"answer_{rank}").write_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
