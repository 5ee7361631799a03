"""The kernel that attends over pages, compiled, against the same computed row by row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from paged_tiny import CASES, expected, make

from rollbook.kernels import has_triton
from rollbook.rollout.native.paged_attention import attend_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]


@pytest.mark.parametrize("parts", [None, 1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str, dtype: torch.dtype, parts: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollbook.rollout.native import paged_triton

    if parts is not None:
        monkeypatch.setattr(paged_triton, "num_parts", lambda *_: parts)
    case = CASES[name]
    rows = make(case, dtype=dtype, device="cuda")
    found = attend_pages(*rows.arguments(case))  # type: ignore[arg-type]
    # bfloat16: weights and the result are rounded to 8 bits, and the result is a mean of values of size 1.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found[: rows.num_real].double(), expected(case, rows), atol=tolerance, rtol=tolerance
    )
    assert torch.isfinite(found).all()
