"""The page of a plan: one file, well-formed, everything on it that was promised."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.workload import Workload
from rollbook.planner.beside import beside
from rollbook.planner.charts import nice_ticks
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.report import html_report
from rollbook.planner.report_costs import device_bytes
from rollbook.planner.report_topologies import lanes
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.show import show_plan


def page(num_gpus: int = 16, model: str = "Qwen3-8B", **changes: object) -> str:
    workload = Workload(
        num_prompts=32, group_size=4, prompt_tokens=512, response_tokens=1024, max_response_tokens=8192
    )
    request = PlanRequest(
        model=load_model(model),
        workload=workload,
        cluster=Cluster(accelerator=load_accelerator("H100"), num_gpus=num_gpus),
        assumptions=load_assumptions("default"),
        **changes,  # type: ignore[arg-type]
    )
    return html_report(make_plan(request))


PAGE = page()


def test_the_page_needs_no_other_file_and_no_script() -> None:
    assert not re.search(r"https?://", PAGE)
    assert "<script" not in PAGE and "<link" not in PAGE and "<img" not in PAGE
    assert "prefers-color-scheme: dark" in PAGE


@pytest.mark.parametrize(
    "title",
    [
        "Topologies side by side", "Where the peak goes", "Memory", "A simulated timeline", "More or fewer GPUs",
        "What if", "How the plan was derived", "Assumptions",
    ],
)  # fmt: skip
def test_every_part_is_on_the_page(title: str) -> None:
    assert title in PAGE


def test_the_lane_of_engines_that_are_ahead_waits_as_long_as_the_table_says() -> None:
    request = PlanOptions(model="Qwen3-8B", num_gpus="32", response_tokens="2k", max_staleness=4).request()
    search = Search(request)
    account = search.candidate("separate_async", 24, 8).account
    lane = lanes(account)[0]
    waits_s = sum(part.value for part in lane if part.kind in ("waiting", "sync", "between"))
    assert waits_s == pytest.approx(
        account.idle_frac["rollout"] * account.seconds.total, abs=1e-3 * account.seconds.total
    )


def test_the_lane_of_shared_gpus_holds_what_engines_judge() -> None:
    request = PlanOptions(model="Qwen3-8B", num_gpus="8", reward="generative").request()
    account = Search(request).candidate("sync", 8, 8).account
    assert account.seconds.reward > 0
    (lane,) = lanes(account)
    assert [part.value for part in lane if part.kind == "reward"] == [account.seconds.reward]


def test_each_chart_is_well_formed_and_named() -> None:
    charts = re.findall(r"<svg.*?</svg>", PAGE, re.DOTALL)
    assert len(charts) == 6
    for chart in charts:
        root = ET.fromstring(chart)
        assert root.get("aria-label")
        width = float(root.get("viewBox", "0 0 0 0").split()[2])
        for rect in root.iter("rect"):
            assert float(rect.get("x", "0")) >= 0
            assert float(rect.get("x", "0")) + float(rect.get("width", "0")) <= width + 1.5


def test_every_color_of_a_chart_is_defined_for_light_and_dark() -> None:
    used = set(re.findall(r"var\(--([a-z]+)\)", PAGE))
    light, dark = PAGE.split("prefers-color-scheme: dark")[0], PAGE.split("prefers-color-scheme: dark")[1]
    for name in used:
        assert f"--{name}:" in light, name
        assert f"--{name}:" in dark.split("</style>")[0], name


def test_a_plan_that_does_not_fit_still_has_a_page_that_says_what_would() -> None:
    text = page(16, "Llama-3.1-405B", offload="none")
    assert "Nothing fits" in text and "GPUs instead of 16" in text
    assert "A simulated timeline" not in text


def test_ticks_are_round_and_within_the_axis() -> None:
    for most in (0.7, 3.0, 42.0, 870.0, 12_345.0):
        ticks = nice_ticks(most)
        assert ticks[0] == 0 and ticks[-1] <= most and 3 <= len(ticks) <= 7


def test_a_range_has_one_unit_and_a_wider_one_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """No "2,087 s to 1 h 01 min"; and what nobody measured stands beside the numbers, in page and terminal."""
    options = PlanOptions(model="Qwen3-32B", gpu="MI325X", num_gpus="64", response_tokens="8k")
    made = make_plan(options.request(), is_brief=True)
    page = html_report(made)
    assert "no published measurement of decoding with MI325X" in page
    assert not re.search(r"\d s to [^<]*min", page)
    show_plan(made, Console(width=200))
    assert "no published measurement of fsdp training with MI325X" in capsys.readouterr().out


def test_the_card_of_the_split_reads_as_one_phrase() -> None:
    assert re.search(r"<b>\d+ shared</b><span>GPUs, colocated", PAGE) or re.search(
        r"<b>\d+:\d+</b><span>GPUs, sep", PAGE
    )


def test_a_column_of_flops_is_in_powers_of_ten() -> None:
    """Prefill of a small job is below 1e15, the rest of its step above."""
    request = PlanOptions(model="Qwen3-8B", num_gpus="8", prompts="16", response_tokens="4k").request()
    console = Console(width=110, file=io.StringIO())
    show_plan(make_plan(request), console)
    assert isinstance(console.file, io.StringIO)
    table = console.file.getvalue().split("FLOPs of the step")[1].split("Topologies")[0]
    numbers = [line.split()[1] for line in table.splitlines() if "%" in line]
    assert len(numbers) == 6 and all(re.fullmatch(r"\d\.\d\de\d+", number) for number in numbers)


OWNERS = [
    {"model": "Qwen3-8B", "num_gpus": "8"},
    {"model": "Qwen3-32B", "num_gpus": "64", "response_tokens": "8k", "max_response_tokens": "32k"},
    {"model": "Qwen3-32B", "num_gpus": "16", "lora_rank": 32},
    {"model": "Qwen3-235B-A22B", "num_gpus": "128", "rollout_dtype": "auto"},
    {"model": "DeepSeek-V3", "num_gpus": "512", "rollout_dtype": "float8"},
    {"model": "DeepSeek-V3", "num_gpus": "512", "assume": "paper"},
    {"model": "Llama-3-8B", "num_gpus": "64", "assume": "paper"},
    {"model": "Qwen3-14B", "num_gpus": "32", "algorithm": "ppo"},
    {"model": "Qwen3-8B", "gpu": "A100-40GB", "num_gpus": "16", "reward": "generative"},
    {"model": "Qwen3-0.6B", "num_gpus": "1", "prompts": "32", "group_size": "4"},
]


@pytest.mark.parametrize("workload", OWNERS)
def test_nobody_owns_more_of_a_gpu_that_fits_than_it_has(workload: dict[str, object]) -> None:
    """The bars of the page and the owners of the terminal, whatever the account, of all that is said to fit."""
    plan = make_plan(PlanOptions(**workload).request(), is_brief=True)  # type: ignore[arg-type]
    capacity = plan.request.cluster.accelerator.hbm_bytes
    fitting = [c for c in plan.candidates if c.fits]
    assert fitting
    for candidate in fitting:
        for owned in device_bytes(plan.request, candidate):
            assert sum(value for *_, value in owned) <= capacity * (1 + 1e-9), (candidate.title, owned)
        around = beside(plan.request, candidate)
        for place in ("rollout device", "train device"):
            assert sum(item.bytes for item in around.memory if item.place == place) <= capacity * (1 + 1e-9)


def test_owners_are_summed_up_against_the_capacity_of_their_gpu() -> None:
    """Context and graphs are of what the plan leaves to the runtime: with weights and pool within 80 GB."""
    plan = make_plan(PlanOptions(model="Qwen3-8B").request(), is_brief=True)
    sums = [row for row in plan.beside.owners() if row[1] == "together, of 80.0 GB"]
    assert len(sums) == 2
