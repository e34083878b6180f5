"""A whole sync inside one process: threads as source ranks, plain modules as engine ranks, link kind `local`."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rdt_core.control import LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.errors import (
    CoverageError,
    DeadlineError,
    MembershipError,
    RdtError,
    SourceError,
    SyncError,
    TornReplicaError,
)
from rdt_core.publisher import Publisher
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources.base import Shard
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange
from rdt_core.wire import TensorMeta
from rdt_testbed.reports import are_alike

pytestmark = pytest.mark.unit

SHAPES = {
    "embed.weight": (50, 16),
    "layers.0.q.weight": (16, 16),
    "layers.0.k.weight": (8, 16),
    "layers.0.down.weight": (16, 24),
    "layers.1.q.weight": (16, 16),
    "layers.1.k.weight": (8, 16),
    "layers.1.down.weight": (16, 24),
    "norm.weight": (16,),
}


class Sharded:
    """A source whose ranks hold uneven row ranges of every tensor."""

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype = torch.float32, wire: str = "float32") -> None:
        self.rank, self.world_size, self.wire = rank, world_size, wire
        self.local: list[tuple[str, int, torch.Tensor]] = []
        for name, shape in SHAPES.items():
            size = -(-shape[0] // world_size)
            start, end = min(shape[0], rank * size), min(shape[0], (rank + 1) * size)
            self.local.append((name, start, torch.zeros((end - start, *shape[1:]), dtype=dtype)))

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name=name, shape=shape, dtype=self.wire) for name, shape in SHAPES.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (start,) + (0,) * (tensor.dim() - 1), tensor) for name, start, tensor in self.local]

    def ignored(self) -> list[str]:
        return []

    def fill(self, version: int) -> None:
        for name, start, tensor in self.local:
            tensor.copy_(whole(name, version)[start : start + tensor.shape[0]])


def whole(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((name, version)) % 2**31)
    return torch.randn(SHAPES[name], generator=generator)


class Layer(torch.nn.Module):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(24 // world_size, 16))
        self.down = torch.nn.Parameter(torch.zeros(16, 24 // world_size))


class Served(torch.nn.Module):
    """Fused and tensor-parallel, as engines are."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.embed = torch.nn.Parameter(torch.zeros(64 // world_size, 16))
        self.layers = torch.nn.ModuleList(Layer(rank, world_size) for _ in range(2))
        self.norm = torch.nn.Parameter(torch.zeros(16))


def load(module: Served, weights) -> None:
    rank, world = module.rank, module.world_size
    for name, tensor in weights:
        if name == "embed.weight":
            rows = 64 // world
            start = min(50, rank * rows)
            count = min(50, (rank + 1) * rows) - start
            module.embed.data[count:].fill_(0)
            module.embed.data[:count].copy_(tensor.narrow(0, start, count))
            continue
        if name == "norm.weight":
            module.norm.data.copy_(tensor)
            continue
        layer = module.layers[int(name.split(".")[1])]
        if ".down." in name:
            layer.down.data.copy_(tensor.narrow(1, rank * 24 // world, 24 // world))
        else:
            size = tensor.shape[0] // world
            offset = 0 if ".q." in name else 16 // world
            layer.qk.data.narrow(0, offset, size).copy_(tensor.narrow(0, rank * size, size))


def expected(rank: int, world: int, version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    module = Served(rank, world)
    with torch.no_grad():
        load(module, [(name, whole(name, version).to(dtype).float()) for name in SHAPES])
    return module.state_dict()


class Group:
    """Source ranks in threads and one replica, over one coordinator."""

    def __init__(self, ranks: int, engine_ranks: int, **options) -> None:
        self.control = LocalControl(Coordinator("test", ranks, 30.0))
        self.exchange = LocalExchange()
        dtype = options.pop("dtype", torch.float32)
        wire = options.pop("wire", "float32")
        loader = options.pop("load", load)
        self.sources = [Sharded(rank, ranks, dtype, wire) for rank in range(ranks)]
        options = {"kinds": ("local",), "timeout_s": 10.0, **options}
        self.pool = ThreadPoolExecutor(ranks)
        self.syncs = list(
            self.pool.map(
                lambda rank: WeightSync(
                    self.control,
                    self.sources[rank],
                    group="test",
                    rank=rank,
                    world_size=ranks,
                    exchange=self.exchange,
                    **options,
                ),
                range(ranks),
            )
        )
        self.workers = [
            ModuleWorker(
                lambda rank=rank: Served(rank, engine_ranks), rank, engine_ranks, loader, self.control, self.exchange
            )
            for rank in range(engine_ranks)
        ]
        self.replica = ModuleReplica(self.workers)

    def attach(self) -> None:
        self.syncs[0].attach(self.replica)

    def publish(self, version: int):
        for source in self.sources:
            source.fill(version)
        return list(self.pool.map(lambda sync: sync.publish(version), self.syncs))

    def close(self) -> None:
        for sync in self.syncs:
            sync.leave()
        self.pool.shutdown()
        self.control.close()


@pytest.fixture
def group(request):
    made = []

    def make(*args, **options) -> Group:
        made.append(Group(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_serves(group: Group, version: int, dtype: torch.dtype = torch.float32) -> None:
    world = len(group.workers)
    for rank, worker in enumerate(group.workers):
        state = worker.state()
        for name, value in expected(rank, world, version, dtype).items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("mode", ["live", "snapshot", "bucket"])
@pytest.mark.parametrize(("ranks", "engine_ranks"), [(1, 1), (2, 1), (3, 2)])
def test_three_syncs_are_exact(group, mode, ranks, engine_ranks):
    made = group(ranks, engine_ranks, mode=mode, bucket_bytes=1000)
    made.attach()
    for version in (1, 2, 3):
        reports = made.publish(version)
        assert_serves(made, version)
        assert are_alike(reports)
        assert reports[0].bytes == sum(reader.expected_bytes for reader in reports[0].readers)
        assert made.replica.version(deadline=float("inf")) == version
    assert made.syncs[0].mode == mode


def test_an_engine_rank_that_takes_nothing_of_the_first_rounds(group):
    def stages(module, weights):
        last = ("layers.1.", "norm.")
        for name, tensor in weights:
            if name.startswith(last) == (module.rank == 1):
                module.get_parameter(name.replace(".", "/")).data.copy_(tensor)

    def stage(rank: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.rank = rank
        for name, shape in SHAPES.items():
            if name.startswith(("layers.1.", "norm.")) == (rank == 1):
                module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros(shape)))
        return module

    made = group(2, 2, mode="bucket", bucket_bytes=500, timeout_s=5.0)
    made.workers = [
        ModuleWorker(lambda rank=rank: stage(rank), rank, 2, stages, made.control, made.exchange) for rank in range(2)
    ]
    made.replica = ModuleReplica(made.workers)
    made.attach()
    for version in (1, 2):
        made.publish(version)
        held = {name: value for worker in made.workers for name, value in worker.state().items()}
        assert len(held) == len(SHAPES)
        assert all(torch.equal(held[name.replace(".", "/")], whole(name, version)) for name in SHAPES)


def test_unchanged_weights_change_nothing(group):
    made = group(2, 1)
    made.attach()
    made.publish(1)
    before = made.workers[0].state()
    list(made.pool.map(lambda sync: sync.publish(2), made.syncs))
    after = made.workers[0].state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def alone(source, mode: str) -> Publisher:
    """The publisher of a group of one source rank."""
    return Publisher(source, group="g", rank=0, world_size=1, mode=mode, kinds=("local",), exchange=LocalExchange())


def test_copies_without_a_cast_move_bits_and_not_floats(monkeypatch):
    # CUDA's batched copy takes 16-bit floats through float32, which alters NaNs; on a CPU only the dtypes can tell
    source = Sharded(0, 1, torch.bfloat16, "bfloat16")
    publisher = alone(source, "snapshot")
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, out: seen.extend(t.dtype for t in (*into, *out)))
    next(publisher.rounds_written())
    assert set(seen) == {torch.int16}
    publisher.close()


class SameAddresses:
    """A source whose parameters lie at the addresses of before, in other storages: the first ones were emptied."""

    def __init__(self) -> None:
        self.tensor = torch.ones(4)

    def metadata(self):
        return (TensorMeta(name="w", shape=(4,), dtype="float32"),)

    def shards(self):
        return (Shard("w", (0,), self.tensor),)

    def ignored(self):
        return ()

    def fingerprint(self):
        return "here"


def test_an_arena_is_not_filled_from_a_storage_that_was_emptied():
    source = SameAddresses()
    publisher = alone(source, "snapshot")
    assert publisher.follow()
    emptied, source.tensor = source.tensor, torch.full((4,), 2.0)
    emptied.untyped_storage().resize_(0)
    assert publisher.follow()
    next(publisher.rounds_written())
    (region,) = publisher._regions.values()
    assert torch.equal(region.tensor[:16].view(torch.float32), source.tensor)
    publisher.close()


def test_memory_that_was_exported_and_emptied_since_is_not_read():
    source = SameAddresses()
    publisher = alone(source, "live")
    assert publisher.follow()
    emptied, source.tensor = source.tensor, torch.full((4,), 2.0)
    emptied.untyped_storage().resize_(0)
    assert not publisher.follow()  # it joins again
    publisher.close()


class Renamed:
    """A source that says of the same memory something else than before, and does not watch itself."""

    def __init__(self) -> None:
        self.memory = torch.arange(8.0)
        self.views = {"a": self.memory[:4].view(2, 2), "b": self.memory[4:].view(2, 2)}

    def metadata(self):
        return tuple(TensorMeta(name=name, shape=(2, 2), dtype="float32") for name in "ab")

    def shards(self):
        return [Shard(name, (0, 0), view) for name, view in self.views.items()]

    def ignored(self):
        return ()


@pytest.mark.parametrize(
    "change",
    [
        lambda views: {"b": views["a"], "a": views["b"]},
        lambda views: {"a": views["a"].t(), "b": views["b"]},
        lambda views: {"a": views["a"].view(torch.int32), "b": views["b"]},
    ],
    ids=["swapped", "turned", "reinterpreted"],
)
def test_a_source_that_says_otherwise_of_the_same_memory_is_heard(change):
    source = Renamed()
    publisher = alone(source, "live")
    assert publisher.follow()
    source.views = change(source.views)
    assert not publisher.follow()
    publisher.close()


def test_cast_to_the_wire_dtype_is_a_snapshot_and_replayed_into_the_engine(group):
    made = group(2, 2, wire="bfloat16")
    made.attach()
    report = made.publish(1)[0]
    assert report.mode == "snapshot"
    assert "torch.float32" in report.mode_reason
    assert_serves(made, 1, torch.bfloat16)


def test_a_packed_link_gives_the_same_bytes(group):
    made = group(2, 2, pack_threshold=1 << 20)
    made.attach()
    for version in (1, 2):
        made.publish(version)
        assert_serves(made, version)


def test_a_tensor_nobody_holds(group):
    def wants_more(module, weights):
        load(module, weights)

    made = group(1, 1, load=wants_more)
    made.sources[0].metadata  # noqa: B018
    worker = made.workers[0]
    worker.landing._load, worker.landing.kept = lambda weights: None, ("*",)
    with pytest.raises(CoverageError, match=r"module.*embed\.weight"):
        made.attach()


def test_two_joins_under_one_rank(group):
    made = group(1, 1)
    with pytest.raises(MembershipError, match="rank 0"):
        WeightSync(
            made.control, Sharded(0, 1), group="test", rank=0, world_size=1, kinds=("local",), exchange=made.exchange
        )


def test_a_failed_pull_tears_the_replica_and_the_next_sync_heals_it(group):
    made = group(2, 2)
    made.attach()
    made.publish(1)
    landing = made.workers[1].landing
    close = landing.close
    landing.close = lambda module: (_ for _ in ()).throw(RuntimeError("the post-load step broke"))
    for source in made.sources:
        source.fill(2)

    def publish(sync):
        with pytest.raises(RdtError) as caught:
            sync.publish(2)
        return str(caught.value)

    messages = list(made.pool.map(publish, made.syncs))
    assert len(set(messages)) == 1
    assert "post-load step broke" in messages[0]
    assert "module/1" in messages[0]
    with pytest.raises(TornReplicaError, match="is torn"):
        made.workers[1].state()
    assert made.workers[1].version() is None
    landing.close = close
    made.publish(3)
    assert_serves(made, 3)


def test_an_account_that_is_refused_never_lets_the_replica_serve(group, monkeypatch):
    made = group(2, 2)
    made.attach()
    made.publish(1)
    done = made.control.done

    def short(report, *args):
        missing = 1 if report.reader == "module/1" else 0
        return done(msgspec.structs.replace(report, bytes=report.bytes - missing), *args)

    monkeypatch.setattr(made.control, "done", short)
    for source in made.sources:
        source.fill(2)

    def publish(sync):
        with pytest.raises(RdtError, match=r"engine rank module/1 failed in accounting: .* bytes arrived") as caught:
            sync.publish(2)
        return str(caught.value)

    assert len(set(made.pool.map(publish, made.syncs))) == 1
    for worker in made.workers:
        with pytest.raises(TornReplicaError, match="is torn"):
            worker.state()
        assert worker.version() is None
    monkeypatch.undo()
    made.publish(3)
    assert_serves(made, 3)


def test_a_sync_that_needs_nothing_of_a_source_rank_asks_nothing_of_it(group, monkeypatch):
    calls = []
    post = LocalControl._post
    monkeypatch.setattr(
        LocalControl, "_post", lambda self, method, args: (calls.append(method), post(self, method, args))[1]
    )
    made = group(2, 1, mode="live")
    made.attach()
    made.publish(1)
    calls.clear()
    made.publish(2)
    assert_serves(made, 2)
    assert sorted(calls) == ["begin", "begin", "commit", "done", "enter", "outcome"]


def asked_late(made, monkeypatch) -> list[tuple[bool, bool]]:
    """For each pull: whether the reader said that it reads already, and whether it had that when it waited for the answer."""
    post, found = LocalControl._post, []

    def watched(self, method, args):
        wait = post(self, method, args)
        if method != "enter":
            return wait

        def answer(limit_s):
            found.append((args[4], torch.equal(made.workers[0].module.norm, whole("norm.weight", args[2]))))
            return wait(limit_s)

        return answer

    monkeypatch.setattr(LocalControl, "_post", watched)
    return found


@pytest.mark.parametrize(
    ("early", "options"),
    [
        (True, {"mode": "live"}),
        (True, {"mode": "live", "verify": "full"}),
        (False, {"mode": "live", "pack_threshold": 1 << 20}),
        (False, {"mode": "snapshot"}),
        (False, {"mode": "bucket", "bucket_bytes": 1000}),
    ],
)
def test_a_reader_asks_while_it_reads_what_holds_still_since_the_sync_began(group, monkeypatch, early, options):
    made = group(2, 1, **options)
    made.attach()
    asked = asked_late(made, monkeypatch)
    for version in (1, 2, 2, 3):
        made.publish(version)
        assert_serves(made, version)
    # not before links are made, nor for a version that is served
    assert asked == [(False, False), (early, early), (False, True), (early, early)]


@pytest.mark.parametrize(("mode", "version", "torn"), [("live", 3, True), ("live", 2, False), ("snapshot", 3, False)])
def test_a_pull_that_the_coordinator_refuses_tears_only_who_has_begun_to_read(group, mode, version, torn):
    made = group(2, 1, mode=mode)
    made.attach()
    for one in (1, 2):
        made.publish(one)
    for source in made.sources:
        source.fill(7)  # a trainer that goes on
    with pytest.raises(SyncError, match="no sync is running"):
        made.workers[0].pull(version, 5.0)
    (state,) = made.control.status().replicas
    assert (state.state, state.version) == (("torn", None) if torn else ("serving", 2))
    if torn:
        assert made.workers[0].version() is None
        with pytest.raises(TornReplicaError, match="failed half-way"):
            made.workers[0].state()
    else:
        assert_serves(made, 2)
    made.publish(4)
    assert_serves(made, 4)


@pytest.mark.parametrize("policy", ["require_all", "best_effort"])
def test_a_reader_whose_question_is_lost_is_torn_for_the_coordinator_as_well(group, monkeypatch, policy):
    made = group(2, 1, mode="live", policy=policy)
    made.attach()
    for version in (1, 2):
        made.publish(version)
    post = LocalControl._post

    def lost(limit_s):
        raise DeadlineError("no answer to enter")

    monkeypatch.setattr(
        LocalControl, "_post", lambda self, method, args: lost if method == "enter" else post(self, method, args)
    )
    with pytest.raises(RdtError, match="no answer to enter"):
        made.publish(3)
    assert made.workers[0].landing.torn
    (state,) = made.control.status().replicas
    assert (state.state, state.version) == ("torn", None)
    monkeypatch.undo()
    made.publish(4)
    assert_serves(made, 4)


def test_a_question_that_comes_again_tears_nobody(group):
    made = group(2, 1, mode="live")
    made.attach()
    for version in (1, 2, 3):
        made.publish(version)
    reader = made.workers[0].receiver
    for version in (2, 3):
        with pytest.raises(SyncError):
            made.control.enter(reader.name, reader._connection.manifest.incarnation, version, 1.0, early=True)()
        (state,) = made.control.status().replicas
        assert (state.state, state.version) == ("serving", 3)
    assert_serves(made, 3)


class Believed:
    """Allocations of which the count says that they are those of before, and the driver another thing once."""

    is_confirmed = False
    wrong = True

    def ids(self) -> tuple[int, ...]:
        return ()

    def confirm(self) -> bool:
        time.sleep(0.3)  # the readers have all bytes long since
        wrong, self.wrong = self.wrong, False
        return not wrong


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_turns_out_to_be_anothers_fails_the_sync_before_its_commit(group, rank):
    made = group(2, 1, mode="live")
    made.attach()
    made.publish(1)
    made.syncs[rank]._publisher._allocations = Believed()
    for source in made.sources:
        source.fill(2)

    def fails(sync):
        with pytest.raises(
            RdtError, match=f"source rank {rank} failed in check: memory of source rank {rank} was given"
        ) as error:
            sync.publish(2)
        return str(error.value)

    assert len(set(made.pool.map(fails, made.syncs))) == 1
    assert made.control.current() == (1, None)
    assert made.workers[0].version() is None
    assert made.workers[0].landing.torn
    made.publish(3)
    assert_serves(made, 3)


@pytest.mark.parametrize("way", ["subclass", "instance", "proxy"])
def test_a_client_with_a_step_of_its_own_is_driven_step_by_step(group, way):
    pulled = []

    class Own(ModuleReplica):
        def pull(self, version, *, deadline):
            pulled.append(version)
            super().pull(version, deadline=deadline)

    made = group(2, 1)

    class Proxy:
        def __getattr__(self, name):
            return getattr(plain, name)

        def pull(self, version, *, deadline):
            pulled.append(version)
            plain.pull(version, deadline=deadline)

    if way == "subclass":
        made.replica = Own(made.workers)
    elif way == "proxy":
        plain, made.replica = made.replica, Proxy()
    else:
        pull = made.replica.pull
        made.replica.pull = lambda version, *, deadline: (pulled.append(version), pull(version, deadline=deadline))
    made.attach()
    made.publish(1)
    assert pulled == [1]


def test_parameters_are_settled_for_readers_of_whom_nothing_is_packed_beside_others(group, monkeypatch):
    made = group(1, 1, mode="live", pack_threshold=1 << 20)
    made.attach()
    made.publish(1)
    settled = []
    monkeypatch.setattr("rdt_core.publisher.settle", settled.append)
    assert made.syncs[0]._publisher.readable() == 0, "something is packed"
    assert settled, "and yet others read as soon as the sync has begun"


def test_packed_pieces_are_packed_again_in_every_sync_before_they_are_published(group, monkeypatch):
    made = group(2, 1, mode="live", pack_threshold=1 << 20)
    made.attach()
    made.publish(1)
    calls = []
    monkeypatch.setattr(
        made.control, "published", lambda *args, old=made.control.published: (calls.append(args), old(*args))
    )
    made.publish(2)
    assert_serves(made, 2)
    assert sorted(args[0] for args in calls) == [0, 1]


def test_versions_that_differ_fail_on_every_rank(group):
    made = group(2, 1)
    made.attach()
    barrier = threading.Barrier(2)

    def publish(sync):
        barrier.wait()
        with pytest.raises(SyncError) as caught:
            sync.publish(5 + sync.rank)
        return str(caught.value)

    messages = list(made.pool.map(publish, made.syncs))
    assert "version 5" in messages[0]
    assert "version 6" in messages[0]


def test_parameters_that_moved_are_read_where_they_are_now(group):
    made = group(2, 1, mode="live")
    made.attach()
    made.publish(1)
    for source in made.sources:
        source.local = [(name, start, tensor.clone()) for name, start, tensor in source.local]
    made.publish(2)
    assert_serves(made, 2)


@pytest.mark.parametrize("mode", ["snapshot", "bucket"])
def test_parameters_that_moved_below_an_arena_cost_no_new_plan(group, mode):
    made = group(2, 1, mode=mode)
    made.attach()
    made.publish(1)
    epoch = made.control.status().epoch
    for version in (2, 3):
        for source in made.sources:
            source.local = [(name, start, tensor.clone()) for name, start, tensor in source.local]
        made.publish(version)
        assert_serves(made, version)
    assert made.control.status().epoch == epoch


def test_a_replica_that_was_detached_may_come_back_under_its_name(group):
    made = group(2, 2, mode="snapshot")
    made.attach()
    made.publish(1)
    made.syncs[0].detach(made.replica)
    with pytest.raises(MembershipError, match="no replica named 'module' is attached"):
        made.syncs[0].reconnect(made.replica)
    made.publish(2)
    assert_serves(made, 1)
    made.attach()
    made.publish(3)
    assert_serves(made, 3)
    made.syncs[0].reconnect(made.replica)
    made.publish(4)
    assert_serves(made, 4)


class Offloading(Sharded):
    """A source that says where its parameters are, and that they are gone."""

    gone = False

    def fingerprint(self):
        if self.gone:
            raise SourceError("'embed.weight' is offloaded. Bring it back before publish")
        return [tensor.data_ptr() for _, _, tensor in self.local]


@pytest.mark.parametrize("mode", ["live", "snapshot", "bucket"])
def test_offloaded_parameters_are_said_and_the_next_publish_works(group, mode, monkeypatch):
    monkeypatch.setattr(f"{__name__}.Sharded", Offloading)
    made = group(2, 1, mode=mode)
    made.attach()
    made.publish(1)
    made.sources[1].gone = True
    errors = []

    def publish(sync):
        try:
            sync.publish(2)
        except RdtError as error:
            errors.append(str(error))

    list(made.pool.map(publish, made.syncs))
    assert len(errors) == 2
    assert all("is offloaded. Bring it back before publish" in error for error in errors)
    assert_serves(made, 1)  # no byte had been read
    made.sources[1].gone = False
    for source in made.sources:
        source.local = [(name, start, tensor.clone()) for name, start, tensor in source.local]
    made.publish(3)
    assert_serves(made, 3)


def test_live_keeps_the_memory_that_readers_know(group):
    # else another tensor could get the address of one that was offloaded, and be served in its place
    for mode, kept in (("live", True), ("bucket", False)):
        made = group(1, 1, mode=mode)
        made.attach()
        made.publish(1)
        (source,) = made.sources
        names = [name for name, _, _ in source.local]
        old = [StorageWeakRef(tensor.untyped_storage()) for _, _, tensor in source.local]
        source.local = [(name, start, tensor.clone()) for name, start, tensor in source.local]
        gc.collect()
        alive = [name for name, storage in zip(names, old, strict=True) if not storage.expired()]
        assert alive == (names if kept else [])
        made.publish(2)
        assert_serves(made, 2)


def test_a_join_that_failed_after_parameters_moved_is_made_up_for(group):
    # else readers would go on with the old addresses, and the next version be stamped with the weights of an old one
    made = group(2, 1, mode="live", kinds=("mapped",))
    made.attach()
    made.publish(1)
    source = made.sources[0]
    source.local = [(name, start, tensor.clone()) for name, start, tensor in source.local]
    join, failed = made.control.join, []

    def flaky(manifest, token, **options):
        if not failed:
            failed.append(1)
            raise DeadlineError("the coordinator did not answer in time")
        return join(manifest, token, **options)

    made.control.join = flaky
    with pytest.raises(RdtError, match="did not answer in time"):
        made.publish(2)
    assert failed
    made.publish(3)
    assert_serves(made, 3)


@pytest.mark.parametrize("again", [2, 3])
def test_ranks_that_come_later_than_a_failure_hear_of_it_at_once(group, again):
    made = group(3, 1, mode="snapshot", timeout_s=20.0)
    made.attach()
    made.publish(1)
    failing, shards = made.sources[0], made.sources[0].shards
    failing.shards = lambda: (_ for _ in ()).throw(SourceError("its parameters are offloaded"))
    with pytest.raises(SyncError, match="are offloaded"):
        made.syncs[0].publish(2)
    failing.shards = shards
    # the failed rank is at its next publish already
    next_one = made.pool.submit(made.syncs[0].publish, again)
    for late in made.syncs[1:]:
        began = time.monotonic()
        with pytest.raises(SyncError, match=r"version 2: source rank 0 failed in check: its parameters are offloaded"):
            late.publish(2)
        assert time.monotonic() - began < 5
    for source in made.sources:
        source.fill(again)
    others = [made.pool.submit(sync.publish, again) for sync in made.syncs[1:]]
    assert {one.result(20).version for one in (next_one, *others)} == {again}
    made.publish(again + 1)
    assert_serves(made, again + 1)


def test_nothing_is_packed_any_more_for_a_replica_that_left(group):
    made = group(2, 1, mode="snapshot", pack_threshold=1 << 20)
    made.attach()
    made.publish(1)
    assert all(sync._publisher._served for sync in made.syncs)
    made.syncs[0].detach(made.replica)
    made.publish(2)
    assert not any(sync._publisher._served for sync in made.syncs)
    made.attach()
    made.publish(3)
    assert_serves(made, 3)
