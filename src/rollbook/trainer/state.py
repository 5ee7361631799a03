"""What a trainer's next step depends on: taken out of it for a checkpoint, and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rollbook.errors import CheckpointError

if TYPE_CHECKING:
    from rollbook.trainer.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """As `Trainer.state_dict`."""
    state: dict[str, Any] = {"policy": trainer.optimizer.state_dict()}
    if trainer.critic is not None:
        state["critic"] = trainer.critic.optimizer.state_dict()
    if trainer.reference is not None:
        tensors = trainer.reference.named_tensors()
        whole, local = trainer.ranks.whole, trainer.ranks.local
        state["reference"] = {n: whole(local(t.detach()), t) for n, t in tensors.items()}
    if trainer.model.lora is not None:
        state["base"] = trainer.base_digest
    return state


@torch.no_grad()
def put_back(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """As `Trainer.load_state_dict`."""
    for role, is_here in (
        ("critic", trainer.critic is not None),
        ("reference", trainer.reference is not None),
    ):
        if is_here and role not in state:
            raise CheckpointError(
                f"the checkpoint has no {role} and this run needs one",
                "resume with the algorithm the run was started with",
            )
    base = state.get("base")
    if trainer.model.lora is not None and base not in (None, trainer.base_digest):
        raise CheckpointError(
            f"the checkpoint's adapters stand on a base with the digest {base}, and {trainer.model.source} has "
            f"{trainer.base_digest}",
            "resume with the model.path (or model.seed) and model.dtype the run was started with, and its files",
        )
    trainer.optimizer.load_state_dict(state["policy"])
    if trainer.critic is not None:
        trainer.critic.optimizer.load_state_dict(state["critic"])
    if trainer.reference is not None:
        for name, tensor in trainer.reference.named_tensors().items():
            saved = state["reference"][name]
            is_sharded = trainer.ranks.is_sharded(tensor)
            trainer.ranks.local(tensor.detach()).copy_(trainer.ranks.own_rows(saved) if is_sharded else saved)
