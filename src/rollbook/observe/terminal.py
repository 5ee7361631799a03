"""The live view in a terminal: step, rewards, lengths, stage bars with the plan beside the measurement.

Fed by the recorder alone. When stderr is not a terminal it prints one line a step instead.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollbook.observe.catalogue import STAGES
from rollbook.observe.clock import Clock, SystemClock
from rollbook.observe.numbers import count, counted, frac, seconds, tiny
from rollbook.observe.progress import Progress, number_of
from rollbook.observe.recorder import Event

SPARK = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_SOURCES = 4
"""Data sources with a row of their own; the rest share one."""
_NOTICES = {
    "finding": "summary",
    "publication_failed": "error",
    "quarantined": "why",
    "sink_failed": "error",
    "interrupted": "effect",
    "no_effect": "says",
    "lending_pays": "says",
    "back_in_service": "",
}
"""Event kinds that are said aloud, and the field that says it. Not a step that failed: the run ends with its error."""
_OF_A_REPLICA = ("quarantined", "back_in_service")
PHASES = {
    "import": "loading torch and the parts of the run",
    "model": "making the model and its optimizer",
    "data": "reading the prompts",
    "scorer": "starting the scorers",
    "engines": "starting the engines",
    "publish": "publishing the first weights",
    "preflight": "checking the scorer, a trial response and the deadlines",
    "probe": "comparing engine and trainer on one prompt",
    "warmup": "supervised warm-up on reference answers",
    "plan": "measuring this machine, and planning a step",
    "eval": "evaluating on held-out prompts",
    "lending": "measuring what it costs to lend the trainer's device",
    "baseline": "asking the baseline's server the same prompts",
    "checkpoint": "writing a checkpoint",
}
"""Spans outside the steps, in words."""
MAX_LINE_CHARS = 120
WARMUP_LINE_S = 5.0
"""Least seconds between two lines of the warm-up."""


class TerminalView:
    """A sink that shows a run on stderr.

    Args:
        run_dir: named in the title and the summary.
        num_steps: for "step 3/100" and the time left.
        console: where to draw; stderr by default.
        is_live: a panel where the console is a terminal; False prints lines everywhere.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        num_steps: int | None = None,
        console: Console | None = None,
        is_live: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console(stderr=True, highlight=False)
        self.clock = clock or SystemClock()
        self.progress = Progress(num_steps=num_steps)
        # The panel is drawn by a thread of its own. Never print while holding this: printing waits for the panel.
        self._lock = threading.Lock()
        self._warmup_said_mono_s = -WARMUP_LINE_S
        self._was_complete = False
        self._has_begun = False
        """The run left something on disk: told by its last event."""
        self._live: Live | None = None
        if is_live and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=4, transient=False
            )

    def on_event(self, event: Event) -> None:
        if self._live is not None and not self._live.is_started:
            self._live.start()
        with self._lock:
            self.progress.take_event(event)
        kind = str(event["kind"])
        self._has_begun |= kind == "run_ended"
        self._was_complete |= kind == "already_complete"
        if self._live is None:
            self._say_phase(kind, event)
        if kind == "plan":
            self.console.print("\n".join(plan_lines(event)), soft_wrap=True, highlight=False)
        if kind in _NOTICES:
            style = "red" if event.get("severity") == "error" else "yellow"
            says = event.get(_NOTICES[kind], "")
            if kind in _OF_A_REPLICA:
                says = f"replica {event.get('replica_id')}: {says}".rstrip(": ")
            notice = Text(f"{kind.replace('_', ' ')}: {says}".rstrip(": "), style=style)
            if event.get("remedy"):
                notice.append(f"\n  hint: {event['remedy']}", style="dim")
            self.console.print(notice, soft_wrap=not self.console.is_terminal)

    def _say_phase(self, kind: str, event: Event) -> None:
        """Without a panel: a line for each thing that takes time before the first step."""
        name, mono_s = str(event.get("name", "")), number_of(event["mono_s"])
        if kind in ("run_started", "run_resumed"):
            self._print(f"{'run' if kind == 'run_started' else 'resuming'} {self.run_dir}")
        elif kind == "span_open" and name in PHASES and self.progress.step is None:
            self._print(f"  {PHASES[name]}")
        elif kind == "measuring" and self.progress.step is None:
            self._print(f"    {self.progress.measuring}")
        elif kind == "warmup_check" or (
            kind == "warmup" and mono_s - self._warmup_said_mono_s >= WARMUP_LINE_S
        ):
            self._warmup_said_mono_s = mono_s
            self._print(f"  {self.progress.warmup_line(mono_s)}")

    def _print(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        with self._lock:
            self.progress.take_step(step, data)
        if self._live is None:
            print(self.line(step, data), file=self.console.file, flush=True)

    def close(self) -> None:
        """Leave the last view on the screen and print the summary, if there was a run."""
        if self._live is not None and self._live.is_started:
            self._live.stop()
        if self._has_begun and not self._was_complete:
            self.console.print(self.summary(), soft_wrap=True)

    # -- one line a step

    def line(self, step: int, data: Mapping[str, float]) -> str:
        """A step in one line of at most 120 characters, for logs; seconds are measured/planned.

        `step 3/100  reward 0.710  length 5.25  3.31/3.1 s  rollout 1.92/1.8  train 1.2/1.1  tok/s 12.0k  gap 3.1e-06`
        """
        of = f"/{self.progress.num_steps}" if self.progress.num_steps else ""
        held_out = [
            f"held-out {match[1]} {value:.3f}" + _beside(data.get(f"val/{match[1]}/baseline_exact_match"))
            for name, value in data.items()
            if (match := re.fullmatch(r"val/(.+)/exact_match", name))
        ]
        step_s = data.get("timing_s/step")
        if step_s is None:  # readings of no step: the evaluation before the first
            return _fitting([(0, f"before step {step}"), *((1, text) for text in held_out)])
        parts = [(0, f"step {step}{of}"), *self._reward_parts(data)]
        if "response_length/mean" in data:
            parts.append((1, f"length {count(data['response_length/mean'])}"))
        parts.append((0, _took(step_s, data.get("expected_s/step")) + " s"))
        stages = [
            (name, measured, data.get(f"expected_s/{suffix}"))
            for name, suffix in STAGES.items()
            if (measured := data.get(f"timing_s/{suffix}")) is not None and measured >= 0.02 * step_s
        ]
        by_size = sorted(stages, key=lambda stage: -stage[1])
        parts += [(4 + by_size.index(stage), f"{stage[0]} {_took(*stage[1:])}") for stage in stages]
        for rank, label, name, show in (
            (2, "tok/s", "perf/tokens_per_s/gen", count),
            (2, "gap", "training/logprob_gap/mean", tiny),
            (3, "stale", "training/off_policy/trajectory_staleness_worst/max", count),
        ):
            if name in data:
                parts.append((rank, f"{label} {show(data[name])}"))
        if data.get("failures/num"):
            parts.append((1, f"failed {count(data['failures/num'])}"))
        return _fitting([*parts, *((1, text) for text in held_out)])

    @staticmethod
    def _reward_parts(data: Mapping[str, float]) -> list[tuple[int, str]]:
        """By source where there are few, else how far they lie apart."""
        means = {m[1]: v for name, v in data.items() if (m := re.fullmatch(r"reward/(.+)/mean", name))}
        if not means:
            return []
        if len(means) == 1:
            return [(0, f"reward {next(iter(means.values())):.3f}")]
        if len(means) <= MAX_SOURCES and sum(len(name) + 7 for name in means) <= MAX_LINE_CHARS // 3:
            return [(0, "reward " + " ".join(f"{name} {value:.3f}" for name, value in means.items()))]
        low, high = min(means.values()), max(means.values())
        return [(0, f"reward {low:.3f} to {high:.3f} of {len(means)} sources")]

    # -- the panel

    def render(self) -> RenderableType:
        """The whole view at the console's width."""
        with self._lock:
            return self._panel()

    def _panel(self) -> RenderableType:
        now = self.clock.mono_s()
        width = min(self.console.width, 120)
        inner = width - 4
        rows: list[RenderableType] = [*self._rewards(inner), self._numbers(inner)]
        if self.progress.data or self.progress.open_spans:
            rows += [Text(), self._stages(inner, now)]
        return Panel(
            Group(*rows),
            title=self._title(now),
            title_align="left",
            subtitle=Text(_shortened(str(self.run_dir), inner - 2), style="dim"),
            subtitle_align="right",
            border_style="blue",
            width=width,
        )

    def _title(self, now: float) -> Text:
        p = self.progress
        title = Text(" rollbook ", style="bold")
        if p.step is None:
            phase = next(reversed(p.open_spans), "")
            title.append(f"· {PHASES.get(phase, phase) or 'starting'} ", style="not bold")
            if phase == "plan" and p.measuring:
                title.append(f"· {p.measuring} ", style="not bold")
        else:
            of = f"/{p.num_steps}" if p.num_steps else ""
            title.append(f"· step {p.step}{of} ", style="not bold")
        title.append(f"· {seconds(now - p.started_mono_s)} ", style="not bold")
        remaining = p.remaining_s(now)
        if remaining:
            title.append(f"· about {seconds(remaining)} left ", style="not bold dim")
        return title

    def _rewards(self, width: int) -> list[RenderableType]:
        p = self.progress
        if not p.rewards:
            if p.warmup:
                return [Text(p.warmup_line(self.clock.mono_s()))]
            return [Text("reward   waiting for the first step", style="dim")]
        names = list(p.rewards)
        shown = names if len(names) <= MAX_SOURCES else names[: MAX_SOURCES - 1]
        name_width = max(len(_shortened(name, 18)) for name in shown)
        rows: list[RenderableType] = []
        for idx, name in enumerate(shown):
            values = p.rewards[name]
            row = Text(f"{'reward' if idx == 0 else '':<9}{_shortened(name, 18):<{name_width}}  ")
            row.append(f"{values[-1]:6.3f}  ", style="bold")
            exact = p.data.get(f"val/{name}/exact_match")
            beside = _beside(p.data.get(f"val/{name}/baseline_exact_match"))
            held_out = f"  held-out {exact:.3f}{beside}" if exact is not None else ""
            row.append(sparkline(list(values), width - row.cell_len - 18), style="green")
            row.append(held_out, style="cyan")
            rows.append(row)
        if len(names) > len(shown):
            rest = [p.rewards[name][-1] for name in names[len(shown) :]]
            rows.append(
                Text(
                    f"{'':9}and {counted(len(rest), 'more source')}, from {min(rest):.3f} to {max(rest):.3f}",
                    style="dim",
                )
            )
        return rows

    def _numbers(self, width: int) -> RenderableType:
        data = self.progress.data
        grid = Table.grid(padding=(0, 2))
        cells: list[Text] = []

        def cell(label: str, text: str, style: str = "bold") -> None:
            cells.append(Text.assemble((f"{label} ", "dim"), (text, style)))

        if "response_length/mean" in data:
            longest = data.get("response_length/max", data["response_length/mean"])
            cell("length", f"{data['response_length/mean']:.1f} (max {count(longest)})")
        if "response_length/clip_ratio" in data:
            cell("truncated", frac(data["response_length/clip_ratio"]))
        for label, suffix in (("rollout", "gen"), ("train", "update_actor")):
            if f"perf/tokens_per_s/{suffix}" in data:
                cell(label, f"{count(data[f'perf/tokens_per_s/{suffix}'])} tokens/s")
        if "training/logprob_gap/mean" in data:
            cell("gap", tiny(data["training/logprob_gap/mean"]))
        stale = data.get("training/off_policy/trajectory_staleness_worst/max")
        if stale is not None:
            cell("staleness", f"max {count(stale)}")
        failed = data.get("failures/num", 0.0)
        if failed:
            cell("failed", count(failed), "bold red")
        per_row = 3 if width < 100 else 6
        for start in range(0, len(cells), per_row):
            grid.add_row(*cells[start : start + per_row])
        return grid

    def _stages(self, width: int, now: float) -> RenderableType:
        p = self.progress
        rows = p.stages()
        step_s = p.data.get("timing_s/step")
        bar_width = width - 43
        longest = max([s for _, measured, expected in rows for s in (measured, expected) if s] or [1.0])
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=11)
        table.add_column(width=bar_width)
        for _ in range(2):
            table.add_column(width=9, justify="right")
        table.add_column(width=6, justify="right")
        table.add_row(
            Text("stage", style="dim"),
            Text("┃ planned", style="dim"),
            *(Text(label, style="dim") for label in ("measured", "planned", "ratio")),
        )
        for name, measured, expected in rows:
            is_open = name in p.open_spans
            if is_open:
                elapsed = now - p.open_spans[name]
                longest_now = max(longest, elapsed)
                bar = stage_bar(elapsed, expected, longest_now, bar_width, "yellow")
                cells = [seconds(elapsed), seconds(expected) if expected is not None else "–", "▶"]
            else:
                assert measured is not None
                bar = stage_bar(measured, expected, longest, bar_width, "blue")
                ratio = f"{measured / expected:.2f}" if expected else "–"
                cells = [seconds(measured), seconds(expected) if expected is not None else "–", ratio]
            table.add_row(Text(name, style="yellow" if is_open else ""), bar, *(Text(cell) for cell in cells))
        if step_s is not None:
            expected = p.data.get("expected_s/step")
            ratio = f"{step_s / expected:.2f}" if expected else "–"
            planned = seconds(expected) if expected is not None else "–"
            cells = [seconds(step_s), planned, ratio]
            table.add_row(
                Text("whole step", style="bold"), Text(), *(Text(cell, style="bold") for cell in cells)
            )
        return table

    def summary(self) -> str:
        """What to say when the run is over: how far it came, and where it lies."""
        p = self.progress
        lines = []
        if p.num_done:
            began_mono_s = p.started_mono_s if p.steps_began_mono_s is None else p.steps_began_mono_s
            before_s = began_mono_s - p.started_mono_s
            said = f"{counted(p.num_done, 'step')} in {seconds(self.clock.mono_s() - began_mono_s)}"
            lines.append(f"{said}, after {seconds(before_s)} of preparation" if before_s >= 1 else said)
            for name, value in p.data.items():
                match = re.fullmatch(r"reward/(.+)/mean|val/(.+)/exact_match", name)
                if match:
                    what = f"reward of {match[1]}" if match[1] else f"held-out exact match of {match[2]}"
                    lines.append(f"  {what}: {p.first_readings[name]:.3f} -> {value:.3f}")
        else:
            lines.append(f"no step finished in {self.run_dir}")
        return "\n".join(lines)


def stage_bar(measured_s: float, expected_s: float | None, longest_s: float, width: int, style: str) -> Text:
    """A bar of `measured_s` with a mark where `expected_s` is, on a scale that ends at `longest_s`.

    >>> stage_bar(2.0, 3.0, 4.0, 8, "").plain
    '███▌ ┃  '
    """
    scale = (width - 1) / longest_s if longest_s else 0.0
    eighths = round(measured_s * scale * 8) if scale else 0
    if measured_s > 0:
        eighths = max(1, eighths)
    bar = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    text = Text(bar.ljust(width)[:width], style=style)
    if expected_s is not None:
        mark = min(width - 1, round(expected_s * scale))
        is_inside = mark < len(bar)
        plain = text.plain[:mark] + "┃" + text.plain[mark + 1 :]
        text = Text(plain, style=style)
        text.stylize("bold white on blue" if is_inside else "bold", mark, mark + 1)
    return text


def sparkline(values: list[float], width: int) -> str:
    """The last values as block characters, several to a character when they are many.

    >>> sparkline([0.0, 0.5, 1.0], 10)
    '▁▅█'
    """
    width = max(1, width)
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    spread = high - low
    return "".join(SPARK[round((v - low) / spread * (len(SPARK) - 1)) if spread else 0] for v in values)


def plan_lines(event: Event) -> list[str]:
    """The plan in a few lines, from its event."""
    held = event.get("stages")
    stages = {str(k): number_of(v) for k, v in held.items()} if isinstance(held, Mapping) else {}
    rows = sorted(stages.items(), key=lambda stage: -stage[1])
    return [
        f"plan     {event.get('topology')}",
        f"         a step takes {seconds(number_of(event.get('step_s')))}, "
        f"all that are left {seconds(number_of(event.get('total_s')))}; "
        "mean seconds by stage (below: measured/planned):",
        "         " + "  ".join(f"{name} {value:.3g}" for name, value in rows),
    ]


def _beside(baseline: float | None) -> str:
    return "" if baseline is None else f" (baseline {baseline:.3f})"


def _took(measured_s: float, expected_s: float | None) -> str:
    return _brief(measured_s) + (f"/{_brief(expected_s)}" if expected_s is not None else "")


def _brief(value_s: float) -> str:
    """Two digits are enough in a line.

    >>> [_brief(s) for s in (0.00123, 0.318, 3.0, 12.34, 1234.5)]
    ['0.0012', '0.32', '3', '12', '1234']
    """
    return f"{value_s:.2g}" if value_s < 99.5 else f"{value_s:.0f}"


def _fitting(parts: list[tuple[int, str]]) -> str:
    """The parts in their order; by rank, each that still fits the line.

    >>> _fitting([(0, "step 1"), (5, "x" * 115), (4, "train 2/2"), (1, "length 5")])
    'step 1  train 2/2  length 5'
    """
    kept: set[int] = set()
    num_chars = 0
    for idx in sorted(range(len(parts)), key=lambda i: parts[i][0]):
        needed = len(parts[idx][1]) + (2 if kept else 0)
        if num_chars + needed <= MAX_LINE_CHARS:
            kept.add(idx)
            num_chars += needed
    return "  ".join(parts[idx][1] for idx in sorted(kept))


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]
