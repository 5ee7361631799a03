"""The `[rollout]` table."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from rollbook.rollout.config import RolloutConfig
from rollbook.types import SamplingParams


def test_every_field_is_documented() -> None:
    assert [name for name, field in RolloutConfig.model_fields.items() if not field.description] == []


def test_sampling_is_complete_and_neutral_by_default() -> None:
    """BR-063: nothing is left for a model folder to fill in."""
    assert RolloutConfig(max_response_tokens=7).sampling() == SamplingParams(
        max_response_tokens=7,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        stop_token_ids=(),
        stop_strings=(),
        ignore_eos=False,
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_pool_tokens": 16, "page_tokens": 32}, "less than one page of 32 tokens"),
        ({"stop_strings": ("",)}, "would end every response"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"num_slot": 3}, "Extra inputs"),
        ({"temperature": -1.0}, "greater than or equal to 0"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate(values)


def test_the_config_loads_without_torch() -> None:
    code = "import sys, rollbook.rollout.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
