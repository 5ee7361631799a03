"""The page in a real browser: live and exported, dark and light, desk and phone, keyboard and pointer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from browser import CHROMIUM, Browser

from rollbook.observe.clock import ManualClock
from rollbook.observe.history import RunHistory
from rollbook.observe.page.content import exported
from rollbook.observe.page.server import HOST, open_socket, page_app
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Ratio
from rollbook.types import FinishReason, Prompt, Trajectory, Turn, VersionRun

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def sampled(step: int, member: int) -> Trajectory:
    ids = np.frombuffer(b"<b>hi</b>", np.uint8).astype(np.int32)
    turn = Turn(
        response_ids=ids,
        behavior_logprobs=np.full(len(ids), -0.5, np.float32),
        version_runs=(VersionRun(step, 4), VersionRun(step + 1, len(ids) - 4)),
        finish_reason=FinishReason.STOP,
        observation_ids=ids[:3],
    )
    prompt = Prompt(prompt_id="row", prompt_ids=ids[:5], source="add", task={"answer": "4"})
    return Trajectory(group_id=step, member_idx=member, prompt=prompt, turns=(turn,), reward=member / 2)


class Run:
    """A recorded run that can go on."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.recorder = Recorder(folder, clock=self.clock, strict=True, decode=lambda ids: chr(ids[0]))

    def step(self, step: int) -> None:
        with self.recorder.step(step) as span:
            span.set(expected_s=3.0)
            with self.recorder.span("rollout", expected_s=2.0), self.recorder.span("decode"):
                self.clock.advance(2.5)
            with self.recorder.span("train", expected_s=1.0):
                self.clock.advance(0.8)
            self.recorder.metrics(
                {
                    "reward/add/mean": Ratio(step, 100),
                    "replica/0/weight_version": step + 1,
                    "replica/1/weight_version": step if step == 29 else step + 1,
                    "training/logprob_gap/mean": Ratio(3e-6, 1),
                    "training/off_policy/trajectory_staleness_worst/max": 1.0,
                    "response_length/mean": Ratio(50, 10),
                    "timing_s/update_weights": 0.1,
                    "waterfall/tail": 0.3,
                    "perf/mfu/step": 0.7,
                }
            )
            self.recorder.trajectories(
                step,
                [sampled(step, member) for member in range(3)],
                loss_masks={f"{step}/0": np.arange(17) > 6},
            )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = Run(tmp_path_factory.mktemp("runs") / "demo")
    for step in range(30):
        made.step(step)
    yield made
    made.recorder.close()


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    listener = open_socket(0)
    server = uvicorn.Server(uvicorn.Config(page_app(run.recorder.path), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://{HOST}:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    shared_browser.resize(1400, 1000)
    shared_browser.errors.clear()
    yield shared_browser
    assert shared_browser.errors == []


def text(browser: Browser, selector: str) -> str:
    return str(browser.js(f"document.querySelector({selector!r}).innerText"))


def test_the_first_screen_holds_the_four_signals(browser: Browser, url: str) -> None:
    browser.open(url)
    screen = text(browser, "#screen")
    for title in (
        "Reward by source",
        "Weight version per replica",
        "Logprob gap",
        "Staleness",
        "Response length",
        "Sync",
    ):
        assert title in screen
    assert "1: v29 ▼ 1 behind" in screen
    assert browser.js("document.querySelectorAll('#screen svg[role=img] path').length") >= 7
    bottom = browser.js("document.getElementById('screen').getBoundingClientRect().bottom")
    assert bottom <= 1000, "the four signals must fit on one screen"


def test_plan_stands_beside_measurement(browser: Browser, url: str) -> None:
    browser.open(url)
    rows = browser.js(
        "[...document.querySelectorAll('#stages tr')].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    assert ["rollout", "", "2.50 s", "2.00 s", "1.25"] in rows
    assert ["train", "", "800 ms", "1.00 s", "0.80"] in rows
    other = next(row for row in rows if row[0] == "other")
    assert other[3] not in ("–", ""), "what the plan of the step has beyond its stages"
    assert "planned step" in text(browser, "#seconds-waterfall")
    assert "whole-step MFU" in text(browser, "#mfu-waterfall").replace("\n", " ")
    assert browser.js("document.querySelectorAll('#timeline rect').length") >= 6


def test_keys_move_through_steps_trajectories_and_sections(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.key("ArrowLeft")
    browser.wait("document.getElementById('step-title').textContent === '28'")
    browser.key("ArrowLeft", shift=True)
    browser.wait("document.getElementById('step-title').textContent === '18'")
    browser.wait("document.getElementById('trajectories-title').textContent === 'of step 18'")
    browser.key("j")
    browser.wait("document.querySelector('#trajectory .facts b').textContent === '18/1'")
    assert browser.js("location.hash") == "#?step=18"
    browser.key("Home")
    browser.wait("document.getElementById('step-title').textContent === '0'")
    browser.key("l")
    browser.wait("document.getElementById('step-title').textContent === '29, the latest'")
    browser.key("9")
    browser.wait("document.getElementById('trajectories').getBoundingClientRect().top < 200")
    browser.key("?")
    assert browser.js("document.getElementById('help').open")


def test_tokens_show_versions_masks_and_are_never_markup(browser: Browser, url: str) -> None:
    browser.open(url + "#?step=10")
    browser.wait("document.querySelector('#trajectory .facts b')?.textContent === '10/0'")
    shown = text(browser, "#trajectory")
    assert "turn 1: response, 9 tokens, ended by stop" in shown
    assert "turn 1: observation, 3 tokens" in shown
    assert "sampled by version 10" in shown
    assert "<b>hi</b>" in shown
    assert browser.js("document.querySelectorAll('#trajectory .tokens b').length") == 0
    assert browser.js("document.querySelectorAll('#trajectory .unmasked').length") == 2
    versions = "new Set([...document.querySelectorAll('#trajectory .v')].map((t) => t.style.getPropertyValue('--v')))"
    assert browser.js(f"{versions}.size") == 2
    x, y = browser.js(
        "(() => { document.documentElement.style.scrollBehavior = 'auto';"
        "document.getElementById('trajectory').scrollIntoView();"
        "const r = document.querySelector('#trajectory .v').getBoundingClientRect(); return [r.x + 2, r.y + 5]; })()"
    )
    browser.mouse("mouseMoved", x, y)
    browser.wait("!document.getElementById('tip').hidden")
    assert "ln p -0.5" in text(browser, "#tip")
    assert "version 10" in text(browser, "#tip")


def test_a_drag_over_a_chart_zooms_and_zero_shows_all_steps(browser: Browser, url: str) -> None:
    browser.open(url)
    x, y, width = browser.js(
        "(() => { const r = document.querySelector('#screen svg[role=img]').getBoundingClientRect();"
        "return [r.x, r.y + 40, r.width]; })()"
    )
    browser.mouse("mousePressed", x + width * 0.3, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + width * 0.6, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + width * 0.6, y, button="left", clickCount=1)
    browser.wait("table.steps.length > 4 && table.steps.length < 20")
    browser.key("0")
    browser.wait("table.steps.length === 30")


def test_the_page_follows_a_run_that_goes_on(browser: Browser, url: str, run: Run) -> None:
    browser.open(url)
    assert text(browser, "#state") == "live"
    step = browser.js("state.overview.last_step") + 1
    run.step(step)
    run.recorder.finding("version_drift", "replica 1 is behind", remedy="restart it")
    browser.wait(f"document.getElementById('step-title').textContent === '{step}, the latest'")
    browser.wait("document.getElementById('notices').innerText.includes('replica 1 is behind')")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_stands_out_in_both_themes(browser: Browser, url: str, theme: str) -> None:
    browser.open(f"{url}?theme={theme}")
    contrast = """(() => {
      const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
      const light = (c) => { const [r, g, b] = c.match(/\\d+/g).map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const probe = document.body.appendChild(document.createElement("span"));
      const of = (name) => { probe.style.color = `var(${name})`; return light(getComputedStyle(probe).color); };
      const panel = of("--panel");
      return ["--text", "--muted", ...[0, 1, 2, 3, 4, 5, 6, 7].map((i) => `--c${i}`)].map((name) => {
        const [a, b] = [of(name), panel].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); });
    })()"""
    text_contrast, muted, *lines = browser.js(contrast)
    assert text_contrast >= 7
    assert muted >= 4.5
    assert min(lines) >= 3
    browser.key("t")
    assert browser.js("document.documentElement.dataset.theme") != theme


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, url: str) -> None:
    browser.resize(390, 844, mobile=True)
    browser.open(url)
    browser.wait("document.querySelector('#trajectory .facts b')")
    assert browser.js("document.documentElement.scrollWidth") == 390


def test_a_hundred_thousand_steps_draw_from_buckets(browser: Browser, url: str) -> None:
    """What the browser handles does not grow with the run: 400 buckets a chart, whatever the steps."""
    browser.open(url)
    browser.js(
        "(() => { const n = 400, mean = [...Array(n).keys()].map((i) => Math.sin(i / 9));"
        "const column = { mean, min: mean.map((v) => v - 1), max: mean.map((v) => v + 1) };"
        "window.real = getSeries; table = { steps: mean.map((_, i) => i * 250 + 249),"
        "series: Object.fromEntries(state.overview.names.map((name) => [name, column])) };"
        "for (const c of charts) c.draw(); })()"
    )
    longest = browser.js(
        "Math.max(...[...document.querySelectorAll('#screen path')].map((p) => p.getAttribute('d').length))"
    )
    assert longest < 20_000


def test_the_exported_page_needs_no_server(browser: Browser, run: Run, tmp_path: Path) -> None:
    history = RunHistory(run.recorder.path)
    history.refresh_all()
    page = tmp_path / "page.html"
    page.write_text(exported(history, 0.0), encoding="utf-8")
    browser.open(page.as_uri())
    assert text(browser, "#state") == "exported"
    browser.key("Home")
    browser.wait("document.getElementById('step-title').textContent === '0'")
    assert "rollout" in text(browser, "#stages")
    assert browser.js("performance.getEntriesByType('resource').length") == 0
