"""How a console log ends: as it should, in the middle of the work, or on words that only a dying process writes.

A process that is killed leaves no traceback: the kernel, Ray, NCCL or the shell write a line, and then nothing comes.
Such a line means the end only if no step follows; and words that the run got over before without a restart (a sandbox
that prints "Segmentation fault" for a model's program) mean nothing at the end either. The words: `ending_words.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from rollbook.diagnose.readers.ending_words import (
    AT_ITS_END,
    BARE_ERROR,
    BEGINS_ANEW,
    CAUSED,
    DEATHS,
    ERROR_LINE,
    FAILED,
    FATAL,
    FRAME,
    GUESSES,
    LOGGED,
    OF_A_GROUP,
    OF_A_JOB,
    OF_A_PROGRAM,
    OF_A_SHUTDOWN,
    OF_SURROUNDINGS,
    OTHER_ERROR,
    PASSED_ON,
    RANK,
    WORD,
)
from rollbook.diagnose.readers.floods import ANY_NUMBER
from rollbook.diagnose.readers.text import plain
from rollbook.diagnose.readers.trouble import is_got_over
from rollbook.diagnose.series import Event


def passes_on(text: str) -> bool:
    """Whether the words of an error pass on another one, or follow from it."""
    return PASSED_ON.search(text) is not None


def is_proper_end(line: str) -> bool:
    """Whether a line says that the run is over as it should be."""
    return AT_ITS_END.search(line) is not None


def _is_prose(line: str, *, least: float = 0.8) -> bool:
    """Whether a line is a sentence: four words and more, hardly anything else, no error's name before it.

    Args:
        least: share of what stands between blanks that must be words.
    """
    words = line.split()
    if line[:1].isspace() or line[:1] == "[" or len(words) < 4 or OF_A_PROGRAM.search(line):
        return False
    return sum(WORD.fullmatch(word) is not None for word in words) >= least * len(words)


def holds_an_error(told: Iterable[str]) -> bool:
    """Whether a text without a step holds an error that ends a job, however it got there: raised or logged, in lines
    of a program, not in a sentence that speaks of it.

    Args:
        told: its lines as written.
    """
    watcher = EndWatcher(sees_all=True)
    for raw in told:
        line = plain(raw)
        if watcher.wants_next or line != raw or not _is_prose(line, least=0.9):
            watcher.watch(line)
    return watcher.event(None) is not None


def died_before_a_step(head: list[str]) -> bool:
    """Whether a file without a step is the log of a job that died early, rather than a text that quotes an error: lines
    as a job writes them, an error among them, and no sentence of prose at either end.

    Args:
        head: its lines as written, with Ray's prefixes.
    """
    told = [line for line in head if line.strip()]
    watcher = EndWatcher()
    for line in told:
        watcher.watch(plain(line))
    is_prose = not told or _is_prose(told[0]) or _is_prose(told[-1])
    return not is_prose and watcher.event(0) is not None and any(map(OF_A_JOB.search, told))


def _holds(text: str, needles: tuple[str, ...], pattern: re.Pattern[str]) -> bool:
    """Whether a pattern is found, asked only where one of its words stands: a sandbox that is gone writes a million
    lines with "Error" in them."""
    return any(map(text.__contains__, needles)) and pattern.search(text) is not None


OFTEN = 3
"""Steps whose error the run got over: after the last step it says no more than it did after those."""


def shape_of(line: str) -> bytes:
    """A line whatever its numbers."""
    return line.encode("utf-8", "surrogatepass").translate(ANY_NUMBER)


Says = tuple[Literal["frame", "program's frame", "traceback", "caused", "error"], ...]
"""What a line tells of the end, in this order: a frame of a traceback that lies in a file or in none, its heading, that
the next error was raised from it, an error's words."""
TRACEBACK = "Traceback (most recent call last):"


class EndWatcher:
    """Notices how a console log ends; of what comes, only the last words before its end or a new run count.

    Args:
        sees_all: whether every line of the log comes by, so that the next one belongs to the one before.
    """

    def __init__(self, *, sees_all: bool = False) -> None:
        self._sees_all = sees_all
        self._newest: int | None = None
        self._over: str | None = None
        """What said that the training had ended."""
        self._steps_after_over = 0
        self._survived: Counter[str | bytes] = Counter()
        """Causes, and shapes of raised errors -> steps before which the run got over them without being restarted."""
        self._forget()

    def _forget(self) -> None:
        self._is_fatal, self._begins_anew = False, False
        self._words, self._late_words = "", ""
        self._words_pass_on, self._passes_on, self._is_ignored = False, False, False
        self._frames: set[bool] = set()
        """Of the newest traceback: whether its frames lie in files."""
        self._was_fatal = False
        """Whether something fatal stood before it."""
        self.wants_next = False
        """Whether the next line says what this one announced."""
        self._deaths: list[tuple[int, bool, str]] = []
        """(rank in `DEATHS`, whether it is a raised error, line)."""

    def step(self, number: int) -> Event | None:
        """A step was logged: what failed before it was got over. If the number goes back, an earlier run may have
        ended there, and that is returned."""
        goes_back = self._newest is not None and number < self._newest
        ended = self.event(self._newest) if goes_back else None
        if not goes_back and not self._begins_anew:
            self._survived.update({DEATHS[rank][0] for rank, _, _ in self._deaths})
            self._survived.update({shape_of(self._words)} if self._words and self._is_fatal else ())
        self._forget()
        self._steps_after_over = self._steps_after_over + 1 if self._over else 0
        if goes_back or self._steps_after_over > 2:
            self._over = None
        self._newest = number
        return ended

    def watch(self, line: str) -> Says | None:
        """A line, already plain, that is no step; None where it tells more than `Says` has."""
        line = self._without_prefix(line)
        line = line.partition(GUESSES)[0]
        text = line.strip()[:300]
        if self.wants_next and text:
            self.wants_next = False
            self.error(f"{self._words} {text}"[:300] if self._words.endswith(":") else text)
            return None
        if (frame := FRAME.match(line)) is not None:
            says: Says = ("frame",) if frame.group(1) is None else ("program's frame",)
            if not self._is_ignored:
                self.again(says)
            return says
        if text == TRACEBACK:
            self.traceback()
            return ("traceback",)
        is_over, begins_anew = AT_ITS_END.search(line), BEGINS_ANEW.search(line)
        is_fatal = FATAL.search(line)
        if self._is_ignored and (is_fatal is not None or ERROR_LINE.match(text)):
            self._is_ignored = is_fatal is not None  # up to its error
            return None
        self._is_ignored = line.startswith("Exception ignored in") or (
            self._is_ignored and line[:1].isspace()
        )
        if is_over is not None:
            self._over = is_over.group()
            self._is_fatal = False
        self._begins_anew |= begins_anew is not None
        if is_fatal is not None:
            self._frames, self._was_fatal = set(), self._is_fatal
        self._is_fatal |= is_fatal is not None
        is_caused = CAUSED in line
        self._passes_on |= is_caused
        is_error = ERROR_LINE.match(text) is not None
        is_bare = not is_error and (
            BARE_ERROR.match(text) is not None
            or (self._sees_all and self._is_fatal and OTHER_ERROR.match(text) is not None)
        )
        if (is_error or is_bare) and self.is_in_a_sample:
            self._is_fatal, self._frames = self._was_fatal, set()
            return None
        if is_error or (is_bare and (self._is_fatal or self._newest is None)):
            self.error(text)
            self.wants_next = self._sees_all and self._words.endswith(":")
        elif self._newest is None and (failed := FAILED.search(text)) is not None:
            self._is_fatal = True
            said = next(filter(None, failed.groups()), "")
            self.wants_next = self._sees_all and not said
            if said:
                self.error(said)
            return None
        rank = next(
            (i for i, (_, needles, pattern) in enumerate(DEATHS) if _holds(text, needles, pattern)), None
        )
        if rank is not None and DEATHS[rank][0] == "device_memory" and is_got_over(text):
            rank = None
        if rank is not None and len(self._deaths) < 1000:
            self._deaths.append((rank, is_error, text))
        if rank is not None or is_over or begins_anew or is_bare or self._is_ignored:
            return None
        told: Says = ("traceback",) if is_fatal is not None else ()
        told += ("caused",) if is_caused else ()
        return (*told, "error") if is_error else told

    def traceback(self) -> None:
        """The heading of a traceback: what was fatal before it is remembered, for it may be a sample's."""
        if not self._is_ignored:
            self._frames, self._was_fatal, self._is_fatal = set(), self._is_fatal, True

    @property
    def is_calm(self) -> bool:
        """Whether nothing came before that gives the next line another meaning."""
        return not (self.wants_next or self.is_in_a_sample or self._over or self._is_ignored)

    def again(self, says: Says, *, passes_on: bool = False) -> bool:
        """A line of a known shape, while it is calm: whether it is an error whose words are now those that stand."""
        for word in says:
            if word == "frame":
                self._frames.add(True)
            elif word == "program's frame":
                self._frames.add(False)
            elif word == "traceback":
                self.traceback()
            elif word == "caused":
                self._passes_on = True
            else:
                return self._takes(passes_on)
        return False

    def _takes(self, passes_on: bool) -> bool:
        """Whether the words of an error that was raised stand: of a chain of them the last that neither was raised from
        another nor only passes one on. They are to be set then."""
        caused, self._passes_on = self._passes_on, False
        if self._words and (passes_on or (caused and not self._words_pass_on)):
            return False
        self._words_pass_on = passes_on
        self._words = self._words or "an error"
        return True

    def stands(self, text: str) -> None:
        """The words of the error of which `again` said that they stand."""
        self._words = RANK.sub("", text.strip()[:300])

    @property
    def is_in_a_sample(self) -> bool:
        """Whether the newest traceback is of a program that a model wrote: no frame of it lies in a file."""
        return self._frames == {False} and self._newest is not None

    def _without_prefix(self, line: str) -> str:
        """A line without its rank; before the first step also without a logger's words, in which a program reports what
        ended it: later on they tell of what it got over."""
        line = line.removeprefix("^C")  # a terminal's echo
        if line.startswith("[rank"):
            line = RANK.sub("", line)
        if self._newest is None and ("ERROR" in line or "CRITICAL" in line or "FATAL" in line):
            line = LOGGED.sub("", line)
        return OF_A_GROUP.sub("", line) if line.lstrip()[:2] in ("| ", "+ ") else line

    def error(self, text: str) -> None:
        """An error that was raised."""
        if text.startswith("[rank"):
            text = RANK.sub("", text)
        if self._over and self._is_fatal and not OF_A_SHUTDOWN.search(text):
            self._late_words = self._late_words or text
        if self._takes(passes_on(text)):
            self._words = text

    def event(self, step: int | None) -> Event | None:
        """What ended the run; None where it ended as it should, or goes on."""
        if self._over:
            if not self._late_words:
                return None
            if (
                "train_runtime" in self._over
            ):  # the script that called the trainer died with what it had to write
                return Event(kind="run_failed", step=step, text=self._late_words)
            return Event(kind="note", text=f"after the training had ended: {self._late_words}")
        telling = [d for d in self._deaths if d[1] or DEATHS[d[0]][0] not in self._survived]
        death = min(telling, key=lambda d: (d[0], "RayTaskError(" in d[2]), default=None)
        is_fatal = self._was_fatal if self.is_in_a_sample else self._is_fatal
        is_raised = is_fatal or self._newest is None
        words, fields = self._words if is_raised else "", {}
        if self._survived[shape_of(words)] >= OFTEN:
            words = ""
        if words == "KeyboardInterrupt" and self._newest is not None:
            words = ""  # somebody had seen enough
        follows = any(text == words for _, _, text in telling) or PASSED_ON.search(words) is not None
        if death is not None and (not words or follows):
            words, fields = death[2], {"cause": DEATHS[death[0]][0]}
        if not fields:
            cause = next((cause for cause, pattern in OF_SURROUNDINGS if pattern.search(words)), None)
            fields = {"cause": cause} if cause is not None else {}
        return Event(kind="run_failed", step=step, text=words, fields=dict(fields)) if words else None
