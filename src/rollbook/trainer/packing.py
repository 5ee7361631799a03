"""From train sequences to packed micro batches within a token budget.

    plan_micro_batches   which sequences go together (best fit, largest first)
    deal_micro_batches   the same for several ranks: as many for each, of similar size at a time
    pack                 their tokens laid end to end, for the model and for the loss

The model's tokens and the loss's tokens are not the same row: the model computes a shared prompt once and never
the last token of a sequence, which predicts nothing; the loss sees each sequence whole.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.errors import DataError
from rollbook.modeling.attention import PackedLayout, Segment
from rollbook.trainer.objective import MicroBatch
from rollbook.types import Floats, TrainSequence

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What the model computes for one micro batch. S is the number of action tokens, each predicted once."""

    input_ids: Tensor
    """[N] int64."""
    position_ids: Tensor
    """[N] int64, from 0 in each sequence; members continue their shared prompt."""
    layout: PackedLayout
    predictor_rows: Tensor
    """[S] int64. Row of the N that predicts each action token: the token before it in its own sequence."""
    targets: Tensor
    """[S] int64 ids of the action tokens."""
    token_positions: Tensor
    """[S] int64. Where each action token lies among the T tokens of the MicroBatch."""


def plan_micro_batches(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    max_tokens: int,
    *,
    share_prompts: bool,
    num_micro_batches: int | None = None,
) -> list[list[int]]:
    """Split `indices` into micro batches of at most `max_tokens` computed tokens.

    Args:
        sequences: of the batch.
        indices: those of one mini batch (and rank).
        max_tokens: budget; a longer sequence is alone.
        share_prompts: members of a group that lie in one micro batch cost their prompt once.
        num_micro_batches: make exactly this many, at least as many as needed, so that every rank calls the
            same number of collectives. Large ones are split; where sequences run out, empty ones are added.
    Returns:
        Each index once; members of a group next to each other, in order.
    Raises:
        DataError: `num_micro_batches` is smaller than the budget needs.
    """
    units = _units(sequences, indices, max_tokens, share_prompts)
    plan: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, micro batch), ascending
    for cost, members in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        tightest = bisect.bisect_left(rooms, (cost, 0))
        if tightest < len(rooms):
            left, which = rooms.pop(tightest)
            plan[which] += members
            bisect.insort(rooms, (left - cost, which))
        else:
            bisect.insort(rooms, (max_tokens - cost, len(plan)))
            plan.append(list(members))
    if num_micro_batches is not None:
        if num_micro_batches < len(plan):
            raise DataError(
                f"{len(plan)} micro batches of {max_tokens} tokens are needed and {num_micro_batches} were asked for",
                "take the largest number over all ranks",
            )
        while len(plan) < num_micro_batches:
            largest = max(plan, key=len, default=[])
            half = len(largest) // 2
            plan.append(largest[half:] if half else [])
            if half:
                del largest[half:]
    return [sorted(members, key=lambda i: (sequences[i].group_id, i)) for members in plan]


def deal_micro_batches(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    max_tokens: int,
    *,
    share_prompts: bool,
    num_ranks: int,
) -> list[list[list[int]]]:
    """The micro batches of each rank. All ranks get the same number, empty ones where sequences run out: they compute
    together, layer by layer, so those that compute at the same time are of similar size.

    Returns:
        [num_ranks][micro batches] indices; each index once.
    """

    def plan(most: int, num_micro_batches: int | None = None) -> list[list[int]]:
        return plan_micro_batches(
            sequences, indices, most, share_prompts=share_prompts, num_micro_batches=num_micro_batches
        )

    dealt = plan(max_tokens)
    if num_ranks == 1 or not dealt:
        return [list(dealt) for _ in range(num_ranks)]
    num_tokens = sum(computed_tokens(sequences[i]) for i in indices)

    def cost(members: Sequence[int]) -> int:
        return sum(tokens for tokens, _ in _units(sequences, members, num_tokens, share_prompts))

    number = -(-len(dealt) // num_ranks) * num_ranks
    even = -(-sum(map(cost, dealt)) // number)
    budget = max_tokens
    for smaller in (int(even * slack) for slack in (1.0, 1.05, 1.1, 1.2, 1.4)):
        if smaller < max_tokens and len(plan(smaller)) <= number:
            budget = smaller
            break
    dealt = plan(budget, number)
    dealt.sort(key=lambda members: (-cost(members), members))
    turns = [dealt[start : start + num_ranks] for start in range(0, number, num_ranks)]
    turns = [turn if n % 2 == 0 else turn[::-1] for n, turn in enumerate(turns)]
    return [[turn[rank] for turn in turns] for rank in range(num_ranks)]


def pack(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    device: torch.device,
    *,
    share_prompts: bool,
) -> tuple[ModelInputs, MicroBatch]:
    """Lay the sequences of `indices` end to end.

    Without sequences (a filler that keeps ranks in step) the model computes one token and nothing is predicted.

    Raises:
        DataError: an action token at position 0, which nothing predicts.
    """
    chosen = [sequences[i] for i in indices]
    return _model_inputs(chosen, device, share_prompts), _micro_batch(chosen, indices, device)


def computed_tokens(sequence: TrainSequence) -> int:
    """Tokens the model must see: all before the last action token."""
    actions = np.flatnonzero(sequence.action_mask)
    return int(actions[-1]) if len(actions) else 0


def shared_prompt_tokens(members: Sequence[TrainSequence]) -> int:
    """Leading tokens that all members with actions have in common and none sampled."""
    members = [m for m in members if m.action_mask.any()]
    if not members:
        return 0
    limit = min(int(np.argmax(m.action_mask)) for m in members)
    first = members[0].token_ids[:limit]
    for member in members[1:]:
        differs = np.flatnonzero(first[:limit] != member.token_ids[:limit])
        if len(differs):
            limit = int(differs[0])
    return limit


def _units(
    sequences: Sequence[TrainSequence], indices: Sequence[int], max_tokens: int, share_prompts: bool
) -> list[tuple[int, list[int]]]:
    """(computed tokens, members): whole groups where they fit, parts of them where they don't."""
    if not share_prompts:
        return [(computed_tokens(sequences[i]), [i]) for i in indices]
    groups: dict[int, list[int]] = {}
    for i in indices:
        groups.setdefault(sequences[i].group_id, []).append(i)
    units: list[tuple[int, list[int]]] = []
    for members in groups.values():
        prompt = shared_prompt_tokens([sequences[i] for i in members])
        part: list[int] = []
        cost = prompt
        for i in members:
            own = computed_tokens(sequences[i]) - prompt
            if part and cost + own > max_tokens:
                units.append((cost, part))
                part, cost = [], prompt
            part.append(i)
            cost += own
        units.append((cost, part))
    return units


def _model_inputs(chosen: Sequence[TrainSequence], device: torch.device, share_prompts: bool) -> ModelInputs:
    ids: list[Indices] = []
    positions: list[Indices] = []
    segments: list[Segment] = []
    rows: list[Indices] = []
    targets: list[Indices] = []
    token_positions: list[Indices] = []
    num_rows = num_tokens = 0

    def add(tokens: NDArray[np.int32], first_position: int, prefix: int | None) -> None:
        nonlocal num_rows
        if len(tokens) == 0:
            return
        ids.append(tokens.astype(np.int64))
        positions.append(np.arange(first_position, first_position + len(tokens)))
        segments.append(Segment(num_rows, len(tokens), prefix))
        num_rows += len(tokens)

    for _, group in itertools.groupby(chosen, key=lambda s: s.group_id):
        members = list(group)
        prompt = shared_prompt_tokens(members) if share_prompts and len(members) > 1 else 0
        prefix, prompt_start = None, num_rows
        if prompt:
            prefix = len(segments)
            add(members[0].token_ids[:prompt], 0, None)
        for member in members:
            actions = np.flatnonzero(member.action_mask)
            if len(actions):
                if actions[0] == 0:
                    raise DataError(
                        f"sequence {member.group_id}/{member.member_idx} has an action token at position 0",
                        "a trajectory needs at least one prompt token",
                    )
                own_start = num_rows - prompt
                add(member.token_ids[prompt : actions[-1]], prompt, prefix)
                before = actions - 1
                rows.append(np.where(before < prompt, prompt_start + before, own_start + before))
                targets.append(member.token_ids[actions].astype(np.int64))
                token_positions.append(num_tokens + actions)
            num_tokens += member.num_tokens
    if num_rows == 0:
        add(np.zeros(1, np.int32), 0, None)

    def to_device(parts: list[Indices]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).to(device)

    return ModelInputs(
        input_ids=to_device(ids),
        position_ids=to_device(positions),
        layout=PackedLayout(segments, num_rows, device),
        predictor_rows=to_device(rows),
        targets=to_device(targets),
        token_positions=to_device(token_positions),
    )


def _micro_batch(chosen: Sequence[TrainSequence], indices: Sequence[int], device: torch.device) -> MicroBatch:
    def masks(parts: list[NDArray[np.bool_]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *parts])).to(device)

    def floats(name: str, parts: list[Floats | None]) -> Tensor | None:
        missing = sum(part is None for part in parts)
        if missing == len(parts):
            return None
        if missing:
            raise DataError(
                f"{missing} of {len(parts)} sequences of a micro batch have no {name}",
                "fill them for every sequence of the batch or for none",
            )
        joined = np.concatenate([part for part in parts if part is not None])
        return torch.from_numpy(joined.astype(np.float32, copy=False)).to(device)

    lengths = [s.num_tokens for s in chosen]
    advantages = floats("advantages", [s.advantages for s in chosen])
    behavior = floats("behavior logprobs", [s.behavior_logprobs for s in chosen])
    weights = [s.importance_weights for s in chosen]
    if any(w is not None for w in weights):
        weights = [np.ones(n, np.float32) if w is None else w for n, w in zip(lengths, weights)]
    zeros = torch.zeros(sum(lengths), device=device)
    return MicroBatch(
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
        sequence_idx=torch.tensor(list(indices), dtype=torch.int64),
        action_mask=masks([s.action_mask for s in chosen]),
        loss_mask=masks([s.loss_mask for s in chosen]),
        advantages=zeros if advantages is None else advantages,
        behavior_logprobs=zeros if behavior is None else behavior,
        proximal_logprobs=floats("proximal logprobs", [s.proximal_logprobs for s in chosen]),
        importance_weights=floats("importance weights", weights),
        reference_logprobs=floats("reference logprobs", [s.reference_logprobs for s in chosen]),
        teacher_logprobs=floats("teacher logprobs", [s.teacher_logprobs for s in chosen]),
        values=floats("values", [s.values for s in chosen]),
        returns=floats("returns", [s.returns for s in chosen]),
    )
