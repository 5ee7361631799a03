"""A console log that ends in one line said again and again: "60/64 groups ready, waiting", two hours long, and no step.

Whatever the wording: a line that speaks of waiting, whose numbers stand still until the log ends, and that has time
stamps or counts the seconds itself ("elapsed=1800s"). Or a progress bar that is drawn again and again at one number
short of its last, "1021/1024 [1:07:11<00:06, 13.20s/it]", or is drawn no more while others talk on. What of it is an
alarm, against the seconds of a step, is not decided here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from rollbook.diagnose.readers.bars import seconds_of
from rollbook.diagnose.readers.endings import is_proper_end
from rollbook.diagnose.readers.text import plain
from rollbook.diagnose.series import Event

KIND = "standstill"
TAIL_BYTES = 256 * 1024
LEAST_LINES = 5
"""Times that a line must be said by the clock; of one that counts the seconds itself two tell as much."""
LEAST_SHARE = 0.8
"""Of the seconds since the line was said first, that it went on: then the log ends with it."""
MOST_AFTER = 30
"""Lines after the newest one, where nothing has a stamp: then the log ends with it."""

_WAITS = re.compile(
    r"\b(?:wait(?:ing|s|ed)?|still|stuck|blocked|pending|poll(?:ing)?|retry(?:ing)?|idle|elapsed|hung|hang(?:s|ing)?"
    r"|not (?:yet )?(?:ready|enough|completed?|advanced|progressed|returned|finished|received|entered|arrived|answered"
    r"|responded)"
    r"|no (?:progress|response|answer)|no \w+ (?:\w+ )?(?:finished|received|completed|arrived|returned)"
    r"|not responding|unresponsive|stall(?:ed|ing)?|insufficient"
    r"|no (?:new |further |more )?(?:steps?|iterations?|updates?|heartbeats?|output) (?:for|in|since|within))\b",
    re.IGNORECASE,
)
_NO_STEP = re.compile(
    r"\bno (?:new |further |more )?(?:steps?|iterations?|updates?|progress)\b.{0,30}?"
    r"\b(?:for|in|since|within|after) +\d",
    re.IGNORECASE,
)
"""What a watch says of a run that stands: whatever else it measures may differ from line to line."""
_DATED = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?Z?")
_CLOCK = re.compile(r"(?<![\d:])(?<!elapsed[ =:])(\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(?![\d:<])")
_DATE_ONLY = re.compile(r"\b(?:\d{8}|\d\d[-/]\d\d)\b")
_COUNTS_ON = re.compile(
    r"(?:attempt|retry|retries|try|tries|poll|check|iteration)\s*[#:=]?\s*\d+(?:/\d+)?"
    r"|\b(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b"
    r"|\belapsed[=: ]+(?P<clock>\d[\d.:]*)",
    re.IGNORECASE,
)
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MEASURED = re.compile(
    r"\b\d+(?:\.\d+)? ?(?:W|MHz|°C)\b|\bpower[ =:]+\d+(?:\.\d+)?|\butil\w*[ =:]+\d+(?:\.\d+)? ?%",
    re.IGNORECASE,
)
"""What a device does while it waits, and is no movement."""
_COME = (
    r"(?:collected|received|gathered|accumulated|accepted|ready|finished|completed|arrived|done|have|has|got)"
)
_SHORT = re.compile(
    rf"\b{_COME}\b[ :=]{{1,3}}(?:\w+[ :=]{{1,2}})?(\d+) ?(?:/|of) ?(\d+)(?![\d./])"
    rf"|(?<![\d./])(\d+) ?(?:/|of) ?(\d+) (?:\w+ ){{0,3}}{_COME}\b",
    re.IGNORECASE,
)
"""How many have come of those that are wanted: short of them, it waits, whether it says so or not."""
_SPEAKER = re.compile(r"\[[^\[\]]*\brank ?\d+\]:?|^\W*rank[ _]?\d+\s*[:|]", re.IGNORECASE)
"""Which rank says a line: others say the same of the same wait."""
_MARKED_BY_RAY = re.compile(r"\s*\[repeated \d+x across cluster\]")
DAY_S = 86_400.0
_BAR = re.compile(r"^(.{0,80}?)\d+%\|[^|]*\| *(\d+)/(\d+) \[((?:\d+:)?\d+:\d\d)<")
"""What a bar is of, where it is, its last number, and the time since it was begun (tqdm)."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A line that speaks of waiting."""

    at_s: float | None
    """By its stamp."""
    words: str
    """Without its stamp, who says it, and what counts on."""
    counts_s: tuple[float, ...]
    """The seconds that it counts itself."""
    line: str
    num_after: int
    """Lines after it."""


def at_the_end(path: Path, step_marks: tuple[bytes, ...], step: int) -> Event | None:
    """The line that a log ends in, said since its last step; None where it ends otherwise, or says when nothing was.

    Args:
        step_marks: every line of a step holds one of these.
        step: the last one that was logged.
    """
    said: list[_Said] = []
    """Newest first."""
    newest_s: float | None = None
    at_s = since_bar_s = 0.0
    bars: list[str] = []
    for num_after, raw in enumerate(reversed(_last_lines(path))):
        if any(mark in raw for mark in step_marks):
            break
        line = _MARKED_BY_RAY.sub("", plain(raw.decode("utf-8", errors="replace"))).strip()
        if is_proper_end(line):
            return None
        if "%|" in line:
            if not bars and newest_s is not None and num_after >= LEAST_LINES:
                since_bar_s = newest_s - at_s
            bars.append(line)
            continue
        stamp, rest = _seconds(line), line
        if stamp is not None:
            rest = stamp[2]
            if newest_s is None:
                newest_s = at_s = stamp[0]
            at_s = stamp[0] if stamp[1] else at_s - (at_s - stamp[0]) % DAY_S
        if _WAITS.search(line) or _is_short(rest):
            words = _SPEAKER.sub("", _MEASURED.sub("", _COUNTS_ON.sub("", rest))).strip()
            counts_s = _counted(rest)
            words = _shape(words) if _NO_STEP.search(rest) else words
            said.append(_Said(None if stamp is None else at_s, words, counts_s, line, num_after))
    if (stands := _bar_stands(bars, step, since_bar_s)) is not None:
        return stands
    found = [
        told
        for words in dict.fromkeys(each.words for each in said)
        if (told := _stands(said, words, newest_s))
    ]
    if not found:
        return None
    line, fields = found[0]
    return Event(
        kind=KIND, step=step, text=line, fields={**fields, "beside": tuple(other for other, _ in found[1:])}
    )


def _stands(said: list[_Said], words: str, newest_s: float | None) -> tuple[str, dict[str, float]] | None:
    """The newest line with these words, how long it was said and how often; None if something moved since, or if too
    much came after it."""
    same: list[_Said] = []
    for each in said:
        if each.words == words:
            same.append(each)
        elif _shape(each.words) == _shape(words):
            break  # the same line with other numbers: until then something moved
    if not same:
        return None
    first, last = same[-1], same[0]
    counted_s = _counted_on(same)
    if newest_s is not None and first.at_s is not None and last.at_s is not None:
        by_clock_s = newest_s - first.at_s
        ends = last.at_s - first.at_s >= LEAST_SHARE * by_clock_s
    else:
        by_clock_s, ends = 0.0, last.num_after < MOST_AFTER + len(said)
    lasted_s = max(by_clock_s, counted_s)
    if not ends or (len(same) < LEAST_LINES and counted_s <= 0.0) or lasted_s <= 0.0:
        return None
    return last.line[:300], {"lasted_s": lasted_s, "count": len(same)}


def _counted(words: str) -> tuple[float, ...]:
    """The seconds that a line counts.

    >>> _counted("attempt 3, waited 5 min (elapsed=310s)")
    (300.0, 310.0)
    """
    found: list[float] = []
    for match in _COUNTS_ON.finditer(words):
        number, unit, clock = match["number"], match["unit"], match["clock"]
        if number is not None:
            unit = unit.lower()
            found.append(float(number) * _UNIT_S["ms" if unit == "ms" else unit[0]])
        elif clock is not None and ":" in clock:
            found.append(seconds_of(clock.rstrip(".:").partition(".")[0]))
        elif clock is not None and clock.rstrip(".").replace(".", "", 1).isdigit():
            found.append(float(clock.rstrip(".")))
    return tuple(found)


def _counted_on(same: list[_Said]) -> float:
    """Seconds that a count within a line has come to, or those since it was said first where it began long before; 0 of
    one that does not go on.

    Args:
        same: newest first.
    """
    lasted_s = 0.0
    for counts_s in zip(*(each.counts_s for each in same), strict=False):
        last_s, first_s = counts_s[0], counts_s[-1]
        if last_s > first_s and all(new >= old for new, old in pairwise(counts_s)):
            lasted_s = max(lasted_s, last_s if first_s <= last_s / 2 else last_s - first_s)
    return lasted_s


def _bar_stands(bars: list[str], step: int, since_s: float) -> Event | None:
    """The bar that was drawn last: since its number changed, or since it was drawn there first.

    Args:
        bars: lines with bars since the last step, newest first.
        since_s: seconds that others talked on after it.
    """
    drawn = [match for line in bars if (match := _BAR.search(line)) is not None]
    if not drawn or int(drawn[0][2]) >= int(drawn[0][3]):
        return None
    seconds = [seconds_of(bar[4]) for bar in drawn]
    first_s, count, moved = seconds[0], 0, False
    for bar, passed_s in zip(drawn, seconds, strict=True):
        if bar[1].strip()[-40:] != drawn[0][1].strip()[-40:] or bar[3] != drawn[0][3]:
            continue  # another bar
        if passed_s > first_s or bar[2] != drawn[0][2]:
            moved = passed_s < first_s  # or begun anew
            break
        first_s, count = passed_s, count + 1
    if count < 2 and not (moved and since_s > 0.0):
        return None
    fields = {"lasted_s": seconds[0] - first_s + since_s, "count": count}
    return Event(kind=KIND, step=step, text=bars[0][:300], fields=fields)


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


def _is_short(words: str) -> bool:
    """Whether a line counts fewer than are wanted.

    >>> _is_short("Collected 63/64 samples"), _is_short("64/64 groups ready"), _is_short("step 3/64")
    (True, False, False)
    """
    pairs = ((had or had_before, of or of_before) for had, of, had_before, of_before in _SHORT.findall(words))
    return any(int(had) < int(wanted) for had, wanted in pairs)


def _shape(words: str) -> str:
    return re.sub(r"\d+", "#", words)
