"""What a plan says beside the stages of a step: owners of memory, moves of a hand-over, checkpoints, adapters,
environments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from rollbook.errors import PlanError
from rollbook.ledger.account import PrefillAccount
from rollbook.ledger.adapters import trained_params
from rollbook.ledger.agents import AgentAccount, agent_account, sandboxes_needed
from rollbook.ledger.checkpoint import CheckpointAccount, checkpoint_account
from rollbook.ledger.memory import MemoryItem, memory_items
from rollbook.ledger.reliability import checkpoint_error_frac
from rollbook.ledger.step import hand_over_moves, is_colocated
from rollbook.ledger.switch import Move, pinned_bytes
from rollbook.ledger.sync import sync_account
from rollbook.planner.candidate import Candidate, sync_work_of
from rollbook.planner.offload import HELD, host_state_bytes
from rollbook.planner.request import PlanRequest
from rollbook.planner.staleness import in_flight_slots
from rollbook.planner.words import count, counted, format_bytes, percent, seconds, seconds_range

_MOMENTS = {"rollout device": "while generating", "train device": "while training", "train host": "host"}
"""Of a GPU that both roles share, for the places of the ledger."""
_USUAL_INTERVAL_S = 3600.0
"""Without a wish, a checkpoint about once an hour: what a failure may cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """How often the state is saved and what that takes from training. Not part of the step's seconds."""

    account: CheckpointAccount
    every_steps: int
    is_async: bool
    storage_bytes_per_s: float
    last_of_steps: int = 0
    """Above 0: an interval of the usual length would be longer than the run of so many steps."""
    beyond_steps: int = 0
    """Above 0: the interval that was asked for is longer than the run of so many steps."""

    def as_json(self) -> dict[str, object]:
        return {
            "every_steps": self.every_steps,
            "is_async": self.is_async,
            "storage_bytes_per_s": self.storage_bytes_per_s,
            "write_s_range": [self.account.write_range.low, self.account.write_range.high],
            **asdict(self.account),
        }

    @property
    def write_span(self) -> str:
        """Range of the seconds until the files are whole."""
        return seconds_range(self.account.write_range.low, self.account.write_range.high)

    @property
    def interval(self) -> str:
        return f"every {self.every_steps} steps" if self.every_steps > 1 else "every step"

    @property
    def because(self) -> str:
        """The sentence of the derivation."""
        a = self.account
        text = ""
        if self.last_of_steps:
            text = (
                f"An hour, the usual interval, is more than the {counted(self.last_of_steps, 'step')} of the "
                "run take, so its "
                "last step alone is saved. "
            )
        if self.beyond_steps:
            text = (
                f"The run ends after {counted(self.beyond_steps, 'step')} (--horizon), before a checkpoint "
                f"{self.interval} is "
                "ever written. "
            )
        text += (
            f"A checkpoint {self.interval} writes {format_bytes(a.total_bytes)} ({format_bytes(a.bytes_per_gpu)} a "
            f"training GPU) in {seconds(a.write_s)} ({self.write_span}) at "
            f"{format_bytes(self.storage_bytes_per_s)}/s of storage"
        )
        if self.is_async:
            text += (
                f"; asynchronous, training stands still for {seconds(a.stall_s)}, and "
                f"{format_bytes(a.pinned_bytes_per_node)} of a node's host memory are pinned for the copy"
            )
        else:
            text += "; training stands still for all of it"
        return f"{text}: {percent(a.step_frac)} of the time."


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What low-rank adapters leave to train, keep and publish."""

    rank: int
    trained_params: float
    trained_frac: float
    state_bytes: float
    """Frozen weights, and the adapters' own weights, gradients, master weights and moments."""
    merged_bytes: float
    merged_s: float
    """A publication of whole weights, adapters merged."""
    alone_bytes: float
    alone_s: float
    """A publication of adapters alone, to engines that hold the base."""
    publishes_alone: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def because(self) -> str:
        """The sentence of the derivation."""
        chosen, other = "alone", "merged into whole weights"
        at = (self.alone_bytes, self.alone_s, self.merged_bytes, self.merged_s)
        if not self.publishes_alone:
            chosen, other, at = other, chosen, (*at[2:], *at[:2])
        return (
            f"Adapters of rank {self.rank} are {count(self.trained_params)} parameters, "
            f"{percent(self.trained_frac)} of the model: the frozen rest has neither gradients nor moments, and is "
            f"the reference too. They are published {chosen}, {format_bytes(at[0])} in {seconds(at[1])}; {other} they "
            f"would be {format_bytes(at[2])} in {seconds(at[3])}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What turns and sandboxes ask of the processors, and how long the step waits for them."""

    account: AgentAccount
    wait_s: float
    """By which the slowest trajectories come later than decoding alone would have them."""
    num_running: int
    """Trajectories under way at once: sandboxes that exist at a time."""
    num_sandboxes_least: int
    """That finish a step's calls within the step."""
    held_cores: float
    """Of the open ones, at work or waiting for the next action."""
    held_core_hours: float
    """At most, of a step."""
    held_bytes: float
    """Host memory of the open ones."""

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self.account),
            "wait_s": self.wait_s,
            "num_running": self.num_running,
            "num_sandboxes_least": self.num_sandboxes_least,
            "held_cores": self.held_cores,
            "held_core_hours": self.held_core_hours,
            "held_bytes": self.held_bytes,
        }

    @property
    def because(self) -> str:
        """The sentence of the derivation."""
        a = self.account
        return (
            f"Environments work {seconds(a.trajectory_env_s)} on an average trajectory and "
            f"{seconds(a.slowest_env_s)} "
            f"on the slowest; a step that waits for all its trajectories ends {seconds(self.wait_s)} later for it, "
            f"and {count(self.num_running)} sandboxes are open at a time, which hold {format_bytes(self.held_bytes)}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """All of it for one topology."""

    memory: tuple[MemoryItem, ...]
    """By owner, on one GPU of each role and on the host; empty under the paper account, which has no owners."""
    capacity_bytes: float
    """Of a GPU."""
    shares_devices: bool
    """The GPUs of both roles are the same, at two moments."""
    moves: tuple[Move, ...]
    """Of a step's hand-overs, on one GPU; empty where the roles have their own devices."""
    checkpoint: Checkpointing
    prefill: PrefillAccount | None
    """None under the paper account."""
    adapters: Adapters | None
    agents: Environments | None

    def as_json(self) -> dict[str, object]:
        """Keys of `plan --json` next to "step"."""
        return {
            "memory_items": [asdict(item) for item in self.memory],
            "hand_over": {
                "moves": [asdict(move) for move in self.moves],
                "pinned_bytes_per_gpu": pinned_bytes(list(self.moves)),
            },
            "checkpoint": self.checkpoint.as_json(),
            "prefill": {**asdict(self.prefill), "stretch": self.prefill.stretch} if self.prefill else None,
            "adapters": self.adapters.as_json() if self.adapters else None,
            "agents": self.agents.as_json() if self.agents else None,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Name and value, for terminal and page."""
        c, rows = self.checkpoint, []
        rows += [
            ("checkpoint", f"{c.interval}, {'asynchronous' if c.is_async else 'synchronous'}"),
            (
                "  bytes",
                f"{format_bytes(c.account.total_bytes)}, {format_bytes(c.account.bytes_per_gpu)} a GPU",
            ),
            (
                "  written in",
                f"{seconds(c.account.write_s)} ({c.write_span})",
            ),
            (
                "  training stands still",
                f"{seconds(c.account.stall_s)}, {percent(c.account.step_frac)} of the time",
            ),
        ]
        if c.is_async:
            rows.append(("  pinned host memory", f"{format_bytes(c.account.pinned_bytes_per_node)} a node"))
        if p := self.prefill:
            saved = (
                f", {count(p.shared_tokens)} more saved by groups that share prompts"
                if p.shared_tokens
                else ""
            )
            rows.append(("prefill", f"{count(p.tokens)} tokens{saved}"))
            if p.mixed_step_s:
                rows += [
                    (
                        "  in chunks",
                        f"{count(p.chunk_tokens)} tokens in {count(p.num_mixed_steps)} decode steps",
                    ),
                    (
                        "  a step with a chunk",
                        f"{seconds(p.mixed_step_s)}, {p.stretch:.1f} times a plain one",
                    ),
                ]
            rows.append(("  adds to a step", seconds(p.seconds)))
        if a := self.adapters:
            rows += [
                ("adapters", f"rank {a.rank}, published {'alone' if a.publishes_alone else 'merged'}"),
                ("  trained", f"{count(a.trained_params)} parameters, {percent(a.trained_frac)}"),
                ("  training state", format_bytes(a.state_bytes)),
                ("  publication, merged", f"{format_bytes(a.merged_bytes)}, {seconds(a.merged_s)}"),
                ("  publication, alone", f"{format_bytes(a.alone_bytes)}, {seconds(a.alone_s)}"),
            ]
        if e := self.agents:
            rows += [
                ("environments", f"{count(e.account.num_calls)} calls a step"),
                ("  of a trajectory", seconds(e.account.trajectory_env_s)),
                ("  of the slowest", seconds(e.account.slowest_env_s)),
                ("  a synchronous step waits", seconds(e.wait_s)),
                ("  sandboxes open", f"{count(e.num_running)}, at least {count(e.num_sandboxes_least)}"),
                (
                    "  prefilled, prefix kept or lost",
                    f"{count(e.account.prefilled_tokens_kept)} or {count(e.account.prefilled_tokens_lost)} tokens",
                ),
                ("  a held slot idles, a trajectory", seconds(e.account.gpu_idle_s)),
                (
                    "  processor core hours a step",
                    f"{e.account.cpu_core_hours:.1f} at work, {e.held_core_hours:.1f} held at most",
                ),
                ("  tokens a sampled token", f"{e.account.effective_tokens_per_response_token:.2f}"),
            ]
        return rows

    def owners(self) -> list[tuple[str, str, str]]:
        """Place, owner and bytes, for terminal and page; of a device their sum, runtime included, and its capacity."""
        rows: list[tuple[str, str, str]] = []
        for place in dict.fromkeys(item.place for item in self.memory):
            items = [item for item in self.memory if item.place == place]
            told = _MOMENTS.get(place, place) if self.shares_devices else place
            rows += [("" if i else told, item.name, format_bytes(item.bytes)) for i, item in enumerate(items)]
            if place != "train host":
                total = sum(item.bytes for item in items)
                rows.append(("", f"together, of {format_bytes(self.capacity_bytes)}", format_bytes(total)))
        return rows

    def hand_over_rows(self) -> list[tuple[str, str, str]]:
        """Move, bytes over the host link and seconds, for terminal and page."""
        return [(m.name, format_bytes(m.bytes) if m.bytes else "", seconds(m.seconds)) for m in self.moves]

    def sentences(self) -> str:
        """For the derivation."""
        parts = [self.checkpoint.because]
        parts += [self.adapters.because] if self.adapters else []
        parts += [self.agents.because] if self.agents else []
        return " ".join(parts)


def beside(request: PlanRequest, shown: Candidate) -> Beside:
    """Checkpoints, adapters and environments of a topology."""
    has_owners = request.assumptions.method != "paper"
    return Beside(
        memory=_memory(request, shown) if has_owners else (),
        capacity_bytes=request.cluster.accelerator.hbm_bytes,
        shares_devices=is_colocated(shown.mode),
        moves=moves_of(request, shown),
        checkpoint=checkpointing(request, shown),
        prefill=shown.account.rollout.prefill,
        adapters=_adapters(request, shown) if request.workload.lora_rank else None,
        agents=_environments(request, shown) if request.workload.agent.env_s else None,
    )


def _memory(request: PlanRequest, shown: Candidate) -> tuple[MemoryItem, ...]:
    offload = shown.train.offload
    is_shared = is_colocated(shown.mode) and not request.cluster.accelerator.is_cpu
    return tuple(
        memory_items(
            request.model,
            request.workload,
            request.cluster,
            shown.train.assumptions,
            rollout=shown.account.rollout,
            train=shown.account.train,
            layout=shown.train.layout,
            waits_on_host=is_shared and shown.sleep.moves_state,
            keeps_state=is_shared and not shown.sleep.moves_state,
            keeps_engine=is_shared and shown.sleep.sleep_level == 0,
            offloaded_bytes=host_state_bytes(request, offload) / shown.split[1],
            offloaded_what=HELD[offload],
        )
    )


def moves_of(request: PlanRequest, shown: Candidate) -> tuple[Move, ...]:
    """Moves of a step's hand-overs that take time; none where the roles have their own devices."""
    if not is_colocated(shown.mode) or request.assumptions.method == "paper":
        return ()
    moves = hand_over_moves(
        request.model,
        request.workload,
        request.cluster,
        shown.train.assumptions,
        rollout=shown.account.rollout,
        train=shown.account.train,
        sleep=shown.sleep,
    )
    return tuple(move for move in moves if move.seconds > 0)


def checkpointing(request: PlanRequest, shown: Candidate) -> Checkpointing:
    """How often, how, and at what cost the training state of `shown` is saved."""
    hourly = max(1, round(_USUAL_INTERVAL_S / shown.step_s))
    every = request.checkpoint_every_steps or min(hourly, request.horizon_steps)
    storage = request.storage_bytes_per_s or request.assumptions.sync.disk_bytes_per_s
    account = checkpoint_account(
        request.model,
        request.workload,
        request.cluster,
        num_train_gpus=shown.split[1],
        storage_bytes_per_s=storage,
        step_s=shown.step_s,
        every_steps=every,
        is_async=request.checkpoint_is_async,
        error_frac=checkpoint_error_frac(
            request.assumptions, is_storage_measured=request.storage_bytes_per_s > 0
        ),
    )
    is_capped = not request.checkpoint_every_steps and hourly > every
    return Checkpointing(
        account=account,
        every_steps=every,
        is_async=request.checkpoint_is_async,
        storage_bytes_per_s=storage,
        last_of_steps=every if is_capped else 0,
        beyond_steps=request.horizon_steps if every > request.horizon_steps else 0,
    )


def _adapters(request: PlanRequest, shown: Candidate) -> Adapters:
    model, work, train = request.model, request.workload, shown.account.train
    merged = replace(sync_work_of(request, shown), lora_rank=0)
    whole, alone = (
        sync_account(model, request.cluster, request.assumptions.sync, w)
        for w in (merged, replace(merged, lora_rank=work.lora_rank))
    )
    number = trained_params(model, work)
    return Adapters(
        rank=work.lora_rank,
        trained_params=number,
        trained_frac=number / model.params,
        state_bytes=train.train_state_bytes_per_gpu * train.num_gpus,
        merged_bytes=whole.total_bytes,
        merged_s=whole.seconds,
        alone_bytes=alone.total_bytes,
        alone_s=alone.seconds,
        publishes_alone=work.publishes_adapters,
    )


def _environments(request: PlanRequest, shown: Candidate) -> Environments:
    work, rollout = request.workload, shown.account.rollout
    try:
        least = sandboxes_needed(work, target_s=shown.step_s)
    except PlanError:  # one trajectory spans steps: each holds a sandbox of its own
        least = work.num_sequences
    num_running = _open_at_once(request, shown)
    held_cores = num_running * work.agent.cpu_cores_per_sandbox
    return Environments(
        account=agent_account(work),
        wait_s=rollout.env_wait_s,
        num_running=num_running,
        num_sandboxes_least=least,
        held_cores=held_cores,
        held_core_hours=held_cores * shown.step_s / 3600,
        held_bytes=num_running * work.agent.bytes_per_sandbox,
    )


def _open_at_once(request: PlanRequest, shown: Candidate) -> int:
    """Trajectories under way at most: as many as are admitted, and have a slot where a waiting one keeps its own."""
    work, rollout = request.workload, shown.account.rollout
    admitted, slots = work.num_sequences, rollout.slots_per_replica
    if not shown.is_on_policy:
        admitted *= request.max_staleness_steps + 1
        slots = in_flight_slots(request, rollout)
    return min(admitted, rollout.num_replicas * slots) if work.agent.keeps_prefix else admitted
