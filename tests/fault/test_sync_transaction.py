"""What a replica refuses, what it names, and what it keeps: the transaction under every fault."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sync_fakes import FakeSource, fused_engine, live_digests, manifest_of, packed, publish, tiny_tensors

from rollbook.errors import SyncError
from rollbook.sync.delta import AcknowledgedWeights
from rollbook.sync.digest import fold
from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.transaction import ReplicaTransaction, Staging, State
from rollbook.weights import Bucket, BucketEntry, TensorSpec

Q = "model.layers.0.self_attn.q_proj.weight"


def replica(staging: Staging = "staged") -> tuple[ReplicaTransaction, FakeSource]:
    """A replica at version 1, and its trainer one step ahead."""
    source = FakeSource(tiny_tensors())
    transaction = ReplicaTransaction(fused_engine(), replica_id=3, weight_version=0, staging=staging)
    publish(transaction, source, 1)
    source.step()
    return transaction, source


def engine_of(transaction: ReplicaTransaction) -> MappedWeights:
    assert isinstance(transaction.live, MappedWeights)
    return transaction.live


@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("bucket_bytes", [64, 256, 300, 1 << 20])
def test_any_chunking_and_order_ends_in_the_trainers_weights(staging: Staging, bucket_bytes: int) -> None:
    """One chunk, several, one tensor or less a chunk, fused members apart, five orders."""
    for seed in range(5):
        tensors = tiny_tensors(seed)
        names = list(tensors)
        random.Random(seed).shuffle(names)
        source = FakeSource({name: tensors[name] for name in names})
        engine = fused_engine()
        transaction = ReplicaTransaction(engine, replica_id=0, weight_version=0, staging=staging)
        digests = publish(transaction, source, 1, bucket_bytes=bucket_bytes)
        del digests["lm_head.weight"]
        assert live_digests(engine) == digests
        assert torch.equal(engine.parameters["qkv"][8:12], tensors["model.layers.0.self_attn.k_proj.weight"])
        assert torch.equal(engine.parameters["embed"][11:], torch.zeros(5, 8, dtype=torch.bfloat16))
        assert transaction.weight_version == 1


def test_coverage_adds_up_to_both_sides() -> None:
    """BR-015. 17 tensors of the trainer: 1 kept its name, 3 were renamed, 3 + 9 share parameters, 1 is tied."""
    source = FakeSource(tiny_tensors())
    transaction = ReplicaTransaction(fused_engine(), replica_id=0, weight_version=0)
    coverage = transaction.open(manifest_of(source, 1))
    assert coverage == {"matched": 1, "renamed": 3, "fused": 12, "dropped": 1}
    assert sum(coverage.values()) == len(source.tensors) == 17
    assert sum(coverage.values()) - coverage["dropped"] == len(engine_of(transaction).specs())


def test_a_table_of_places_must_cover_the_engine() -> None:
    with pytest.raises(SyncError, match="bias belong to no tensor"):
        MappedWeights({"w": torch.zeros(2), "bias": torch.zeros(2)}, {"w": Place(parameter="w", shape=(2,))})
    with pytest.raises(SyncError, match="w belong to no tensor"):
        MappedWeights({"w": torch.zeros(4)}, {"a": Place(parameter="w", box=(slice(0, 3),), shape=(3,))})
    with pytest.raises(SyncError, match="w belong to two tensors"):
        MappedWeights(
            {"w": torch.zeros(4)},
            {
                "a": Place(parameter="w", box=(slice(0, 3),), shape=(3,)),
                "b": Place(parameter="w", box=(slice(2, 4),), shape=(2,)),
            },
        )


def test_extra_missing_and_misshapen_names_are_refused_before_any_write() -> None:
    """BR-015: what no rule of the engine's names takes is an error, never left out."""
    transaction, source = replica()
    before = live_digests(engine_of(transaction))
    manifest = manifest_of(source, 2)
    extra = TensorSpec(name="vision.proj.weight", shape=(2,), dtype="bfloat16", num_bytes=4)
    q = next(spec for spec in manifest.tensors if spec.name == Q)
    others = tuple(spec for spec in manifest.tensors if spec.name != Q)
    for tensors, message in [
        ((*manifest.tensors, extra), "vision.proj.weight is unknown to the engine"),
        (others, f"{Q} is missing"),
        ((*others, replace(q, shape=(4, 16))), rf"{Q} is bfloat16\[4, 16\].*holds bfloat16\[8, 8\]"),
        ((*others, replace(q, dtype="float16")), f"{Q} is float16"),
        ((*others, replace(q, num_bytes=126)), f"{Q} is bfloat16.* of 126 bytes"),
        ((*manifest.tensors, q), f"{Q} is listed twice"),
    ]:
        with pytest.raises(SyncError, match=message):
            transaction.open(replace(manifest, tensors=tensors))
        assert transaction.state is State.IDLE
    assert live_digests(engine_of(transaction)) == before
    assert transaction.weight_version == 1


def flip(bucket: Bucket, name: str) -> Bucket:
    assert bucket.data is not None
    data = bucket.data.clone()
    data[next(entry.offset_bytes for entry in bucket.entries if entry.name == name)] ^= 16
    return replace(bucket, data=data)


def with_q(buckets: list[Bucket]) -> int:
    return next(i for i, b in enumerate(buckets) if any(entry.name == Q for entry in b.entries))


def drop_last(buckets: list[Bucket]) -> list[Bucket]:
    return buckets[:-1]


def drop_one(buckets: list[Bucket]) -> list[Bucket]:
    return [b for i, b in enumerate(buckets) if i != with_q(buckets)]


def swap(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    buckets[at - 1], buckets[at] = buckets[at], buckets[at - 1]
    return buckets


def repeat(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    return [*buckets[: at + 1], buckets[at], *buckets[at + 1 :]]


def renumbered(buckets: list[Bucket]) -> list[Bucket]:
    return [replace(bucket, bucket_idx=i) for i, bucket in enumerate(repeat(buckets))]


def truncate(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    data = buckets[at].data
    assert data is not None
    buckets[at] = replace(buckets[at], data=data[: buckets[at].entries[-1].offset_bytes + 3])
    return buckets


def flip_q(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    buckets[at] = flip(buckets[at], Q)
    return buckets


def rename_q(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    entries = tuple(replace(e, name="q") if e.name == Q else e for e in buckets[at].entries)
    buckets[at] = replace(buckets[at], entries=entries)
    return buckets


def other_version(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    buckets[at] = replace(buckets[at], weight_version=7)
    return buckets


def undeclared_delta(buckets: list[Bucket]) -> list[Bucket]:
    at = with_q(buckets)
    entries = tuple(replace(e, encoding="unchanged") if e.name == Q else e for e in buckets[at].entries)
    buckets[at] = replace(buckets[at], entries=entries)
    return buckets


FAULTS: dict[Callable[[list[Bucket]], list[Bucket]], str] = {
    drop_last: "did not arrive whole at replica 3",
    drop_one: "too early",
    swap: "too early",
    repeat: f"with {Q}.* reached replica 3 twice",
    renumbered: f"{Q} reached replica 3 twice",
    truncate: "ends at byte .*model.layers.0",
    flip_q: f"1 tensors reached replica 3 altered: {Q}",
    rename_q: "q arrived at replica 3 and is not in the manifest",
    other_version: f"bucket of version 7 with {Q}",
    undeclared_delta: f"{Q} arrived as unchanged in a publication without a base",
}


@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_damaged_publication_is_refused_and_names_the_tensor(
    fault: Callable[[list[Bucket]], list[Bucket]], staging: Staging
) -> None:
    transaction, source = replica(staging)
    before = live_digests(engine_of(transaction))
    with pytest.raises(SyncError, match=FAULTS[fault]):
        publish(transaction, source, 2, bucket_bytes=300, tamper=fault)
    assert transaction.weight_version == 1
    transaction.abort()
    if staging == "staged":
        assert transaction.state is State.IDLE
        assert live_digests(engine_of(transaction)) == before
        publish(transaction, source, 2)  # the next one goes through
    elif fault is swap:  # the first bucket was wrong: nothing had been written
        assert transaction.state is State.IDLE
    else:
        assert transaction.state is State.BROKEN
        with pytest.raises(SyncError, match="holds no proven version"):
            transaction.open(manifest_of(source, 2))
        transaction.open(replace(manifest_of(source, 2), is_resync=True))


@pytest.mark.parametrize("off_bytes", [-64, 16, 64])
def test_a_part_that_does_not_follow_is_refused_where_it_arrives(off_bytes: int) -> None:
    """Before its bytes are written anywhere: the digest would only say that something is wrong with the tensor."""
    transaction, source = replica()
    buckets, _ = packed(source, 2, 64)
    transaction.open(manifest_of(source, 2))
    at = next(i for i, bucket in enumerate(buckets) if bucket.entries[0].tensor_offset_bytes == 64)
    for bucket in buckets[:at]:
        transaction.receive(bucket)
    (entry, *others) = buckets[at].entries
    moved = replace(entry, tensor_offset_bytes=entry.tensor_offset_bytes + off_bytes)
    with pytest.raises(
        SyncError, match=rf"a part of {entry.name} covers bytes {64 + off_bytes} to .*64 have arrived"
    ):
        transaction.receive(replace(buckets[at], entries=(moved, *others)))


@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            torch.zeros(4, 16, dtype=torch.bfloat16),
            "bfloat16\\[4, 16\\], the manifest says bfloat16\\[8, 8\\]",
        ),
        (torch.zeros(8, 8, dtype=torch.float16), "float16\\[8, 8\\], the manifest says bfloat16\\[8, 8\\]"),
    ],
    ids=["shape", "dtype"],
)
def test_a_tensor_by_reference_of_another_shape_or_type_is_refused_before_it_is_written(
    other: torch.Tensor, says: str, staging: Staging
) -> None:
    transaction, source = replica(staging)
    before = live_digests(engine_of(transaction))
    manifest = manifest_of(source, 2)
    entries = [
        BucketEntry(name=spec.name, offset_bytes=0, num_bytes=spec.num_bytes)
        for spec in manifest.tensors
        if spec.name == Q
    ]
    transaction.open(manifest)
    with pytest.raises(SyncError, match=f"{Q} arrived as {says}"):
        transaction.receive(
            Bucket(weight_version=2, bucket_idx=0, entries=tuple(entries), data=None, shared={Q: other})
        )
    transaction.abort()
    assert transaction.state is State.IDLE and live_digests(engine_of(transaction)) == before


def test_a_part_that_ends_within_an_element_is_refused_by_name() -> None:
    transaction, source = replica()
    buckets, _ = packed(source, 2, 64)
    transaction.open(manifest_of(source, 2))
    (entry,) = buckets[0].entries
    odd = replace(entry, num_bytes=entry.num_bytes - 1, tensor_num_bytes=entry.num_bytes - 1)
    with pytest.raises(SyncError, match=f"a part of {entry.name} covers bytes 0 to 63, not whole elements"):
        transaction.receive(replace(buckets[0], entries=(odd,)))


def test_a_commit_that_is_cut_off_between_two_writes_leaves_no_version() -> None:
    """Not by an error, which it would roll back: by whatever ends the thread."""
    transaction, source = replica()
    buckets, digests = packed(source, 2, 512)
    transaction.open(manifest_of(source, 2))
    for bucket in buckets:
        transaction.receive(bucket)
    transaction.prove(digests)
    engine, written = engine_of(transaction), list[str]()
    write = engine.write

    def cut_off(name: str, tensor: torch.Tensor) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(name)
        write(name, tensor)

    engine.write = cut_off  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        transaction.commit()
    transaction.abort()
    assert transaction.state is State.BROKEN


def test_after_a_fault_only_abort_is_left() -> None:
    transaction, source = replica()
    buckets, digests = packed(source, 2, 300)
    transaction.open(manifest_of(source, 2))
    with pytest.raises(SyncError, match="too early"):
        transaction.receive(buckets[1])
    for call in (lambda: transaction.receive(buckets[0]), lambda: transaction.prove(digests)):
        with pytest.raises(SyncError, match="after a fault: bucket 1 .* too early"):
            call()
    with pytest.raises(SyncError, match="commit in state open"):
        transaction.commit()


def test_a_wrong_digest_or_an_incomplete_set_of_digests_is_refused() -> None:
    transaction, source = replica()
    buckets, digests = packed(source, 2, 300)
    for altered, message in [
        (digests | {Q: "0" * 32}, f"altered: {Q}"),
        ({name: d for name, d in digests.items() if name != Q}, f"differ in {Q}"),
        (digests | {"model.unknown.weight": digests[Q]}, "differ in model.unknown.weight"),
        ({}, "differ in"),
    ]:
        transaction.open(manifest_of(source, 2))
        for bucket in buckets:
            transaction.receive(bucket)
        with pytest.raises(SyncError, match=message):
            transaction.prove(altered)
        transaction.abort()
    assert transaction.weight_version == 1


def test_an_empty_publication_proves_nothing() -> None:
    """A known fault of real engines: an update without tensors "succeeds"."""
    transaction, source = replica()
    with pytest.raises(SyncError, match="is missing"):
        transaction.open(replace(manifest_of(source, 2), tensors=()))
    transaction.open(manifest_of(source, 2))
    with pytest.raises(SyncError, match="17 tensors did not arrive"):
        transaction.prove(packed(source, 2, 300)[1])


def test_two_publications_at_once_are_refused() -> None:
    transaction, source = replica()
    transaction.open(manifest_of(source, 2))
    with pytest.raises(SyncError, match="has version 2 open and was asked to open 3"):
        transaction.open(manifest_of(source, 3))


def test_versions_only_grow_except_by_resync() -> None:
    transaction, source = replica()
    for version in (0, 1):
        with pytest.raises(SyncError, match=f"holds version 1 and was sent version {version}"):
            transaction.open(manifest_of(source, version))
    transaction.open(replace(manifest_of(source, 1), is_resync=True))


def test_what_holds_no_version_stays_so_through_aborts_until_a_resync_commits() -> None:
    transaction, source = replica()
    transaction.state = State.BROKEN
    resync = replace(manifest_of(source, 2), is_resync=True)
    for _ in range(2):
        transaction.abort()
        with pytest.raises(SyncError, match="holds no proven version"):
            transaction.open(manifest_of(source, 2))
        transaction.open(resync)  # and is given up before its first bucket
    buckets, digests = packed(source, 2, 300)
    for bucket in buckets:
        transaction.receive(bucket)
    transaction.prove(digests)
    transaction.commit()
    assert (transaction.state, transaction.weight_version) == (State.IDLE, 2)


class DeafWeights(MappedWeights):
    """A live engine whose write of one tensor does something else than asked."""

    def __init__(self, inner: MappedWeights, how: str) -> None:
        self.__dict__.update(inner.__dict__)
        self.how = how
        self.armed = False

    def write(self, name: str, tensor: torch.Tensor) -> None:
        if not self.armed or name != Q:
            return super().write(name, tensor)
        if self.how == "raises":
            raise RuntimeError("device lost")
        if self.how == "rounds":
            super().write(name, tensor.to(torch.float8_e4m3fn).to(tensor.dtype))
        if self.how == "wrong rows":
            super().write(name, tensor.flip(0))
        return None  # "ignores"


@pytest.mark.parametrize("how", ["ignores", "raises", "rounds", "wrong rows"])
def test_the_live_proof_catches_what_arrived_well_and_was_written_badly(how: str) -> None:
    source = FakeSource(tiny_tensors())
    engine = DeafWeights(fused_engine(), how)
    transaction = ReplicaTransaction(engine, replica_id=3, weight_version=0)
    publish(transaction, source, 1)
    before = live_digests(engine)
    source.step()
    engine.armed = True
    with pytest.raises(
        SyncError, match="could not take version 2: .*" + (Q if how != "raises" else "lost")
    ) as e:
        publish(transaction, source, 2)
    if how == "ignores":  # the old bytes never left
        assert "put back and proven" in e.value.what
        assert transaction.state is State.IDLE
        assert live_digests(engine) == before
    elif how in ("rounds", "wrong rows"):  # the way back is as broken as the way there
        assert transaction.state is State.BROKEN
    assert transaction.weight_version == 1


def test_a_failed_commit_rolls_back_to_the_proven_old_version() -> None:
    """The write fails half way, once; the old tensors are put back and serve on."""
    source = FakeSource(tiny_tensors())
    engine = fused_engine()
    transaction = ReplicaTransaction(engine, replica_id=3, weight_version=0)
    publish(transaction, source, 1)
    before = live_digests(engine)
    source.step()
    written: list[str] = []
    write = engine.write

    def fail_once(name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if len(written) == 9:
            raise RuntimeError("out of memory")
        write(name, tensor)

    engine.write = fail_once  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="out of memory; its old weights were put back and proven"):
        publish(transaction, source, 2)
    assert live_digests(engine) == before
    assert (transaction.state, transaction.weight_version) == (State.IDLE, 1)
    publish(transaction, source, 2)
    assert transaction.weight_version == 2


def test_an_error_that_somebody_keeps_does_not_keep_the_tensors_that_were_to_be_written() -> None:
    """The publication is repeated while its first error is at hand: both at once would not fit a device."""
    transaction, source = replica()
    buckets, digests = packed(source, 2, 512)
    transaction.open(manifest_of(source, 2))
    for bucket in buckets:
        transaction.receive(bucket)
    transaction.prove(digests)
    assert transaction._arriving is not None
    staged = [weakref.ref(tensor) for tensor in transaction._arriving.staged.values()]

    def fail(name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    engine_of(transaction).write = fail  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="out of memory") as kept:
        transaction.commit()
    assert kept.value.__traceback__ is not None
    assert sum(held() is not None for held in staged) <= 1, "the one whose write failed, and no other"


def test_the_way_back_from_a_first_publication_is_proven_too() -> None:
    """What was there before it has no digests of a publication to be held against: they are taken at its commit."""
    engine = DeafWeights(fused_engine(), "wrong rows")
    for parameter in engine.parameters.values():
        parameter.normal_()
    transaction = ReplicaTransaction(engine, replica_id=3, weight_version=0)
    engine.armed = True
    with pytest.raises(
        SyncError, match=f"live proof failed for {Q}; its old weights were put back and did not prove"
    ):
        publish(transaction, FakeSource(tiny_tensors()), 1)
    assert (transaction.state, transaction.weight_version) == (State.BROKEN, 0)


# ---- deltas


def delta_pair() -> tuple[ReplicaTransaction, FakeSource, AcknowledgedWeights, dict[str, str]]:
    source = FakeSource(tiny_tensors())
    engine = fused_engine(is_tied=False)
    transaction = ReplicaTransaction(engine, replica_id=3, weight_version=0)
    acknowledged = AcknowledgedWeights()
    acknowledged.begin(None)
    buckets, digests = packed(source, 1, 300, acknowledged)
    transaction.open(manifest_of(source, 1))
    for bucket in buckets:
        transaction.receive(bucket)
    transaction.prove(digests)
    transaction.commit()
    acknowledged.acknowledge(1)
    return transaction, source, acknowledged, digests


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_a_delta_ends_in_the_same_bits_as_a_full_publication(bucket_bytes: int) -> None:
    transaction, source, acknowledged, digests = delta_pair()
    source.tensors[Q][0, 0] = float("nan")
    source.tensors[Q][1, 1] = -0.0
    source.tensors["model.norm.weight"].mul_(-1)
    acknowledged.begin(1)
    buckets, new_digests = packed(source, 2, bucket_bytes, acknowledged)
    encodings = {entry.encoding for bucket in buckets for entry in bucket.entries}
    assert {"delta_positions", "unchanged", "dense"} <= encodings
    transaction.open(manifest_of(source, 2, base=1, base_digest=fold(digests)))
    for bucket in buckets:
        transaction.receive(bucket)
    transaction.prove(new_digests)
    transaction.commit()
    assert live_digests(engine_of(transaction)) == new_digests
    assert transaction.weight_version == 2


def test_a_delta_against_anything_but_the_proven_base_is_refused() -> None:
    transaction, source, _, digests = delta_pair()
    with pytest.raises(SyncError, match="holds version 1 and was sent a delta against 0"):
        transaction.open(manifest_of(source, 2, base=0, base_digest=fold(digests)))
    with pytest.raises(SyncError, match="cannot prove that its version 1 is the trainer's"):
        transaction.open(manifest_of(source, 2, base=1, base_digest="0" * 32))
    resync = replace(manifest_of(source, 2, base=1, base_digest=fold(digests)), is_resync=True)
    with pytest.raises(SyncError, match="a resync of replica 3 came as a delta against version 1"):
        transaction.open(resync)  # what it replaces is in doubt, so nothing may be taken from it
    assert transaction.state is State.IDLE
    engine_of(transaction).parameters["qkv"][3, 3] += 1  # somebody reloads weights behind our back
    with pytest.raises(SyncError, match=f"no longer version 1: {Q} changed"):
        transaction.open(manifest_of(source, 2, base=1, base_digest=fold(digests)))
    assert transaction.state is State.BROKEN


def test_a_replica_that_proved_nothing_yet_takes_no_delta() -> None:
    transaction = ReplicaTransaction(fused_engine(), replica_id=3, weight_version=0)
    with pytest.raises(SyncError, match="re-sync it in full"):
        transaction.open(manifest_of(FakeSource(tiny_tensors()), 1, base=0, base_digest=fold({})))


# ---- tensor parallelism


def test_each_rank_proves_its_slice_and_the_whole() -> None:
    """Two ranks hold the halves of one tensor, by rows and by columns."""
    tensors = {"rows": torch.randn(4, 6), "columns": torch.randn(4, 6)}
    source = FakeSource(tensors)
    for rank in (0, 1):
        for staging in ("staged", "direct"):
            engine = MappedWeights(
                {"r": torch.zeros(2, 6), "c": torch.zeros(4, 3)},
                {
                    "rows": Place(parameter="r", shape=(4, 6), part=(slice(2 * rank, 2 * rank + 2),)),
                    "columns": Place(
                        parameter="c", shape=(4, 6), part=(slice(None), slice(3 * rank, 3 * rank + 3))
                    ),
                },
            )
            transaction = ReplicaTransaction(
                engine,
                replica_id=rank,
                weight_version=0,
                staging=staging,  # type: ignore[arg-type]
            )
            publish(transaction, source, 1, bucket_bytes=50)
            assert torch.equal(engine.parameters["r"], tensors["rows"][2 * rank : 2 * rank + 2])
            assert torch.equal(engine.parameters["c"], tensors["columns"][:, 3 * rank : 3 * rank + 3])
            with pytest.raises(SyncError, match=r"altered: (rows|columns)"):
                publish(
                    transaction,
                    source,
                    2,
                    tamper=lambda b: [replace(b[0], data=b[0].data.roll(8)), *b[1:]],  # type: ignore[union-attr]
                )


def test_a_rank_takes_a_delta_that_leaves_its_slices_as_they_are_and_no_other() -> None:
    """A difference of the whole tensor cannot be applied to a slice; without one the slice is proven as it was."""
    source = FakeSource({"cut": torch.randn(4, 6), "whole": torch.randn(3)})
    places = {
        "cut": Place(parameter="c", shape=(4, 6), part=(slice(2, 4),)),
        "whole": Place(parameter="w", shape=(3,)),
    }
    engine = MappedWeights({"c": torch.zeros(2, 6), "w": torch.zeros(3)}, places)
    transaction = ReplicaTransaction(engine, replica_id=3, weight_version=0)
    acknowledged = AcknowledgedWeights()
    digests: dict[str, str] = {}

    def take(version: int) -> None:
        nonlocal digests
        base = version - 1 or None
        manifest = manifest_of(source, version, base=base, base_digest=fold(digests) if base else None)
        transaction.open(manifest)
        acknowledged.begin(base)
        buckets, digests = packed(source, version, 1 << 20, acknowledged)
        for bucket in buckets:
            transaction.receive(bucket)
        transaction.prove(digests)
        transaction.commit()
        acknowledged.acknowledge(version)

    take(1)
    source.tensors["whole"] += 1
    take(2)
    assert torch.equal(engine.parameters["c"], source.tensors["cut"][2:4])
    assert torch.equal(engine.parameters["w"], source.tensors["whole"])
    source.tensors["cut"][3, 3] += 1
    with pytest.raises(SyncError, match="replica 3 holds only a part of cut: a delta .* cannot be applied"):
        take(3)
    transaction.abort()
    assert (transaction.state, transaction.weight_version) == (State.IDLE, 2)


@pytest.mark.parametrize("part", [(slice(2, 4),), (slice(None), slice(3, 6))], ids=["rows", "columns"])
def test_a_failed_commit_gives_a_rank_its_own_old_part_back(part: tuple[slice, ...]) -> None:
    source = FakeSource({"cut": torch.randn(4, 6), "whole": torch.randn(3)})
    places = {
        "cut": Place(parameter="c", shape=(4, 6), part=part),
        "whole": Place(parameter="w", shape=(3,)),
    }
    engine = MappedWeights({"c": torch.zeros(4, 6)[part].clone(), "w": torch.zeros(3)}, places)
    transaction = ReplicaTransaction(engine, replica_id=1, weight_version=0)
    publish(transaction, source, 1)
    before = engine.parameters["c"].clone()
    source.step()
    write, names = engine.write, []

    def fail_once(name: str, tensor: torch.Tensor) -> None:
        names.append(name)
        if len(names) == 2:
            raise RuntimeError("out of memory")
        write(name, tensor)

    engine.write = fail_once  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="its old weights were put back and proven"):
        publish(transaction, source, 2)
    assert names[0] == "cut"
    assert torch.equal(engine.parameters["c"], before)
