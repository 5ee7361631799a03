"""Which formats there are, which one a path or URL is, and the way from there to a `RunSeries`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.diagnose.readers import (
    ages,
    areal,
    console,
    excerpt,
    names,
    nemo_rl,
    openrlhf,
    prime_rl,
    records,
    run_dir,
    slime,
    standstill,
    status_rows,
    tensorboard,
    text,
    trl,
    verl_console,
    verl_file,
    wandb,
)
from rollbook.diagnose.readers.assemble import WHEN_EMPTY, assemble
from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.endings import died_before_a_step, holds_an_error
from rollbook.diagnose.readers.renamer import Renamer
from rollbook.diagnose.series import Event, Row, RunSeries
from rollbook.errors import DataError, nearest_name
from rollbook.observe.run_dir import EVENTS, METRICS

HEAD_BYTES = 4 * 1024 * 1024
"""How much of a file is looked at to find its format: a log may begin with pages of start-up."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One format."""

    what: str
    read: Callable[[Path], Iterator[Row | Event]]
    names: tuple[dict[str, str], ...] = ()
    recognizes: Callable[[str], float] = lambda head: 0.0
    told_by: str = ""
    """What a file's beginning must hold."""
    is_anybodys: bool = False
    """Whether it reads what is nobody's format: it is asked last."""
    by_words: bool = False
    """Whether names that no table has are read by their words."""


_ALL_NAMES = (names.VERL, names.SLIME, names.AREAL, names.TRL, names.TINKER, names.SKYRL, names.TRL_PPO)

READERS: dict[str, Reader] = {
    "rollbook": Reader("run directory of rollbook", run_dir.read),
    "verl-file": Reader(
        "verl file logger (JSON lines)",
        verl_file.read,
        (names.VERL,),
        verl_file.recognizes,
        '{"step": N, "data": {...}}',
        by_words=True,
    ),
    "verl-console": Reader(
        "verl console log",
        verl_console.read,
        (names.VERL,),
        verl_console.recognizes,
        "step:N - name:value",
        by_words=True,
    ),
    "tensorboard": Reader("TensorBoard event files", tensorboard.read, _ALL_NAMES, by_words=True),
    "trl": Reader(
        "TRL trainer state, history or console log",
        trl.read,
        (names.TRL, names.TRL_PPO),
        trl.recognizes,
        "\"log_history\" or {'loss': ...",
        by_words=True,
    ),
    "slime": Reader(
        "slime or miles console log",
        slime.read,
        (names.SLIME, names.VERL),
        slime.recognizes,
        "rollout N: {...}",
        by_words=True,
    ),
    "prime-rl": Reader(
        "prime-rl console log of the orchestrator or the trainer",
        prime_rl.read,
        (),
        prime_rl.recognizes,
        "SUCCESS Step N | Time: ...",
    ),
    "openrlhf": Reader(
        "OpenRLHF console log",
        openrlhf.read,
        (openrlhf.NAMES,),
        openrlhf.recognizes,
        "Global step N: {'policy_loss': ...",
    ),
    "nemo-rl": Reader(
        "NeMo-RL console log", nemo_rl.read, (nemo_rl.NAMES,), nemo_rl.recognizes, "===== Step N/M ====="
    ),
    "areal": Reader(
        "AReaL console log",
        areal.read,
        (names.AREAL,),
        areal.recognizes,
        "Train step N/M done",
        by_words=True,
    ),
    "wandb": Reader(
        "W&B export (CSV, JSON)",
        wandb.read,
        _ALL_NAMES,
        wandb.recognizes,
        'a header or rows with "_step"',
        by_words=True,
    ),
    "records": Reader(
        "JSON, JSON lines or CSV of any trainer",
        records.read,
        _ALL_NAMES,
        records.recognizes,
        "records with a reward or a loss",
        is_anybodys=True,
        by_words=True,
    ),
    "console": Reader(
        "console log of any trainer, or a text that holds an error",
        console.read,
        _ALL_NAMES,
        console.recognizes,
        "names with numbers, a reward or a loss among them, or an error",
        is_anybodys=True,
        by_words=True,
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
    is_url = where.startswith(("http://", "https://"))
    if format == "prometheus" and not is_url:
        raise DataError(
            f"--format prometheus reads a server, and {where!r} is no URL",
            "give it as http://localhost:9090, say; to read a file leave --format out",
        )
    if is_url:
        return _load_from_a_server(where, run_idx, hours)
    path, notes = Path(where), []
    if not path.exists():
        raise DataError(
            f"there is no {path}", "give a run directory, a log file or folder, or a Prometheus URL"
        )
    if format is not None and format not in READERS:
        raise DataError(f"unknown log format {format!r}", nearest_name(format, [*READERS, "prometheus"]))
    found = places(path, format)
    if len(found) > 1:
        notes = [f"{path} holds {len(found)} logs: this is the newest"]
    if_empty = WHEN_EMPTY if format is None else _without_a_format(found[0][0])
    path, format = found[0]
    reader = READERS[format]
    renamer = Renamer((*reader.names, names.VERL), by_words=reader.by_words)
    run = assemble(
        status_rows.StatusRows().rows(renamer.rows(reader.read(path))),
        source=str(path),
        format=format,
        renamed=renamer.renamed,
        run_idx=run_idx,
        notes=notes,
        if_empty=if_empty,
    )
    run.in_log = renamer.in_log()
    ages.add(run)
    run.notes.extend(renamer.notes())
    if format in _CONSOLES and path.is_file():
        standing = standstill.at_the_end(path, _MARKS, int(run.steps[-1]))
        run.events.extend([standing] if standing is not None else [])
    run.notes.extend(_also_holds(path, format))
    run.notes.extend(excerpt.notes(run))
    if any(event.kind == "truncated" for event in run.events):
        run.notes.append(
            "the last line is cut short (the process was killed, or is writing it): it was left out"
        )
    run.notes.extend(event.text for event in run.events if event.kind in ("damaged", "note"))
    return run


def _load_from_a_server(url: str, run_idx: int | None, hours: float) -> RunSeries:
    from rollbook.diagnose.readers import prometheus

    return assemble(prometheus.read(url, hours=hours), source=url, format="prometheus", run_idx=run_idx)


def _without_a_format(path: Path) -> str:
    """What to do where a log holds no step in the format that was asked for."""
    try:
        (_, format), *_ = places(path)
    except DataError:
        return WHEN_EMPTY
    return f"it reads as {format}: leave --format out"


def places(path: Path, format: str | None = None) -> list[tuple[Path, str]]:
    """What there is to read at a path, (file or folder, format), newest first; a file is one, a folder may hold many.

    Raises:
        DataError: nothing of a known format.
    """
    if path.is_dir():
        return _in_folder(path, format)
    if format is not None:
        return [(path, format)]
    if path.name.startswith("events.out.tfevents"):
        return [(path, "tensorboard")]
    if path.name == "metrics.jsonl" and (path.parent / "events.jsonl").exists():
        return [(path.parent, "rollbook")]
    return [(path, detect(path))]


_LOG_SUFFIXES = (".jsonl", ".log", ".txt", ".csv", ".out", ".err", ".gz")
MAX_LOOKED_AT = 40
"""Files of a folder whose beginning is read, newest first."""


def _in_folder(path: Path, format: str | None) -> list[tuple[Path, str]]:
    if format in (None, "rollbook") and _is_run_dir(path):
        return [(path, "rollbook")]
    found: dict[Path, tuple[float, str]] = {}
    """Place -> (when it was written last, format)."""

    def add(place: Path, written: Path, its_format: str) -> None:
        if format in (None, its_format):
            at_s = written.stat().st_mtime
            found[place] = (max(at_s, found.get(place, (at_s, ""))[0]), its_format)

    if (state := trl.find(path)) is not None:
        add(state, state, "trl")
    for file in tensorboard.find(path):
        add(file.parent, file, "tensorboard")
    run_dirs = sorted({file.parent for file in path.rglob(EVENTS) if _is_run_dir(file.parent)})
    for run_dir_path in run_dirs:
        add(run_dir_path, max(run_dir_path.glob("*.jsonl"), key=lambda p: p.stat().st_mtime), "rollbook")
    for suffixes in (_LOG_SUFFIXES, (".json",)):  # documents are looked at where nothing else is a log
        files = [
            file
            for file in path.rglob("*")
            if file.suffix in suffixes and file.is_file() and not any(d in file.parents for d in run_dirs)
        ]
        files.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        for file in files[:MAX_LOOKED_AT]:
            try:
                add(file, file, detect(file, of_a_folder=True))
            except DataError:
                continue
        if found or (format is not None and files):
            break
    if not found and format is not None and files:
        return [(files[0], format)]
    if not found:
        raise DataError(
            f"{path} holds no log that is known",
            "give the log file itself; known are: "
            + "; ".join(f"{k} ({r.what})" for k, r in READERS.items()),
        )
    return [(place, found[place][1]) for place in sorted(found, key=lambda place: -found[place][0])]


def _is_run_dir(path: Path) -> bool:
    return (path / EVENTS).exists() or (path / METRICS).exists()


def detect(path: Path, *, of_a_folder: bool = False) -> str:
    """The format of a log file, from its beginning.

    Args:
        of_a_folder: whether the file was found in a folder, where a text that only quotes an error is no log.
    Raises:
        DataError: none fits.
    """
    with text.open_binary(path) as file:
        head = file.read(HEAD_BYTES).decode("utf-8", errors="replace")
    if not head.strip():
        raise DataError(f"{path} is empty", "check that this is the log of a run that finished a step")
    raw = head.splitlines()
    head = "\n".join(map(text.plain, raw))
    if (found := _recognized(head) or _recognized_further_in(path)) is not None:
        return found
    if (found := _anybodys(head, least=SURE if of_a_folder else 0.0)) is not None:
        return found
    if died_before_a_step(raw):
        return "verl-console"
    if not of_a_folder and holds_an_error(
        text.lines(path, (*text.TROUBLE_BYTES, *ENDING_BYTES)) if path.stat().st_size > HEAD_BYTES else raw
    ):
        return "console"
    if not of_a_folder and console.has_bars(head):
        return "console"
    looked_for = "; ".join(reader.told_by for reader in READERS.values() if reader.told_by)
    raise DataError(
        f"no step of a known log format in {path}: looked for {looked_for}",
        "give the log itself; of a run that died before its first step, name the format with --format: "
        + ", ".join(READERS),
    )


ALSO = 0.85
"""How surely a beginning must be another format's, too, to be spoken of: three steps of a console."""


_IN_LINES = ("verl-file", "verl-console", "slime", "areal", "trl")
"""Formats whose steps may stand in one file with another's."""


def _also_holds(path: Path, format: str) -> Iterator[str]:
    """A line for each other format that the beginning of a file holds steps of: one reader reads one of them."""
    if path.is_dir() or format not in _IN_LINES:
        return
    with text.open_binary(path) as file:
        head = "\n".join(
            map(text.plain, file.read(HEAD_BYTES).decode("utf-8", errors="replace").splitlines())
        )
    for other in _IN_LINES:
        if other != format and READERS[other].recognizes(head) >= ALSO:
            yield f"the file also holds steps as a {READERS[other].what} has them: --format {other} reads those"


def _recognized(head: str) -> str | None:
    """The format of a framework's own that fits best, None where none does."""
    scores = {name: reader.recognizes(head) for name, reader in READERS.items() if not reader.is_anybodys}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0.0 else None


SURE = 0.2
"""How surely a file of a folder must be a log in nobody's format: dumps of samples and bars of one lie beside it."""


def _anybodys(head: str, *, least: float) -> str | None:
    """The first format that is nobody's own and reads something in it: asked where no framework's is found anywhere,
    for start-up pages and sampled texts hold names with numbers, too."""
    for name, reader in READERS.items():
        if reader.is_anybodys and (score := reader.recognizes(head)) > 0.0:
            return name if score > least else None
    return None


_CONSOLES = ("verl-console", "trl", "slime", "prime-rl", "openrlhf", "nemo-rl", "areal", "console")
"""Formats in which anybody may write lines between those of the steps."""
_MARKS = (
    b"step:",
    b'"step"',
    b"Train step",
    b": {'",
    b"{'loss'",
    b"{'reward'",
    b"max_steps",
    b"SUCCESS Step",
    b"Global step ",
    b"Train epoch [",
    b"=== Step ",
    "• Loss".encode(),
)
"""Every line by which a format of many lines is told holds one of these."""
LINES_AT_ONCE = 1000


def _recognized_further_in(path: Path) -> str | None:
    """The same, of a log whose start-up takes more than its head: by its lines that may tell, all through."""
    if path.stat().st_size <= HEAD_BYTES:
        return None
    some: list[str] = []
    for line in text.lines(path, _MARKS):
        some.append(text.plain(line))
        if len(some) == LINES_AT_ONCE:
            if (found := _recognized("\n".join(some))) is not None:
                return found
            some.clear()
    return _recognized("\n".join(some))
