"""Which formats there are, which one a path or URL is, and the way from there to a `RunSeries`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.diagnose.readers import (
    areal,
    names,
    run_dir,
    slime,
    tensorboard,
    text,
    trl,
    verl_console,
    verl_file,
    wandb,
)
from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Event, Row, RunSeries
from rollbook.errors import DataError, nearest_name

HEAD_BYTES = 4 * 1024 * 1024
"""How much of a file is looked at to find its format: a log may begin with pages of start-up."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One format."""

    what: str
    read: Callable[[Path], Iterator[Row | Event]]
    names: tuple[dict[str, str], ...] = ()
    recognizes: Callable[[str], float] = lambda head: 0.0


READERS: dict[str, Reader] = {
    "rollbook": Reader("run directory of rollbook", run_dir.read),
    "verl-file": Reader("verl file logger (JSON lines)", verl_file.read, (names.VERL,), verl_file.recognizes),
    "verl-console": Reader("verl console log", verl_console.read, (names.VERL,), verl_console.recognizes),
    "tensorboard": Reader(
        "TensorBoard event files", tensorboard.read, (names.VERL, names.SLIME, names.AREAL, names.TRL)
    ),
    "trl": Reader("TRL trainer state, history or console log", trl.read, (names.TRL,), trl.recognizes),
    "slime": Reader("slime or miles console log", slime.read, (names.SLIME, names.VERL), slime.recognizes),
    "areal": Reader("AReaL console log", areal.read, (names.AREAL,), areal.recognizes),
    "wandb": Reader(
        "W&B export (CSV, JSON)",
        wandb.read,
        (names.VERL, names.SLIME, names.AREAL, names.TRL),
        wandb.recognizes,
    ),
}
"""Every file format. A Prometheus server (format "prometheus") is read from its URL."""


def load(
    where: str, *, format: str | None = None, run_idx: int | None = None, hours: float = 24.0
) -> RunSeries:
    """Read a run directory, a log file or folder, or a Prometheus server.

    Args:
        where: a path, or an http(s) URL of a Prometheus server.
        format: a key of `READERS` or "prometheus"; None finds out.
        run_idx: which run, when one log holds several; None is the last.
        hours: how far back to ask a Prometheus server.
    Raises:
        DataError: nothing there, an unknown format, or no step in it.
    """
    if where.startswith(("http://", "https://")) or format == "prometheus":
        from rollbook.diagnose.readers import prometheus

        rows = prometheus.read(where, hours=hours)
        return assemble(rows, source=where, format="prometheus", run_idx=run_idx)
    path = Path(where)
    if not path.exists():
        raise DataError(
            f"there is no {path}", "give a run directory, a log file or folder, or a Prometheus URL"
        )
    if format is not None and format not in READERS:
        raise DataError(f"unknown log format {format!r}", nearest_name(format, [*READERS, "prometheus"]))
    path, format = _locate(path, format)
    reader = READERS[format]
    renamer = names.Renamer((*reader.names, names.VERL))
    rows = renamer.rows(reader.read(path))
    run = assemble(rows, source=str(path), format=format, renamed=renamer.renamed, run_idx=run_idx)
    run.in_log = renamer.in_log()
    if any(event.kind == "truncated" for event in run.events):
        run.notes.append(
            "the last line is cut short (the process was killed, or is writing it): it was left out"
        )
    run.notes.extend(event.text for event in run.events if event.kind == "damaged")
    return run


def _locate(path: Path, format: str | None) -> tuple[Path, str]:
    """The file or folder to read and its format."""
    if path.is_dir():
        return _locate_in_folder(path, format)
    if format is not None:
        return path, format
    if path.name.startswith("events.out.tfevents"):
        return path, "tensorboard"
    beside = path.parent
    if path.name == "metrics.jsonl" and (beside / "events.jsonl").exists():
        return beside, "rollbook"
    return path, detect(path)


def _locate_in_folder(path: Path, format: str | None) -> tuple[Path, str]:
    if format in (None, "rollbook") and any(
        (path / name).exists() for name in ("metrics.jsonl", "events.jsonl")
    ):
        return path, "rollbook"
    if format in (None, "trl") and (state := trl.find(path)) is not None:
        return state, "trl"
    if format in (None, "tensorboard") and tensorboard.find(path):
        return path, "tensorboard"
    files = sorted(
        (
            p
            for p in path.rglob("*")
            if p.is_file() and p.suffix in (".jsonl", ".log", ".txt", ".csv", ".out", ".gz")
        ),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    for file in files[:20]:
        try:
            return file, format or detect(file)
        except DataError:
            continue
    raise DataError(
        f"{path} holds no log that is known",
        "give the log file itself; known are: " + "; ".join(f"{k} ({r.what})" for k, r in READERS.items()),
    )


def detect(path: Path) -> str:
    """The format of a log file, from its beginning. Raises DataError when none fits."""
    with text.open_binary(path) as file:
        head = file.read(HEAD_BYTES).decode("utf-8", errors="replace")
    if not head.strip():
        raise DataError(f"{path} is empty", "check that this is the log of a run that finished a step")
    head = "\n".join(text.plain(line) for line in head.splitlines())
    scores = {name: reader.recognizes(head) for name, reader in READERS.items()}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] <= 0.0:
        raise DataError(
            f"no step of a known log format in the first {min(len(head), HEAD_BYTES):,} characters of {path}",
            "name the format with --format: " + ", ".join(READERS),
        )
    return best
