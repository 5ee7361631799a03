"""Whatever ends a driver, no process that it started for its scorers outlives it (BR-110), nor what these started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NUM_WORKERS = 3
WITHIN_S = 60.0
"""Far below the 600 s for which a worker would hang, far above what a busy host takes to end one."""

DRIVER = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
import numpy as np
from rollbook.envs.config import RewardConfig
from rollbook.envs.rewards.scorer import Scorer
from rollbook.types import Prompt

async def main():
    term = {"function": "held:hold", "isolation": "process", "options": {"fifo": sys.argv[1]}, "is_tested": False}
    scorer = Scorer(RewardConfig.model_validate(
        {"terms": [term], "num_workers": int(sys.argv[3]), "deadline_s": 600, "start_deadline_s": 120}))
    prompt = Prompt(prompt_id="p", prompt_ids=np.array([1], np.int32), source="s", task={})
    try:
        await scorer.start()
        calls = [asyncio.ensure_future(scorer.score("r", prompt)) for _ in range(int(sys.argv[3]))]
        if sys.argv[2] == "exception":
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            raise RuntimeError("a step failed")
        await asyncio.gather(*calls)
    finally:
        await scorer.close()

asyncio.run(main())
"""

HELD = """
import os, subprocess

def hold(response, task, *, fifo):
    held = os.open(fifo, os.O_WRONLY)  # open for as long as this process lives, or its child
    os.write(held, b"%d\\n" % os.getpid())
    subprocess.run(["sleep", "600"], pass_fds=(held,))
"""


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL", "exception"])
def test_br110_no_scorer_process_outlives_its_driver(end: str, tmp_path: Path) -> None:
    """Every worker waits for a child, and both hold a pipe open: the pipe ends when the last of them is gone."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "held.py").write_text(HELD)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(fifo), end, str(NUM_WORKERS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    reader = os.open(fifo, os.O_RDONLY)
    pids: list[int] = []
    while len(pids) < NUM_WORKERS:
        pids += [int(word) for word in os.read(reader, 4096).split()]
    assert len(set(pids)) == NUM_WORKERS
    assert driver.stdin is not None
    if end == "exception":
        driver.stdin.write(b"now\n")
        driver.stdin.flush()
    else:
        driver.send_signal(signal.Signals[end])
    readable, _, _ = select.select([reader], [], [], WITHIN_S)
    left = [] if readable and os.read(reader, 1) == b"" else pids
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # each has a session of its own
    driver.stdin.close()
    driver.wait()
    os.close(reader)
    assert left == []
