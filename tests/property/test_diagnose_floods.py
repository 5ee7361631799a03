"""A flood of one message costs one look: lines known by their shape are told as if each had been looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.diagnose.readers import verl_console
from rollbook.diagnose.readers.endings import EndWatcher
from rollbook.diagnose.readers.floods import Floods
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import plain
from rollbook.diagnose.readers.trouble import TroubleWatcher
from rollbook.diagnose.series import Event, Row

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
    "Traceback (most recent call last):",
    '  File "/opt/app/tool_{}.py", line {}, in call',
    '  File "<string>", line {}, in solve_{}',
    "    self.generate_sequences(batch_{}, {})",
    "ValueError: {} of {} answers",
    "ray.exceptions.RayTaskError(ValueError): pid={}, actor_id={}",
    "The above exception was the direct cause of the following exception: {} {}",
    "Exception ignored in: <function {} {}>",
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


def _read(path: Path, monkeypatch: pytest.MonkeyPatch, *, as_flood: bool) -> list[Row | Event]:
    with monkeypatch.context() as patch:
        patch.setattr(Floods, "holds", lambda self, block: as_flood)
        return list(verl_console.read(path))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.one_of(LINE, LINE, LINE, LINE, STEP), max_size=80), times=st.integers(1, 30))
def test_a_log_tells_the_same_whether_its_lines_are_known_as_bytes_or_not(
    items: list[tuple[int, int, int] | None],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`times` over, with a step after each; more than two hundred events of one kind in one step are left out."""
    text, step = "", 0
    for item in [*items * times, None]:
        step += item is None
        said = (
            f"step:{step} - critic/rewards/mean:0.5" if item is None else MESSAGES[item[0]].format(*item[1:])
        )
        text += f"\x1b[36m(WorkerDict pid={81 + len(text) % 7})\x1b[0m {said}\n"
    (tmp_path / "run.log").write_text(text)
    plainly, as_flood = (_read(tmp_path / "run.log", monkeypatch, as_flood=how) for how in (False, True))
    assert as_flood == plainly


def test_of_a_flood_of_tracebacks_few_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand, each of another process, of objects at other places, and chained; the run goes on."""
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/opt/app/tools.py", line 412, in call\n'
        "    raise value.as_instanceof_cause()\n"
        "ray.exceptions.RayTaskError(KeyError): ray::Worker (pid={}, actor_id={:032x}, <object at 0x{:012x}>)\n"
        "The above exception was the direct cause of the following exception:\n"
        "aiohttp.ClientConnectorError: Cannot connect to host sandbox-{}:8080 [Connect call failed]\n"
    )
    flood = "".join(traceback.format(1000 + i, i * 7919**7, i * 7919, i % 90) for i in range(2000))
    steps = [f"step:{i} - critic/rewards/mean:0.5\n" for i in range(9)]
    (tmp_path / "run.log").write_text(steps[0] + flood + "".join(steps[1:]))
    read: list[str] = []

    def counting(raw: str) -> str:
        read.append(raw)
        return plain(raw)

    monkeypatch.setattr(verl_console, "plain", counting)
    assert [item.step for item in verl_console.read(tmp_path / "run.log") if isinstance(item, Row)] == [
        *range(9)
    ]
    assert len(read) <= 300
