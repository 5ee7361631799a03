"""Parts are made from the options that are theirs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from rollbook.config.run_config import RunConfig
from rollbook.controller.build import _evaluator
from rollbook.envs.dataset import Prompts
from rollbook.types import Prompt
from tiny_run import TINY


class Model:
    class facts:
        max_position = 32


def test_an_evaluation_samples_as_its_own_options_say() -> None:
    """Not at the temperature of the training, and with a seed that training never draws from."""
    options = {"num_prompts": 2, "temperature": 0.5}
    run = {**TINY["run"], "seed": 7}
    rollout = {**TINY["rollout"], "stop_strings": ["="]}
    config = RunConfig.model_validate({**TINY, "run": run, "rollout": rollout, "eval": options})
    held_out = [Prompt(prompt_id=str(n), prompt_ids=np.ones(1, np.int32), source="s") for n in range(3)]
    evaluator = _evaluator(
        config, Prompts(train=[], held_out=held_out), cast(Any, None), None, cast(Any, Model())
    )
    assert [prompt.prompt_id for prompt in evaluator.prompts] == ["0", "1"]
    sampling = evaluator.sampling
    assert (sampling.temperature, sampling.max_response_tokens, sampling.stop_strings) == (0.5, 6, ("=",))
    assert (evaluator.seed, evaluator.max_context_tokens) == (8, 32)
