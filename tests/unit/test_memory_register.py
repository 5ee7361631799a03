"""Counting memory: every owner from its own tensors, shared bytes once."""

from __future__ import annotations

import pytest
import torch

from rollbook.memory.register import Register
from rollbook.observe.values import Last


def test_owners_are_counted_from_their_tensors_as_they_are_now() -> None:
    """1,000 float32 weights and as many gradients: 4,000 bytes each; dropped gradients are 0."""
    weights = [torch.zeros(600), torch.zeros(400)]
    gradients = [torch.zeros(1000)]
    register = Register()
    register.add("weights", lambda: weights)
    register.add("gradients", lambda: gradients)
    assert register.read("train").bytes_of("gradients", "cpu") == 4000
    gradients.clear()
    reading = register.read("rollout")
    assert reading.bytes_of("gradients", "cpu") == 0
    assert reading.bytes_of("weights", "cpu") == 4000


def test_shared_memory_counts_for_its_first_owner() -> None:
    """The engine computes with two of the trainer's three tensors, and holds one of its own."""
    trainer = [torch.zeros(10), torch.zeros(20), torch.zeros(30)]
    engine = [trainer[0].view(2, 5), trainer[1][:3], torch.zeros(7)]
    register = Register()
    register.add("weights", lambda: trainer)
    register.add("rollout weights", lambda: engine)
    reading = register.read("rollout")
    assert {h.owner: h.num_bytes for h in reading.holdings} == {"weights": 240, "rollout weights": 28}


def test_two_views_of_one_tensor_count_once() -> None:
    pool = torch.zeros(100)
    register = Register()
    register.add("KV pool", lambda: [pool[:50], pool[50:], pool])
    assert register.read("rollout").bytes_of("KV pool", "cpu") == 400


def test_expectation_stands_beside_the_reading() -> None:
    register = Register({("weights", "cpu"): 40.0, ("KV pool", "cpu"): 1e9})
    register.add("weights", lambda: [torch.zeros(10)])
    values = register.read("train").values()
    assert values["memory/owner/weights/bytes"] == Last(40)
    assert values["memory/owner/weights/expected_bytes"] == Last(40.0)
    assert values["memory/owner/KV_pool/bytes"] == Last(0)  # expected, and nobody registered it
    assert values["memory/train/allocated_bytes"].result() == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without an accelerator")
def test_a_host_has_no_fragmentation() -> None:
    register = Register()
    register.add("weights", lambda: [torch.zeros(10)])
    (state,) = register.read("train").devices
    assert (state.device, state.fragmented_bytes) == ("cpu", 0)
