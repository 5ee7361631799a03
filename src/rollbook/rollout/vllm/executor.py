"""vLLM's executors, in a process group of their own that ends with the run.

A terminal, `timeout` and most schedulers signal the whole process group of a run. vLLM's engine process would take
Ctrl-C for its own end and drop every request, in the very step that the run wants to finish: the run ends its engines
itself. If it cannot, because it was killed, the group must not stay behind with the device's memory. The executor is
the first of ours that runs inside that process, before any worker is started; workers inherit the group.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

POLL_S = 1.0


def _stand_apart() -> None:
    parent = os.getppid()
    os.setpgid(0, 0)

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, name="follows the run", daemon=True).start()


class _Apart:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _stand_apart()
        super().__init__(*args, **kwargs)


class ApartUniProcExecutor(_Apart, UniProcExecutor):  # type: ignore[misc, unused-ignore]
    pass


class ApartMultiprocExecutor(_Apart, MultiprocExecutor):  # type: ignore[misc, unused-ignore]
    pass


APART: dict[type[Any], type[Any]] = {
    UniProcExecutor: ApartUniProcExecutor,
    MultiprocExecutor: ApartMultiprocExecutor,
}
"""By the executor that vLLM would take."""
