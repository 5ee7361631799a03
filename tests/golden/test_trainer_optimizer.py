"""AdamW over master weights against torch's, schedules by hand, and what is never applied."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rollbook.errors import CheckpointError
from rollbook.trainer.config import OptimizerFields
from rollbook.trainer.optimizer import AdamW, learning_rate, lower_precision


def _parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": nn.Parameter(torch.randn(5, 3, generator=generator)),
        "norm": nn.Parameter(torch.randn(4, generator=generator)),
    }


def _backward(parameters: dict[str, nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for parameter in parameters.values():
        loss = loss + (parameter.float() * torch.randn(parameter.shape, generator=generator)).sum() * scale
    loss.backward()  # type: ignore[no-untyped-call]


def test_ten_updates_equal_torch_adamw_with_decay_on_matrices_only() -> None:
    config = OptimizerFields(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3, max_grad_norm=1.5)
    ours, theirs = _parameters(), _parameters()
    optimizer = AdamW(ours, config)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.3},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    for update in range(10):
        _backward(ours, update)
        _backward(theirs, update)
        norm = nn.utils.clip_grad_norm_(list(theirs.values()), 1.5)
        report = optimizer.step()
        reference.step()
        reference.zero_grad()
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert report.is_clipped == (norm.item() > 1.5)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_small_updates_accumulate_in_master_weights_under_bfloat16() -> None:
    """A step of 1e-4 on weights near 1 is below bfloat16's spacing of 2^-7: only the masters keep it."""
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2))}
    masters = lower_precision(parameters, torch.bfloat16)
    optimizer = AdamW(parameters, OptimizerFields(lr=1e-4), masters=masters)
    for _ in range(100):
        parameters["matrix"].sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert parameters["matrix"].dtype == torch.bfloat16
    assert optimizer.masters[0][0, 0].item() == pytest.approx(1 - 100 * 1e-4, rel=1e-4)
    assert parameters["matrix"][0, 0].item() == pytest.approx(0.99, abs=2**-8)


def test_a_report_says_whether_a_bit_of_the_compute_weights_moved() -> None:
    """Weights of 1 under bfloat16: the first step of 0.001 rounds to nothing (half a spacing down is 2^-9), the second
    does not."""
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2))}
    optimizer = AdamW(
        parameters, OptimizerFields(lr=1e-3), masters=lower_precision(parameters, torch.bfloat16)
    )
    moved = []
    for _ in range(2):
        before = parameters["matrix"].clone()
        parameters["matrix"].sum().backward()  # type: ignore[no-untyped-call]
        report = optimizer.step()
        assert report.has_moved == (not torch.equal(before, parameters["matrix"]))
        moved.append(report.has_moved)
    assert moved == [False, True]
    parameters["matrix"].sum().backward()  # type: ignore[no-untyped-call]
    assert not optimizer.step(0.0).has_moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_gradient_moments_and_decay_move_weights_and_the_report_says_so(dtype: torch.dtype) -> None:
    """As in a step whose advantages are all zero. Only a rate of 0 leaves every bit, that of a negative zero too."""
    parameters = {"matrix": nn.Parameter(torch.tensor([[1.0, -0.0], [2.0, 3.0]]))}
    fields = OptimizerFields(lr=0.1, weight_decay=0.1)
    optimizer = AdamW(parameters, fields, masters=lower_precision(parameters, dtype))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for slope, rate, moves in ((0.0, 0.0, None), (0.0, 0.1, True), (1.0, 0.1, True), (0.0, 0.1, True)):
        before = parameters["matrix"].detach().clone()
        (parameters["matrix"] * slope).sum().backward()  # type: ignore[no-untyped-call]
        report = optimizer.step(rate)
        is_same = torch.equal(before.view(bits), parameters["matrix"].detach().view(bits))
        assert report.has_moved == (not is_same)
        assert moves is None or report.has_moved == moves


def test_a_step_that_the_published_dtype_does_not_resolve_has_not_moved() -> None:
    """Weights of 1: a step of 1e-4 is seen in float32 and not in bfloat16, one of 1e-9 in neither."""
    for lr, dtype, has_moved in (
        (1e-9, None, False),
        (1e-4, None, True),
        (1e-4, torch.bfloat16, False),
        (1e-2, torch.bfloat16, True),
    ):
        parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "vector": nn.Parameter(torch.ones(2))}
        optimizer = AdamW(parameters, OptimizerFields(lr=lr), published_dtype=dtype)
        sum(p.sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
        assert optimizer.step().has_moved == has_moved


@pytest.mark.parametrize("moving", ["first", "last"])
def test_the_weight_that_moves_is_found_whichever_it_is(moving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With portions of one tensor, and with everything in one; the update itself is the same."""
    results = []
    for portion_bytes in (1, 1 << 20):
        monkeypatch.setattr("rollbook.trainer.optimizer.COMPARED_BYTES", portion_bytes)
        names = ("first", "middle", "last")
        parameters = {name: nn.Parameter(torch.ones(2, 2)) for name in names}
        optimizer = AdamW(parameters, OptimizerFields(lr=0.1))
        parameters[moving].sum().backward()  # type: ignore[no-untyped-call]
        assert optimizer.step().has_moved
        results.append([parameters[name].detach().clone() for name in names])
        assert [not torch.equal(p, torch.ones(2, 2)) for p in results[-1]] == [n == moving for n in names]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_micro_batches_are_summed_in_float32_under_bfloat16() -> None:
    """1 + 100 x 2^-9 is 1.1953; added one by one in bfloat16 it would stay 1."""
    parameters = {"matrix": nn.Parameter(torch.zeros(1, 1))}
    optimizer = AdamW(parameters, OptimizerFields(), masters=lower_precision(parameters, torch.bfloat16))
    for scale in [1.0] + [2.0**-9] * 100:
        (parameters["matrix"] * scale).sum().backward()
    assert optimizer.gradients()[0].item() == pytest.approx(1 + 100 * 2.0**-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(poison: float) -> None:
    parameters = _parameters()
    optimizer = AdamW(parameters, OptimizerFields(lr=0.1, weight_decay=0.1))
    _backward(parameters, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    _backward(parameters, 1, scale=poison)
    report = optimizer.step()
    assert not report.is_applied
    assert not math.isfinite(report.grad_norm)
    after = optimizer.state_dict()
    assert (after["num_updates"], after["num_skipped"]) == (1, 1)
    for part in ("masters", "means", "mean_squares"):
        for name in parameters:
            assert torch.equal(after[part][name], before[part][name])
    _backward(parameters, 2)
    assert optimizer.step().is_applied  # the poisoned gradient is gone


def test_learning_rates_by_hand() -> None:
    """Peak 1, two updates of warm-up, then to a tenth at update 10."""

    def rates(schedule: str, updates: list[int]) -> list[float]:
        config = OptimizerFields.model_validate(
            {"lr": 1.0, "schedule": schedule, "warmup_updates": 2, "min_lr_frac": 0.1}
        )
        return [learning_rate(config, update, 10) for update in updates]

    assert rates("constant", [0, 1, 2, 9, 50]) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear", [0, 1, 2, 6, 10, 50]) == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    # cosine at half way: 0.1 + 0.9 x (1 + cos(pi / 2)) / 2 = 0.55; at a quarter 0.1 + 0.9 x 0.853553
    assert rates("cosine", [2, 4, 6, 10]) == pytest.approx([1.0, 0.868198, 0.55, 0.1], abs=1e-6)


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    optimizer = AdamW(_parameters(), OptimizerFields())
    state = optimizer.state_dict()
    other = AdamW({"matrix": nn.Parameter(torch.zeros(5, 3))}, OptimizerFields())
    with pytest.raises(CheckpointError, match="differ in 1 tensors, first norm"):
        other.load_state_dict(state)
    wide = AdamW(
        {"matrix": nn.Parameter(torch.zeros(6, 3)), "norm": nn.Parameter(torch.zeros(4))}, OptimizerFields()
    )
    with pytest.raises(CheckpointError, match=r"matrix is \[5, 3\] in the checkpoint and \[6, 3\]"):
        wide.load_state_dict(state)
