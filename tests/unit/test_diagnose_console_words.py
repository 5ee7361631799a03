"""What other processes say before, within and after a record of verl's console is heard; the record's values are not
searched for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.diagnose.readers import verl_console
from rollbook.diagnose.readers.trouble import TroubleWatcher
from rollbook.diagnose.series import Event, Row

VALUES = " - ".join(f"timing_s/part_{i}:np.float64({i}.5)" for i in range(80))
SAYS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    "line",
    [
        f"(vLLMWorker pid=9) {SAYS} step:3 - actor/loss:0.5 - {VALUES}",
        f"step:3 - actor/loss:0.5 - {SAYS} - {VALUES}",
        f"step:3 - actor/loss:0.5 {SAYS} - {VALUES}",
        f"step:3 - actor/loss:0.5 - {VALUES} - (vLLMWorker pid=9) {SAYS}",
        f"step:3 - actor/loss:0.5 - {VALUES}(vLLMWorker pid=9) {SAYS}",
        f"step:2 - actor/loss:0.4 - {VALUES} step:3 - actor/loss:0.5 - {VALUES} {SAYS}",
    ],
)
def test_words_of_others_are_heard(tmp_path: Path, line: str) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"step:1 - actor/loss:0.3 - {VALUES}\n{line}\nstep:4 - actor/loss:0.6 - {VALUES}\n")
    found = list(verl_console.read(log))
    assert [(e.kind, e.step) for e in found if isinstance(e, Event)] == [("out_of_memory", 3)]
    rows = [row for row in found if isinstance(row, Row)]
    assert rows[-2].step == 3 and rows[-2].data["actor/loss"] == 0.5
    assert rows[-2].data["timing_s/part_40"] == 40.5


def test_values_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []
    monkeypatch.setattr(TroubleWatcher, "watch", lambda self, line, step: watched.append(line))
    log = tmp_path / "run.log"
    log.write_text("".join(f"step:{n} - actor/loss:0.3 - {VALUES}\n" for n in range(1, 4)))
    assert len(list(verl_console.read(log))) == 3
    assert watched == ["step:1", "step:2", "step:3"]


@pytest.mark.parametrize("before", ["global_", "my/", "x"])
def test_a_key_that_ends_in_step_begins_no_record(tmp_path: Path, before: str) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"step:1 - a/b:1.0\nstep:2 - a/b:2.0 - {before}step:7 - c/d:3.0\n")
    assert [row.step for row in verl_console.read(log) if isinstance(row, Row)] == [1, 2]
