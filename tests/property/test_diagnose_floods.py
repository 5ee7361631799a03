"""A flood of one message costs one look: lines known by their shape are told as if each had been looked at."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from rollbook.diagnose.readers.endings import EndWatcher
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import TroubleWatcher
from rollbook.diagnose.series import Event

MESSAGES = (
    "WARNING 03:11:{} Error when executing tool: Connection refused to http://sandbox:80{}/run, retry 3",
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host sandbox:{} [{}]",
    "ray.exceptions.RayTaskError(ActorDiedError): pid={} {}",
    "sandbox {} unreachable after {} s",
    "run_code ended with exit code 13{} after {} s",
    "exit code {}, attempt {}",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.{} GiB",
    "in update_weights, line {} of {}",
    "(raylet) Spilled {} MiB, {} objects",
    "Resuming from step {} of {}",
    "EngineCore_{} died, replica {} goes on",
    "Traceback (most recent call last)",
    "Training finished after {} steps, {} s",
)
STEP = st.just(None)
LINE = st.tuples(st.integers(0, len(MESSAGES) - 1), st.integers(0, 200), st.integers(0, 9))


def _alone(items: list[tuple[int, int, int] | None]) -> Iterator[Event | None]:
    trouble, ending, step = TroubleWatcher(), EndWatcher(), 0
    for item in items:
        if item is None:
            step += 1
            yield ending.step(step)
        else:
            line = MESSAGES[item[0]].format(*item[1:])
            ending.watch(line)
            yield trouble.watch(line, step)
    yield ending.event(step)


def _together(items: list[tuple[int, int, int] | None]) -> Iterator[Event | None]:
    watcher, step = LineWatcher(), 0
    for item in items:
        if item is None:
            step += 1
            yield watcher.ending.step(step)
        else:
            yield watcher.watch(MESSAGES[item[0]].format(*item[1:]), step)
    yield watcher.ending.event(step)


@given(st.lists(st.one_of(LINE, LINE, LINE, STEP), max_size=60))
def test_lines_known_by_their_shape_tell_what_they_told(items: list[tuple[int, int, int] | None]) -> None:
    assert list(_together(items)) == list(_alone(items))


def test_a_flood_is_looked_at_once() -> None:
    watcher, looked_at = LineWatcher(), []
    look = watcher.trouble.watch
    watcher.trouble.watch = lambda line, step: looked_at.append(line) or look(line, step)  # type: ignore
    for i in range(1000):
        watcher.watch(MESSAGES[0].format(i, i), 3)
        watcher.watch(MESSAGES[1].format(i, i), 3)
    assert len(looked_at) <= 2 * 3 * 3  # numbers of one to three digits


def test_what_was_reserved_and_not_used_is_kept_of_an_error_however_long() -> None:
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.12 GiB. GPU 0 has a total capacity of 79.19 "
        "GiB of which 2.11 GiB is free. Including non-PyTorch memory, this process has 76.96 GiB memory in use. Of the "
        "allocated memory 43.48 GiB is allocated by PyTorch, with 241.21 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and 30.59 GiB is reserved by PyTorch but unallocated."
    )
    event = LineWatcher().watch(said, 3)
    assert event is not None and event.kind == "out_of_memory"
    assert event.text.endswith("30.59 GiB is reserved by PyTorch but unallocated.")
