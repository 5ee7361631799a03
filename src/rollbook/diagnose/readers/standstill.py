"""A console log that ends in one line said again and again: "60/64 groups ready, waiting", two hours long, and no step.

Whatever the wording: a line that speaks of waiting, with time stamps of its own, whose numbers stand still until the
log ends. Or a progress bar that is drawn again and again at one number short of its last, and counts the seconds
itself: "1021/1024 [1:07:11<00:06, 13.20s/it]". What of it is an alarm, against the seconds of a step, is not decided
here.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from rollbook.diagnose.readers.bars import seconds_of
from rollbook.diagnose.readers.endings import is_proper_end
from rollbook.diagnose.readers.text import plain
from rollbook.diagnose.series import Event

KIND = "standstill"
TAIL_BYTES = 256 * 1024
LEAST_LINES = 5
"""Times that a line must be said."""
LEAST_SHARE = 0.8
"""Of the seconds since the line was said first, that it went on: then the log ends with it."""

_WAITS = re.compile(
    r"\b(?:[Ww]ait(?:ing|s|ed)?|[Ss]till|[Ss]tuck|[Bb]locked|[Pp]ending|[Pp]oll(?:ing)?|[Rr]etry(?:ing)?|[Ii]dle"
    r"|[Nn]ot (?:yet )?(?:ready|enough|complete)|[Nn]o progress|[Ss]tall(?:ed|ing)?|[Ii]nsufficient)\b"
)
_DATED = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?Z?")
_CLOCK = re.compile(r"(?<![\d:])(\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(?![\d:<])")
_DATE_ONLY = re.compile(r"\b\d\d[-/]\d\d\b")
_COUNTS_ON = re.compile(
    r"(?:attempt|retry|retries|try|tries|poll|check|iteration)\s*[#:=]?\s*\d+(?:/\d+)?"
    r"|\b\d+(?:\.\d+)?\s*(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b|\belapsed[=: ]+\d[\d.:]*",
    re.IGNORECASE,
)
_MARKED_BY_RAY = re.compile(r"\s*\[repeated \d+x across cluster\]")
DAY_S = 86_400.0
_BAR = re.compile(r"^(.{0,80}?)\d+%\|[^|]*\| *(\d+)/(\d+) \[((?:\d+:)?\d+:\d\d)<")
"""What a bar is of, where it is, its last number, and the time since it was begun (tqdm)."""


def at_the_end(path: Path, step_marks: tuple[bytes, ...], step: int) -> Event | None:
    """The line that a log ends in, said since its last step; None where it ends otherwise, or says when nothing was.

    Args:
        step_marks: every line of a step holds one of these.
        step: the last one that was logged.
    """
    said: list[tuple[float, str, str]] = []
    """(seconds, what is said without what counts on, the line as written), newest first."""
    newest_s: float | None = None
    at_s = 0.0
    bars: list[str] = []
    for raw in reversed(_last_lines(path)):
        if any(mark in raw for mark in step_marks):
            break
        line = plain(raw.decode("utf-8", errors="replace")).strip()
        if is_proper_end(line):
            return None
        if "%|" in line:
            bars.append(line)
            continue
        stamp = _seconds(line)
        if stamp is None:
            continue
        if newest_s is None:
            newest_s = at_s = stamp[0]
        at_s = stamp[0] if stamp[1] else at_s - (at_s - stamp[0]) % DAY_S
        if _WAITS.search(line):
            said.append((at_s, _COUNTS_ON.sub("", stamp[2]), line))
    if (stands := _bar_stands(bars, step)) is not None:
        return stands
    if newest_s is None or not said:
        return None
    words, since_s, count = said[0][1], said[0][0], 0
    for seconds, what, _ in said:
        if what == words:
            since_s, count = seconds, count + 1
        elif _shape(what) == _shape(words):
            break  # the same line with other numbers: until then something moved
    lasted_s = said[0][0] - since_s
    if count < LEAST_LINES or lasted_s < LEAST_SHARE * (newest_s - since_s):
        return None
    text = _MARKED_BY_RAY.sub("", said[0][2])[:300]
    return Event(kind=KIND, step=step, text=text, fields={"lasted_s": newest_s - since_s, "count": count})


def _bar_stands(bars: list[str], step: int) -> Event | None:
    """The bar that was drawn last, where it was drawn before at the same number: since the number changed, or since it
    was drawn there first.

    Args:
        bars: lines with bars since the last step, newest first.
    """
    drawn = [match for line in bars if (match := _BAR.search(_MARKED_BY_RAY.sub("", line))) is not None]
    if not drawn or int(drawn[0][2]) >= int(drawn[0][3]):
        return None
    seconds = [seconds_of(bar[4]) for bar in drawn]
    since_s, count = seconds[0], 0
    for bar, passed_s in zip(drawn, seconds, strict=True):
        if bar[1].strip()[-40:] != drawn[0][1].strip()[-40:] or bar[3] != drawn[0][3]:
            continue  # another bar
        if passed_s > since_s or bar[2] != drawn[0][2]:
            break  # begun anew, or it still moved
        since_s, count = passed_s, count + 1
    if count < 2:
        return None
    text = _MARKED_BY_RAY.sub("", bars[0])[:300]
    return Event(kind=KIND, step=step, text=text, fields={"lasted_s": seconds[0] - since_s, "count": count})


def _last_lines(path: Path) -> list[bytes]:
    """The lines of the last part of a log that is UTF-8 and not compressed; the first may be cut and is left out."""
    with path.open("rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff"):
            return []
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
    found = tail.splitlines()
    return found[1:] if size > TAIL_BYTES else found


def _seconds(line: str) -> tuple[float, bool, str] | None:
    """(seconds, whether with a date, the line without its stamp); None where it has no stamp."""
    if (match := _DATED.search(line)) is not None:
        try:
            at = datetime(*map(int, match.groups()))  # type: ignore[arg-type]
        except ValueError:
            return None
        rest = line[: match.start()] + line[match.end() :]
        return (at - datetime(1970, 1, 1)).total_seconds(), True, rest
    if (match := _CLOCK.search(line)) is None:
        return None
    hours, minutes, seconds = map(int, match.groups())
    rest = _DATE_ONLY.sub("", line[: match.start()] + line[match.end() :])
    return hours * 3600.0 + minutes * 60.0 + seconds, False, rest


def _shape(words: str) -> str:
    return re.sub(r"\d+", "#", words)
