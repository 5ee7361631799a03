"""Attention over pages against the same computed row by row: in torch's operations, and by the Triton kernel, run by
Triton's interpreter where it is installed and there is no GPU (`tests/gpu` runs it on one)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from paged_tiny import CASES, expected, make

from rollbook.rollout.native.paged_attention import attend_pages

has_triton = importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("name", CASES)
def test_torch_operations(name: str) -> None:
    case = CASES[name]
    rows = make(case, dtype=torch.float32, device="cpu")
    found = attend_pages(*rows.arguments(case))  # type: ignore[arg-type]
    torch.testing.assert_close(found[: rows.num_real].double(), expected(case, rows), atol=1e-5, rtol=1e-5)
    assert torch.isfinite(found).all()


@pytest.mark.skipif(
    not has_triton or torch.cuda.is_available(), reason="needs Triton, and runs it without a GPU"
)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", [name for name in CASES if name != "many rows"])  # minutes, interpreted
def test_triton_kernel_interpreted(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, where the kernels are defined
    from rollbook.rollout.native import paged_triton

    monkeypatch.setattr(paged_triton, "num_parts", lambda *_: parts)
    case = CASES[name]
    rows = make(case, dtype=torch.float32, device="cpu")
    found = paged_triton.attend(*rows.arguments(case))  # type: ignore[arg-type]
    torch.testing.assert_close(found[: rows.num_real].double(), expected(case, rows), atol=1e-5, rtol=1e-5)
    assert torch.isfinite(found).all()
