"""Packed attention and the trainer on CUDA: flash attention over shared prompts, and one update in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch

from rollbook.modeling.attention import PackedLayout, Segment, packed_attention
from rollbook.trainer.objective import SupervisedObjective
from trainer_tiny import groups, tiny_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEGMENTS = [Segment(0, 40), Segment(40, 30, 0), Segment(70, 1, 0), Segment(71, 200, 0), Segment(271, 150)]
NUM_TOKENS = 421


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_flash_attention_sees_what_the_tiles_see(window: int | None, heads: tuple[int, int]) -> None:
    """bfloat16 against float32 tiles on the CPU: unit-normal inputs, so one rounding is 2^-8 of about 1."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, h, NUM_TOKENS, 64, generator=generator) for h in (heads[0], heads[1], heads[1])]
    weights = torch.randn(1, NUM_TOKENS, heads[0], 64, generator=generator)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float32)):
        layout = PackedLayout(SEGMENTS, NUM_TOKENS, torch.device(device))
        inputs = [t.to(device, dtype).requires_grad_() for t in tensors]
        out, _ = packed_attention(None, *inputs, None, scaling=0.125, packed=layout, sliding_window=window)
        grads = torch.autograd.grad(out, inputs, weights.to(device, dtype))
        results.append([t.detach().float().cpu() for t in (out, *grads)])
    for exact, flash, tiles in zip(*results):
        torch.testing.assert_close(tiles, exact, rtol=1e-3, atol=2e-3)  # TF32 may be on
        assert (flash - exact).abs().max() < 0.02 * max(1.0, exact.abs().max().item())


def test_one_update_on_cuda_is_the_update_on_the_cpu() -> None:
    """float32 on both: gradient norms within 1e-4, loss within 1e-5."""
    values = {}
    for device in ("cpu", "cuda"):
        trainer = tiny_trainer(model={"device": device})
        batch = trainer.make_batch(groups(4, 4), step=0, weight_version=0)
        values[device] = trainer.update(batch, SupervisedObjective())
    for name, tolerance in (("warmup/loss", 1e-4), ("actor/grad_norm", 1e-3)):
        assert values["cuda"][name].result() == pytest.approx(values["cpu"][name].result(), rel=tolerance)


def test_shared_prompts_give_the_plain_logprobs_in_bfloat16_on_cuda() -> None:
    outputs = []
    for share_prompts in (True, False):
        trainer = tiny_trainer(
            model={"device": "cuda", "dtype": "bfloat16", "hidden_size": 64, "initializer_range": 0.1},
            share_prompts=share_prompts,
        )
        batch = trainer.make_batch(copy.deepcopy(groups(6, 4, max_response=30)), step=0, weight_version=0)
        trainer.fill_proximal(batch)
        outputs.append([s.proximal_logprobs for s in batch.sequences])
    for shared, plain in zip(*outputs):
        assert shared is not None
        assert abs(shared - plain).max() < 0.1
