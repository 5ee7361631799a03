"""The thread on which weights are exported: in order, and no longer than its owner."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import CancelledError

import pytest

from rollbook.sync.export_thread import ExportThread


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "export"}


def test_calls_are_made_in_order_on_one_thread() -> None:
    export, made = ExportThread(), list[tuple[int, int]]()
    for number in range(5):
        export.submit(lambda number=number: made.append((number, threading.get_ident())))  # type: ignore[misc]
    export.submit(lambda: None).result(60.0)
    assert export.close(60.0)
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({ident for _, ident in made}) == 1


def test_a_call_that_fails_is_told_and_the_next_one_is_made() -> None:
    export = ExportThread()
    failed, made = export.submit(lambda: 1 // 0), export.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        failed.result(60.0)
    assert made.result(60.0) == 7
    assert export.close(60.0)


def test_what_was_not_begun_when_it_is_closed_is_not_made() -> None:
    export, goes_on, begun = ExportThread(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        goes_on.wait(60.0)

    export.submit(first)
    waiting = export.submit(lambda: 7)
    assert begun.wait(60.0)
    assert not export.close(0.01), "the first one is under way"
    goes_on.set()
    with pytest.raises(CancelledError):
        waiting.result(60.0)


def test_a_thread_whose_owner_is_forgotten_ends() -> None:
    before = _threads()
    export = ExportThread()
    assert export.submit(lambda: 7).result(60.0) == 7
    (thread,) = _threads() - before
    del export
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()
