"""What must be true of a run, computed from what it left on disk and from weights noted beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.loop import Controller
from rollbook.modeling.attention import packed_layout
from rollbook.modeling.load import load_model
from rollbook.sync.report import PublicationReport
from tiny_run import RunResult


class NotedWeights:
    """A fault that is none: keeps the trainer's weights at the moment of each publication, by version."""

    def __init__(self) -> None:
        self.of_version: dict[int, dict[str, Tensor]] = {}

    def __call__(self, controller: Controller) -> None:
        plain = controller.publisher.publish

        async def publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            self.of_version[weight_version] = {
                name: tensor.detach().clone() for name, tensor in controller.trainer.export_weights()
            }
            return await plain(weight_version, moved=moved)

        controller.publisher.publish = publish  # type: ignore[method-assign]


def versions_of(row: dict[str, Any]) -> list[int]:
    """Weight version of each response token of a trajectory, as the engine told it."""
    return [
        run["weight_version"]
        for turn in row["turns"]
        for run in turn["version_runs"]
        for _ in range(run["num_tokens"])
    ]


def rows(run: RunResult) -> Iterator[dict[str, Any]]:
    """Every trajectory with tokens."""
    for step in range(run.num_steps):
        yield from (row for row in run.trajectories(step) if row["turns"])


def steps_of_versions(run: RunResult) -> dict[int, int]:
    """How many steps' updates each published version contains. A publication before the first step contains none."""
    return {event["weight_version"]: event.get("step", -1) + 1 for event in run.events_of("publication")}


def staleness_of_tokens(run: RunResult) -> list[int]:
    """Steps between the weights that sampled a token and those that were trained, for every trained token."""
    steps = steps_of_versions(run)
    return [
        row["step"] - steps[version]
        for row in rows(run)
        if row["loss_mask"] is not None
        for version in versions_of(row)
    ]


def label_gaps(run: RunResult, weights: NotedWeights, *, shift: int = 0) -> np.ndarray:
    """abs(engine's logprob - logprob under the weights of the version that the token is labeled with), every token.

    With `shift` the weights of that many versions later: how much a wrong label shows.
    """
    config = load_config(run.folder / "config.toml", [], RunConfig)
    model = load_model(config.model)
    gaps: list[float] = []
    newest = max(weights.of_version)
    for row in rows(run):
        versions = np.array(versions_of(row))
        ids = torch.tensor(row["token_ids"])
        start = row["num_prompt_tokens"]
        for version in np.unique(versions):
            tensors = weights.of_version[min(int(version) + shift, newest)]
            with torch.no_grad():
                for name, live in model.named_tensors().items():
                    live.copy_(tensors[name])
                hidden = model.hidden_states(
                    ids[None], torch.arange(len(ids))[None], packed=packed_layout([0, len(ids)])
                )[0]
                logits = hidden @ model.lm_head().weight.T / config.rollout.temperature
            expected = (
                logits.double().log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()[start - 1 :]
            )
            reported = np.array(row["behavior_logprobs"][start:])
            gaps += np.abs(expected - reported)[versions == version].tolist()
    return np.array(gaps)
