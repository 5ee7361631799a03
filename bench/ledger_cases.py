"""Turn a published measurement into ledger calls: which model, device and workload a case describes.

Nothing here is tuned to a case. An adapter takes the configuration in the words of `ledger_reading.py`,
asks the ledger, and gives back pairs of measured and predicted numbers; where an input that matters was not published,
it says so. What a whole class of cases leaves out is assumed once, in the constants of its adapter's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ledger_reading import as_read
from ledger_serving_cases import decode_case
from ledger_step_cases import step_case
from ledger_sync_cases import sync_case
from ledger_train_cases import train_case
from ledger_words import Case, NotCovered, accelerator_of, count_of, dtype_of, find_model, middle, within
from rollbook.errors import RunError
from rollbook.ledger.account import Range
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import replica_weight_bytes
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.switch import SleepChoice, hand_over


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured number beside its prediction."""

    case_id: str
    family: str
    category: str
    metric: str
    measured: float
    predicted: Range

    @property
    def error_frac(self) -> float:
        """Relative error, signed."""
        return self.predicted.value / self.measured - 1

    @property
    def is_in_range(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


def compare(case: Case, assumptions: Assumptions) -> list[Comparison]:
    """Every number of the case that the ledger predicts.

    Raises:
        NotCovered: with the reason.
    """
    adapter = ADAPTERS.get(case["category"])
    if adapter is None:
        raise NotCovered(f"no model for category {case['category']}")
    try:
        case = as_read(case)
        found = [
            Comparison(case["id"], case["family"], case["category"], metric, measured, predicted)
            for metric, measured, predicted in adapter(case, assumptions)
            if measured
        ]
    except RunError as error:
        raise NotCovered(error.what) from error
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise NotCovered(f"the case is not described in a form the adapter reads ({error!r})") from error
    if not found:
        raise NotCovered("it measures nothing that the ledger predicts")
    return found


def switch_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Sleep and wake of an engine at level 1."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    cluster = Cluster(accelerator=accelerator_of(config["gpu"]), num_gpus=count_of(config.get("tp", 1)))
    layout = ReplicaLayout(tp_size=cluster.num_gpus, weight_dtype=dtype_of(config["model"]))
    moves = hand_over(
        model,
        cluster,
        assumptions.switch,
        num_gpus=cluster.num_gpus,
        rollout_weights_bytes_per_gpu=replica_weight_bytes(model, layout),
        state_bytes_per_param=0.0,
        choice=SleepChoice(sleep_level=1),
    )
    seconds = {move.name: move.seconds for move in moves}
    for key, name in (
        ("sleep_s", "engine sleeps"),
        ("wake_s", "engine wakes"),
        ("level1_wake_s", "engine wakes"),
    ):
        if key in measured:
            yield key, middle(measured[key]), within(seconds[name], 1.0)


ADAPTERS: dict[str, Callable[[Case, Assumptions], Iterator[tuple[str, float, Range]]]] = {
    "decode": decode_case,
    "train_mfu": train_case,
    "weight_sync": sync_case,
    "rl_step": step_case,
    "memory_switch": switch_case,
}
