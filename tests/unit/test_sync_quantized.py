"""Quantized publications: error bounds worked by hand, scales proven like any tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.digest import digest
from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.quantized import QuantizedSource, QuantizedWeights, Scheme, dequantize, quantize
from rollbook.sync.transaction import ReplicaTransaction
from rollbook.weights import Bucket, Manifest, TensorSpec


class Source:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
                num_bytes=t.numel() * t.element_size(),
            )
            for name, t in self.tensors.items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def test_int8_by_hand() -> None:
    """Row maxima 2.54 and 127: scales 0.02 and 1; -1.27 / 0.02 = -63.5, rounded to even -64."""
    codes, scales = quantize(torch.tensor([[2.54, -1.27], [127.0, 0.4]]), "int8")
    assert codes.tolist() == [[127, -64], [127, 0]]
    assert torch.allclose(scales, torch.tensor([[0.02], [1.0]]))


def test_int8_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(70, 300).to(torch.bfloat16)
    codes, scales = quantize(weight, "int8")
    error = (dequantize(codes, scales, "int8") - weight.float()).abs()
    assert bool((error <= scales / 2 * (1 + 1e-5)).all())


def test_fp8_error_is_at_most_a_sixteenth() -> None:
    """e4m3 has 3 mantissa bits: half a unit in the last place is 2^-4 of the value, down to its subnormals."""
    weight = torch.randn(200, 300) * torch.logspace(-3, 3, 200)[:, None]
    codes, scales = quantize(weight, "fp8_block")
    assert (codes.shape, scales.shape) == ((200, 300), (2, 3))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    error = (dequantize(codes, scales, "fp8_block") - weight).abs()
    assert bool((error <= torch.maximum(weight.abs() / 16, spread * 2.0**-10)).all())


@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
def test_zero_rows_and_blocks_stay_zero(scheme: Scheme) -> None:
    codes, scales = quantize(torch.zeros(130, 5), scheme)
    assert not dequantize(codes, scales, scheme).any()
    assert bool((scales == 1).all())


def source() -> Source:
    return Source(
        {
            "model.embed_tokens.weight": torch.randn(11, 8),
            "model.layers.0.mlp.up_proj.weight": torch.randn(300, 130),
            "model.layers.0.mlp.gate.weight": torch.randn(4, 8),
            "model.norm.weight": torch.randn(8),
        }
    )


@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
def test_the_manifest_announces_codes_and_scales(scheme: Scheme) -> None:
    quantized = QuantizedSource(source(), scheme)
    exported = dict(quantized.export_weights())
    suffix = {"int8": "_scale", "fp8_block": "_scale_inv"}[scheme]
    assert list(exported) == [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight" + suffix,
        "model.layers.0.mlp.gate.weight",
        "model.norm.weight",
    ]
    for spec in quantized.weight_specs():
        tensor = exported[spec.name]
        assert spec == Source({spec.name: tensor}).weight_specs()[0]


@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
def test_a_changed_scale_is_caught_like_a_changed_weight(scheme: Scheme) -> None:
    quantized = QuantizedSource(source(), scheme)
    tensors = dict(quantized.export_weights())
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    engine = MappedWeights(live, {n: Place(parameter=n, shape=tuple(t.shape)) for n, t in live.items()})
    transaction = ReplicaTransaction(engine, replica_id=0, weight_version=0)
    manifest = Manifest(weight_version=1, base_version=None, tensors=quantized.weight_specs())
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    scale = next(name for name in tensors if "scale" in name)
    for is_damaged in (True, False):
        sent = {name: tensor.clone() for name, tensor in tensors.items()}
        if is_damaged:
            sent[scale].view(-1)[0] *= 1.0001
        transaction.open(manifest)
        from rollbook.weights import BucketEntry

        entries = tuple(
            BucketEntry(name=s.name, offset_bytes=0, num_bytes=s.num_bytes) for s in manifest.tensors
        )
        transaction.receive(Bucket(weight_version=1, bucket_idx=0, entries=entries, data=None, shared=sent))
        if is_damaged:
            with pytest.raises(SyncError, match=f"altered: {scale}"):
                transaction.prove(digests)
            transaction.abort()
        else:
            transaction.prove(digests)
            transaction.commit()
    assert torch.equal(engine.read(scale), tensors[scale])


@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
def test_what_the_engine_computes_with_is_held_to_codes_and_scales(scheme: Scheme) -> None:
    trained = source()
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.tensors.items()}
    plain = MappedWeights(live, {n: Place(parameter=n, shape=tuple(t.shape)) for n, t in live.items()})
    weights = QuantizedWeights(plain, scheme)
    sent = dict(QuantizedSource(trained, scheme).export_weights())
    assert list(weights.specs().values()) == list(QuantizedSource(trained, scheme).weight_specs())
    for name, tensor in sent.items():
        weights.write(name, tensor)
    wanted = {name: digest(tensor) for name, tensor in sent.items()}
    assert {name: digest(weights.read(name)) for name in sent} == wanted
    matrix = "model.layers.0.mlp.up_proj.weight"
    scale = next(name for name in sent if "scale" in name)
    assert torch.equal(live[matrix], dequantize(sent[matrix], sent[scale], scheme))
    live[matrix].view(torch.int32)[7, 9] ^= 1  # one bit of what the engine computes with
    assert [name for name in sent if digest(weights.read(name)) != wanted[name]] == [matrix]


def test_a_scale_that_comes_alone_is_decoded_too() -> None:
    """A delta may change a scale and no code."""
    live = {"a.weight": torch.tensor([[2.0, 1.0]])}
    plain = MappedWeights(live, {"a.weight": Place(parameter="a.weight", shape=(1, 2))})
    weights = QuantizedWeights(plain, "int8")
    weights.write("a.weight_scale", torch.tensor([[1.0]]))
    weights.read("a.weight")
    assert live["a.weight"].tolist() == [[127.0, 64.0]]


def test_codes_of_another_scheme_are_refused() -> None:
    live = {"a.weight": torch.ones(2, 2)}
    plain = MappedWeights(live, {"a.weight": Place(parameter="a.weight", shape=(2, 2))})
    weights = QuantizedWeights(plain, "int8")
    with pytest.raises(SyncError, match="float8_e4m3fn"):
        weights.write("a.weight", quantize(torch.ones(2, 2), "fp8_block")[0])


def test_diverged_weights_are_not_quantized_into_something_plausible() -> None:
    bad = source()
    bad.tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = float("nan")
    with pytest.raises(SyncError, match="up_proj.weight holds values that are not finite"):
        list(QuantizedSource(bad, "int8").export_weights())
