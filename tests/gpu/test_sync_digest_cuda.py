"""The digest on CUDA, by Triton and by plain torch operations, equals the digest on the CPU."""

from __future__ import annotations

import pytest
import torch

from rollbook.sync import digest as digest_module
from rollbook.sync.digest import COLUMNS, ROWS, digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [
    0,
    1,
    7,
    8,
    9,
    8 * COLUMNS,
    8 * COLUMNS + 3,
    8 * ROWS * COLUMNS,
    3 * 8 * ROWS * COLUMNS + 8 * COLUMNS + 11,
]


@pytest.mark.parametrize("has_triton", [True, False])
def test_cuda_digests_equal_cpu_digests(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_triton:
        monkeypatch.setattr(digest_module, "runs_triton", lambda device: False)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in SIZES]
    tensors += [torch.randn(37, 53).to(torch.bfloat16), torch.randn(300, 200)[:, 3:77], torch.tensor(1.5)]
    assert digests([t.cuda() for t in tensors]) == digests(tensors)


def test_misaligned_views_on_cuda() -> None:
    base = torch.randn(100_001).to(torch.bfloat16)
    views = [base[1:], base[4:70_000], base[3:9]]
    assert digests([base.cuda()[1:], base.cuda()[4:70_000], base.cuda()[3:9]]) == digests(views)
