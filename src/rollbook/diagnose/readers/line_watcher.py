"""What the lines of a log that are no step tell: trouble, how it ends, and the errors that it repeats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollbook.diagnose.readers.endings import TRACEBACK, EndWatcher, Says, shape_of
from rollbook.diagnose.readers.text import TroubleWatcher, plain
from rollbook.diagnose.series import COMPLAINT, Event

_OF_ERRORS = re.compile(
    r"(?:.*[/_.])?(?:error|exception|traceback|exc(?:_info|_text)?|stack_?trace|err)(?:_?(?:msg|message|text|str))?",
    re.IGNORECASE,
)
"""Fields of an entry that hold an error's words."""
_LEVELS, _MESSAGES = ("level", "levelname", "severity"), ("message", "msg", "event", "text")
_GRAVE = frozenset({"error", "critical", "fatal"})
_NUMBERS_TELL = ("xit", "returncode")
"""Lines with these words say other things with other numbers."""
_COMPLAINS = ("Error", "ERROR", "Exception")
_COMPLAINT = re.compile(r"\bERROR\b|(?:^|[\s:(\]])(?:\w+\.)*[A-Z]\w+(?:Error|Exception)\b")
"""Logged as an error, or an error by its name; a text that only speaks of one has neither."""
MAX_LOOKED_AT = 300
COMPLAINT_HEAD = 60
"""Characters by which lines are alike, whatever their numbers: what comes after is of one call."""
MANY_COMPLAINTS = 5
MAX_COMPLAINTS = 1000
MAX_SHAPES = 20_000
MAX_EVENTS = 200
"""Of one kind in one step: more of them tell nothing more, and a flood would fill the memory."""


@dataclass(slots=True)
class _Complaint:
    """A line with an error that a log repeats."""

    example: str
    first_step: int | None
    num: int = 1


class LineWatcher:
    """Both watchers over the lines of a console log that are no step. Lines are known again by their shape, whatever
    their numbers: a dead service writes one error a million times."""

    def __init__(self, *, sees_all: bool = False) -> None:
        self.trouble, self.ending = TroubleWatcher(), EndWatcher(sees_all=sees_all)
        self._num_events: Counter[tuple[str, int | None]] = Counter()
        self._told: dict[str, tuple[Says, str, _Complaint | None]] = {}
        """Shape of a line in no stage (itself where its numbers tell) -> what it tells of the end, kind of its event
        (empty for none), what counts such lines."""

        self._complaints: dict[str, _Complaint] = {}

    def watch(self, line: str, step: int | None) -> Event | None:
        """An event when `line` (already plain) reports trouble; `step` is the newest step logged so far."""
        shape = shape_of(line)
        told = self._told.get(shape) or self._told.get(line)
        if told is None or self.ending.wants_next or self.ending.is_in_a_sample:
            return self._watch_anew(line, shape, step)
        says, kind, complaint = told
        self.trouble.remember("")
        if complaint is not None:
            complaint.num += 1
        if says == "error":
            self.ending.error(line.strip()[:300])
        elif says == "frame":
            self.ending.frame(line)
        elif says == "traceback":
            self.ending.traceback()
        return self.trouble.event(kind, line, step) if kind and self._is_one_more(kind, step) else None

    def _watch_anew(self, line: str, shape: str, step: int | None) -> Event | None:
        complaint = self._complaint(line, shape, step)
        says = self.ending.watch(line)
        event = self.trouble.watch(line, step)
        if says != "more" and not self.trouble.is_newest_of_a_stage:
            if len(self._told) >= MAX_SHAPES:
                self._told.clear()
            numbers_tell = any(map(line.__contains__, _NUMBERS_TELL))
            kind = event.kind if event is not None else ""
            self._told[line if numbers_tell else shape] = (says, kind, complaint)
        return event if event is not None and self._is_one_more(event.kind, step) else None

    def watch_fields(self, entry: Mapping[str, object], step: int | None) -> Iterator[Event]:
        """Events of what an entry of JSON says in its fields of errors: what stands there was raised."""
        is_error = any(str(entry.get(name)).lower() in _GRAVE for name in _LEVELS)
        for name, text in entry.items():
            if not isinstance(text, str) or not (
                _OF_ERRORS.fullmatch(name) or (is_error and name in _MESSAGES)
            ):
                continue
            self.ending.watch(TRACEBACK)
            for line in text.splitlines():
                if event := self.watch(plain(line), step):
                    yield event

    def end(self, step: int | None) -> Iterator[Event]:
        """What ended the run, and the errors that its log repeats."""
        if ended := self.ending.event(step):
            yield ended
        for told in self._complaints.values():
            if told.num >= MANY_COMPLAINTS:
                yield Event(kind=COMPLAINT, step=told.first_step, text=told.example, fields={"num": told.num})

    def _complaint(self, line: str, shape: str, step: int | None) -> _Complaint | None:
        """What is counted of lines like this one, if they complain; this one is counted."""
        if not any(map(line.__contains__, _COMPLAINS)) or not _COMPLAINT.search(line[:MAX_LOOKED_AT]):
            return None
        told = self._complaints.get(shape[:COMPLAINT_HEAD])
        if told is not None:
            told.num += 1
        elif len(self._complaints) < MAX_COMPLAINTS:
            told = self._complaints[shape[:COMPLAINT_HEAD]] = _Complaint(line.strip()[:300], step)
        return told

    def _is_one_more(self, kind: str, step: int | None) -> bool:
        """Whether an event of a kind is not one too many for its step."""
        self._num_events[kind, step] += 1
        return self._num_events[kind, step] <= MAX_EVENTS
