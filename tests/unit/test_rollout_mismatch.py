"""Deliberate mismatch: what is proven stays what was sent, and what is sampled differs by the rounding alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rollout_tiny import random_ids, request, running, tiny_model, trainer_logprobs, write_weights

from rollbook.errors import EngineError
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.native.mismatch import ROUNDINGS, is_rounded
from rollbook.rollout.native.model_runner import engine_model


def rounded(model: LoadedModel, mismatch: str) -> LoadedModel:
    """The trainer's model with the same rounding, for its logprobs."""
    twin = tiny_model()
    with torch.no_grad():
        for name, tensor in twin.named_tensors().items():
            source = model.named_tensors()[name]
            tensor.copy_(ROUNDINGS[mismatch](source) if is_rounded(name, source) else source)
    return twin


@pytest.mark.parametrize("mismatch", list(ROUNDINGS))
async def test_a_mismatched_engine_samples_from_the_rounded_weights_of_each_version(mismatch: str) -> None:
    old, new, prompt = tiny_model(), tiny_model(seed=1), random_ids(12)
    async with running(old, mismatch=mismatch) as engine:
        first = await engine.generate(request(prompt, "0/0"))
        await engine.pause("keep")
        await write_weights(engine, new)
        await engine.adopt_version(1)
        await engine.resume()
        second = await engine.generate(request(prompt, "1/0"))
        live = await engine.live_weights()
        for name, tensor in new.named_tensors().items():
            assert live.read(name).equal(tensor), f"{name}: what was sent is what is proven"
        stats = await engine.stats()
    assert stats.mismatch == mismatch and 0 < stats.mismatch_error_frac < 0.2
    for model, response in ((old, first), (new, second)):
        plain = trainer_logprobs(model, prompt, response.response_ids)
        twin = trainer_logprobs(rounded(model, mismatch), prompt, response.response_ids)
        np.testing.assert_allclose(response.logprobs, twin, atol=1e-5)
        assert np.abs(response.logprobs - plain).max() > 1e-4


def test_int8_codes_of_a_row_by_hand() -> None:
    """Largest 12.7: a step of 0.1. fp8 (3 bits of mantissa) rounds 1.07 x 448 / 12.7 = 37.7 to 36 or 40."""
    row = torch.tensor([[12.7, 1.07, -0.04]])
    torch.testing.assert_close(ROUNDINGS["int8"](row), torch.tensor([[12.7, 1.1, 0.0]]))
    torch.testing.assert_close(ROUNDINGS["fp8"](row)[0, :2], torch.tensor([12.7, 36 * 12.7 / 448]))


def test_norms_embeddings_and_the_head_keep_their_precision() -> None:
    kept = {name for name, tensor in tiny_model().named_tensors().items() if not is_rounded(name, tensor)}
    assert kept == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.{i}.{norm}_layernorm.weight"
            for i in (0, 1)
            for norm in ("input", "post_attention")
        ),
    }


async def test_a_mismatched_engine_never_shares_the_trainers_memory() -> None:
    with pytest.raises(EngineError, match="mismatch is 'int8' and the engine shares"):
        async with running(tiny_model(), mismatch="int8", engine={"share_weights": True}):
            pass
    model = tiny_model()
    own = engine_model(model, dtype=torch.float32, device=torch.device("cpu"), share_weights=False)
    assert not {t.data_ptr() for t in own.named_tensors().values()} & {
        t.data_ptr() for t in model.named_tensors().values()
    }
