"""A run that ends in an error leaves no thread that reads its weights, and says what it could not end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from rollbook.controller.loop import Controller
from rollbook.errors import DeadlineError
from tiny_run import RunResult, run_tiny


def test_an_export_that_hangs_ends_the_run_which_says_so(tmp_path: Path) -> None:
    release, read = threading.Event(), list[str]()

    def hang(controller: Controller) -> None:
        source = controller.publisher.source
        export = source.export_weights

        def stuck() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in export():
                if controller.weight_version == 1:
                    release.wait(60)
                read.append(name)
                yield name, tensor

        source.export_weights = stuck  # type: ignore[method-assign]

    deadlines = {"sync.export_deadline_s": 0.2, "sync.abort_deadline_s": 0.2}
    before = set(threading.enumerate())
    try:
        with pytest.raises(DeadlineError, match="did not export bucket 0 of version 2"):
            run_tiny(tmp_path, num_steps=3, faults=[hang], **deadlines)
        (finding,) = RunResult(tmp_path / "run").events_of("finding")
        assert finding["rule"] == "export_hangs" and "hangs" in finding["summary"]
    finally:
        num_read = len(read)
        release.set()
    exports = [t for t in threading.enumerate() if t.name == "export" and t not in before]
    for thread in exports:
        thread.join(60)
    assert not any(thread.is_alive() for thread in exports)
    assert len(read) == num_read + 1, "the tensor at which it hung, and no other"
