"""What only vLLM needs to know; everything else is in `[rollout]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollbook.section import Section


class VllmConfig(Section):
    """The `[rollout.vllm]` table."""

    in_process: bool = True
    """vLLM steps in this process, on the engine's thread: faster, and publications write straight into its parameters,
    but only one such engine fits a process, and none beside torch.distributed. False: vLLM runs in processes of its
    own."""
    tp_size: int = Field(1, ge=1)
    """GPUs that share one copy of the weights. More than one needs `in_process = false`."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Longest sequence; None takes the model's, as far as the KV pool holds it."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"auto" reads the weights from the model folder; "dummy" starts with random ones and serves only once a
    publication committed, as `rollbook train` always does."""
    compile: bool = True
    """Compile the model and capture CUDA graphs at the start (about a minute); False computes eagerly. Not used on a
    CPU."""
    sleep_mode: bool = True
    """On CUDA, allocate so that `sleep` gives memory back; cannot be combined with expandable segments."""
    trust_remote_code: bool = False
    """Run Python code from the model folder."""
    call_deadline_s: float = Field(300.0, gt=0.0)
    """Longest a control call into vLLM's own process may take."""
