"""Faults of the trainer: memory, lost state, batches that go over the disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rollbook.drill.fault import Site, wrap
from rollbook.observe.values import Peak, Total


def fragmentation(site: Site) -> None:
    """The allocator keeps a gibibyte more every step that nobody uses (simulated: this may run on a CPU)."""
    controller = site.controller

    def around(update: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            held = 24.0 + (site.age + 1.0 if site.is_on else 0.0)
            memory = {"perf/max_memory_allocated_gb": Peak(20.0), "perf/max_memory_reserved_gb": Peak(held)}
            controller.recorder.metrics(memory)
            return update(*args, **kwargs)

        return measured

    wrap(controller.trainer, "update", around)


def lost_state(site: Site) -> None:
    """The run is taken up again with the weights and the optimizer of its first step."""
    trainer = site.controller.trainer
    first = trainer.state_dict()["policy"]
    fresh: dict[str, Any] = _copied(first)

    def around(load: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, Any]], None]:
        def partial(state: Mapping[str, Any]) -> None:
            load({**state, "policy": fresh})

        return partial

    wrap(trainer, "load_state_dict", around)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def object_store_spill(site: Site) -> None:
    """Batches go over the disk on their way to the trainer, for as long again as a step usually takes."""
    controller = site.controller
    usual_s: list[float] = []
    began_s = [time.monotonic()]

    def around(make_batch: Callable[..., Any]) -> Callable[..., Any]:
        def spilled(sequences: Any, *args: Any, **kwargs: Any) -> Any:
            if len(sequences) == 1:  # a probe's
                return make_batch(sequences, *args, **kwargs)
            now_s = time.monotonic()
            if not site.is_on:
                usual_s.append(now_s - began_s[0])
                num_bytes = 0
            else:
                num_bytes = _over_the_disk(float(np.median(usual_s)))
            began_s[0] = time.monotonic()
            controller.recorder.metrics({"host/object_store_spilled_bytes": Total(num_bytes)})
            return make_batch(sequences, *args, **kwargs)

        return spilled

    wrap(controller.trainer, "make_batch", around)


def _over_the_disk(seconds: float) -> int:
    """Write blocks to a file and read them back for so long; the bytes that were written."""
    block = bytes(4 * 2**20)
    num_bytes, until_s = 0, time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until_s:
            file.seek(0)
            file.write(block)
            file.flush()
            file.seek(0)
            num_bytes += len(file.read())
    return num_bytes
