"""What the lines of a log that are no step tell: trouble, how it ends, and the errors that it repeats."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollbook.diagnose.readers.endings import TRACEBACK, EndWatcher, Says, passes_on, shape_of
from rollbook.diagnose.readers.text import plain
from rollbook.diagnose.readers.trouble import MAX_CONTEXT, TroubleWatcher
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


@dataclass(frozen=True, slots=True)
class _Told:
    """What lines of one shape tell."""

    says: Says
    kind: str
    """Of its event, empty for none."""
    stage: str
    complaint: _Complaint | None
    """What counts such lines."""
    passes_on: bool
    is_whole: bool
    """Whether its shape tells all of it, in any place of a log."""


class LineWatcher:
    """Both watchers over the lines of a console log that are no step. Lines are known again by their shape, whatever
    their numbers: a dead service writes one error a million times. It is the `Listener` of such floods."""

    def __init__(self, *, sees_all: bool = False) -> None:
        self.trouble, self.ending = TroubleWatcher(), EndWatcher(sees_all=sees_all)
        self.told: _Told | None = None
        """What the newest line tells whenever it comes again."""
        self._num_events: Counter[tuple[str, int | None]] = Counter()
        self._known: dict[str | bytes, _Told] = {}
        """By the shape of a line, or itself where its numbers tell."""
        self._complaints: dict[bytes, _Complaint] = {}
        self._step: int | None = None
        self._full: set[str] = set()
        """Kinds of which no more events are wanted in this step."""
        self._words = b""
        """The error that stands, of lines that came again since others did."""
        self._stages: deque[str] = deque(maxlen=MAX_CONTEXT)

    def watch(self, line: str, step: int | None) -> Event | None:
        """An event when `line` (already plain) reports trouble; `step` is the newest step logged so far."""
        shape = shape_of(line)
        told = self._known.get(shape) or self._known.get(line)
        if told is None or not self.ending.is_calm:
            told, event = self._watch_anew(line, shape, step)
        else:
            event = self._watch_again(told, line, step)
        self.told = told if told is not None and told.is_whole and step is not None else None
        if step != self._step:
            self._step = step
            self._full.clear()
        return event if event is not None and self._is_one_more(event.kind, step) else None

    def _watch_again(self, told: _Told, line: str, step: int | None) -> Event | None:
        self.trouble.remember(told.stage)
        if told.complaint is not None:
            told.complaint.num += 1
        if self.ending.again(told.says, passes_on=told.passes_on):
            self.ending.stands(line)
        return self.trouble.event(told.kind, line, step) if told.kind else None

    def _watch_anew(self, line: str, shape: bytes, step: int | None) -> tuple[_Told | None, Event | None]:
        complaint = self._complaint(line, shape, step)
        says = self.ending.watch(line)
        event = self.trouble.watch(line, step)
        if says is None:
            return None, event
        numbers_tell = any(map(line.__contains__, _NUMBERS_TELL))
        told = _Told(
            says,
            event.kind if event is not None else "",
            self.trouble.newest_stage,
            complaint,
            passes_on(line.strip()[:300]),
            not numbers_tell and "program's frame" not in says,
        )
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        self._known[line if numbers_tell else shape] = told
        return told, event

    # -- as the listener of floods

    def begin(self) -> None:
        if self.told is None:  # the line before was a step, perhaps
            self._full.clear()
        self.told = None

    @property
    def is_calm(self) -> bool:
        return self.ending.is_calm

    def again(self, told: object, raw: bytes) -> bool:
        assert isinstance(told, _Told)
        if told.kind and told.kind not in self._full:
            return False
        if told.complaint is not None:
            told.complaint.num += 1
        if told.says and self.ending.again(told.says, passes_on=told.passes_on):
            self._words = raw
        self._stages.append(told.stage)
        return True

    def settle(self) -> None:
        if self._words:
            self.ending.stands(plain(self._words.decode("utf-8", errors="replace")))
            self._words = b""
        for stage in self._stages:
            self.trouble.remember(stage)
        self._stages.clear()

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

    def _complaint(self, line: str, shape: bytes, step: int | None) -> _Complaint | None:
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
        if self._num_events[kind, step] >= MAX_EVENTS:
            self._full.add(kind)
        return self._num_events[kind, step] <= MAX_EVENTS
