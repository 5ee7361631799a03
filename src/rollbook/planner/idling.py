"""Who leaves shared GPUs while the other side has them: engines, the training state, both or neither.

    neither    engines and trainer lie side by side: what a trainer at work leaves is the engines'
    engines    they sleep while the trainer works; its state stays, so they have what that leaves
    both       the state waits in host memory, too, and crosses the host link twice: engines have all they may take

What stays saves its moves and takes KV pool from the engines: fewer slots, more waves. Both moments have to fit, and
the shortest step of those that do is taken; of equal ones the one that moves less.
"""

from __future__ import annotations

from dataclasses import replace

from rollbook.ledger.memory import TrainMemory, train_memory
from rollbook.ledger.step import shared_memory_frac
from rollbook.ledger.switch import SleepChoice
from rollbook.planner.candidate import Candidate, TrainChoice
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import counted, format_bytes, percent, seconds

_SLEEPING_LEVEL = 2
"""Where nobody says it: the publication brings the weights back."""


def has_choice(request: PlanRequest) -> bool:
    """The paper account hands everything over, and on a processor nothing has to make room."""
    return request.assumptions.method != "paper" and not request.cluster.accelerator.is_cpu


def sleeps_of(request: PlanRequest) -> tuple[SleepChoice, ...]:
    """Those worth asking about, what moves least first."""
    asked, level = request.idle_state, request.sleep_level
    sleeping = SleepChoice(
        sleep_level=_SLEEPING_LEVEL if level is None else level,
        rebuilds_engine=request.rebuilds_engine,
        moves_state=asked != "device",
    )
    if not has_choice(request):
        return (sleeping,)
    found = []
    if asked != "host":
        staying = replace(sleeping, moves_state=False)
        if level is None and not request.rebuilds_engine:
            found.append(replace(staying, sleep_level=0))
        found.append(staying)
    # An engine that stays awake gains nothing from a state that leaves.
    if asked == "host" or (asked == "auto" and sleeping.sleep_level):
        found.append(sleeping)
    return tuple(found)


def held_bytes(request: PlanRequest, train: TrainChoice, sleep: SleepChoice) -> float:
    """Of a shared GPU, what the trainer holds while the engines are awake: all of it where they never sleep."""
    if not has_choice(request) or (sleep.sleep_level and sleep.moves_state):
        return 0.0
    memory = memory_of(request, train)
    return memory.total if sleep.sleep_level == 0 else resident_bytes(memory)


def memory_of(request: PlanRequest, train: TrainChoice) -> TrainMemory:
    """Of one GPU while `train` works."""
    return train_memory(
        request.model,
        request.workload,
        train.assumptions,
        num_gpus=train.side.num_gpus,
        layout=train.layout,
    )


def resident_bytes(memory: TrainMemory) -> float:
    """Of these what stays between two micro batches."""
    return memory.state + memory.frozen + memory.whole


def sharing_words(shown: Candidate) -> str:
    """A clause on who leaves; empty where nobody shares, or had a choice."""
    if not shown.idles:
        return ""
    gpus = "GPU" if shown.split[0] == 1 else "GPUs"
    if shown.sleep.moves_nothing:
        return f"engines and trainer stay on the {gpus} together"
    engines = "engines sleep" if shown.sleep.sleep_level else "engines stay awake"
    if shown.sleep.moves_state:
        return f"{engines} while the trainer works, and its state waits in host memory while they generate"
    return f"{engines} while the trainer works, and its state stays on the {gpus}"


def sharing_sentence(request: PlanRequest, shown: Candidate) -> str:
    """Why they share so, against the other ways; empty where nobody shares, or had a choice."""
    if not shown.idles:
        return ""
    head = f"On shared GPUs {sharing_words(shown)}"
    if len(shown.idles) == 1:
        return f"{head}, as was asked for."
    why = _why_moved(request, shown) if shown.sleep.moves_state else _why_kept(request, shown)
    return f"{head}: {why}."


def _why_kept(request: PlanRequest, shown: Candidate) -> str:
    rollout, held = shown.account.rollout, held_bytes(request, shown.train, shown.sleep)
    accelerator, assumptions = request.cluster.accelerator, request.assumptions
    free_frac = shared_memory_frac(request.cluster, assumptions)
    left_frac = shared_memory_frac(request.cluster, assumptions, held)
    room = f"its {format_bytes(held)} a GPU leave engines"
    if shown.sleep.sleep_level == 0:
        room = f"a trainer at work, with {format_bytes(held)} a GPU, leaves engines"
    if left_frac == free_frac:
        text = f"{room} the {percent(free_frac)} that they may take in any case"
    else:
        pool = format_bytes(rollout.kv_pool_bytes)
        text = (
            f"{room} {format_bytes(left_frac * accelerator.hbm_bytes)} of {format_bytes(accelerator.hbm_bytes)}, with "
            f"{pool} of KV for the {counted(rollout.slots_per_replica, 'slot')} of a replica"
        )
    moved = next((idle for idle in shown.idles if idle.sleep.moves_state), None)
    if moved is None:
        return text
    if moved.why_not:
        return f"{text}; waiting in host memory does not fit ({moved.why_not[0]})"
    return (
        f"{text}; a state that waits in host memory would make hand-overs of {seconds(moved.switch_s)} instead of "
        f"{seconds(shown.account.seconds.switch) if shown.account.seconds.switch else 'none'}, and a step of "
        f"{moved.step_words}"
    )


def _why_moved(request: PlanRequest, shown: Candidate) -> str:
    kept = next(idle for idle in reversed(shown.idles) if not idle.sleep.moves_state)
    held = format_bytes(held_bytes(request, shown.train, kept.sleep))
    if kept.why_not:
        return f"with {held} of it on each GPU the engines would have no room ({kept.why_not[0]})"
    return (
        f"its {held} a GPU would leave a replica {format_bytes(kept.kv_pool_bytes)} of KV for "
        f"{counted(kept.num_slots, 'slot')} instead of {format_bytes(shown.account.rollout.kv_pool_bytes)} for "
        f"{shown.account.rollout.slots_per_replica}, and a step of {kept.step_words}, more than hand-overs of "
        f"{seconds(shown.account.seconds.switch)} cost"
    )
