"""vLLM's executors in a process group of their own: Ctrl-C is for the run, which ends its engines itself.

A terminal, `timeout` and most schedulers signal the whole process group of a run. vLLM's engine process would take
that for its own end and drop every request, in the very step that the run wants to finish. The executor is the first
of ours that runs inside that process, before any worker is started; workers inherit the group.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class ApartUniProcExecutor(UniProcExecutor):  # type: ignore[misc, unused-ignore]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.setpgid(0, 0)
        super().__init__(*args, **kwargs)


class ApartMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc, unused-ignore]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.setpgid(0, 0)
        super().__init__(*args, **kwargs)


APART: dict[type[Any], type[Any]] = {
    UniProcExecutor: ApartUniProcExecutor,
    MultiprocExecutor: ApartMultiprocExecutor,
}
"""By the executor that vLLM would take."""
