"""The conformance checks: our own sources, landings and clients pass, and a broken one of each kind is told what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import ray
import torch

from rdt_core.errors import ConformanceError, EngineError
from rdt_core.landing import Destination, ModuleLanding
from rdt_core.replica import ModuleReplica
from rdt_core.sources import CheckpointSource, IterableSource, ModuleSource
from rdt_core.sources.base import Shard
from rdt_core.testing import (
    LandingCase,
    LandingSuite,
    LocalGroup,
    SourceSuite,
    TensorSource,
    check_engine_client,
    check_landing,
    check_source,
)
from rdt_core.wire import TensorMeta
from rdt_testbed.halves import SHAPES, Elsewhere, Halves, Served, load, value

pytestmark = pytest.mark.unit

Make = Callable[[int, int], Any]


def weights(number: int) -> dict[str, torch.Tensor]:
    return {name: value(name, number) for name in SHAPES}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(torch.float32)


# --- what is good


class TestModuleSource(SourceSuite):
    def make_source(self, rank: int, world_size: int) -> ModuleSource:
        self.model = model()
        return ModuleSource(self.model)

    def expected(self) -> Mapping[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def move(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone() + 1


class TestHalves(SourceSuite):
    world_size = 3

    def make_source(self, rank: int, world_size: int) -> Halves:
        source = Halves(rank, world_size, "bfloat16")
        source.fill(1)
        return source


class TestIterableSource(SourceSuite):
    def make_source(self, rank: int, world_size: int) -> IterableSource:
        self.tensors = weights(1)
        metadata = [TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
        return IterableSource(metadata, lambda: self.tensors.items())

    def expected(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def change(self) -> None:
        self.tensors = weights(2)


def test_a_checkpoint_passes(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    saved = {**weights(1), "count": torch.arange(3), "scale": torch.tensor(2.0, dtype=torch.bfloat16)}
    save_file(saved, tmp_path / "model.safetensors")
    check_source(lambda rank, ranks: CheckpointSource(tmp_path))


class TestModuleLanding(LandingSuite):
    world_size = 2

    def make_landing(self, rank: int, world_size: int) -> ModuleLanding:
        module = Served(rank, world_size)
        return ModuleLanding(module, lambda pairs: load(module, pairs))

    def weights(self, number: int) -> Mapping[str, torch.Tensor]:
        return weights(number)

    def state(self, landing: ModuleLanding) -> Mapping[str, torch.Tensor]:
        return landing.module.state_dict()

    def load(self, landing: ModuleLanding, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            load(landing.module, pairs)

    def refuses(self, landing: ModuleLanding) -> bool:
        return landing.torn is not None


class TestLandingThatLandsElsewhere(TestModuleLanding):
    def make_landing(self, rank: int, world_size: int) -> ModuleLanding:
        module = Served(rank, world_size)
        return Elsewhere(module, lambda pairs: load(module, pairs))


def client_of(group: LocalGroup) -> ModuleReplica:
    source = TensorSource(weights(1))
    _, replica = group.serve_whole(source.metadata())
    group.syncs[0].detach(replica)
    return replica


def test_a_replica_of_modules_passes() -> None:
    with LocalGroup([Halves(rank, 2, "float32") for rank in range(2)]) as group:
        replica = client_of(group)
        check_engine_client(
            replica, group.syncs[0], group.publish, generates=lambda: replica.workers[0].landing.torn is None
        )


# --- what is broken


def broken(**changes: Any) -> Make:
    """Makes sources of two ranks, of which rank 1 does something else than it should."""

    def make(rank: int, ranks: int) -> Halves:
        source = Halves(rank, ranks, "float32")
        source.fill(1)
        for name, change in changes.items():
            if rank == 1:
                setattr(source, name, change(source, getattr(source, name, None)))
        return source

    return make


def shards(edit: Callable[[list[Shard]], list[Shard]]) -> Callable[[Any, Any], Any]:
    return lambda source, inner: lambda: edit(list(inner()))


def metadata(edit: Callable[[list[TensorMeta]], list[TensorMeta]]) -> Callable[[Any, Any], Any]:
    return lambda source, inner: lambda: edit(list(inner()))


def counting(source: Any, inner: Any) -> Any:
    calls = iter(range(1000))
    return lambda: next(calls)


def copies(source: Any, inner: Any) -> Any:
    kept: list[Any] = []

    def shards() -> list[Shard]:
        kept.append([Shard(one.name, one.offset, one.tensor.clone()) for one in inner()])
        return kept[-1]

    return shards


def first(change: Callable[[Shard], Shard]) -> Callable[[list[Shard]], list[Shard]]:
    return lambda held: [change(held[0]), *held[1:]]


META = TensorMeta(name="norm", shape=(17,), dtype="float32")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"shards": shards(lambda held: held[1:])}, r"'embed' of shape \(40, 16\): nobody holds \[20:40, 0:16\]"),
        ({"shards": copies}, r"rank 1: shards\(\) gives 'embed' in other memory at its second call: it is a copy"),
        (
            {"shards": shards(first(lambda one: Shard("other", one.offset, one.tensor)))},
            r"rank 1 holds a shard of 'other', which its metadata\(\) does not declare",
        ),
        (
            {"shards": shards(first(lambda one: Shard(one.name, (21, 0), one.tensor)))},
            r"'embed' at offset \(21, 0\) of shape \(20, 16\), which is no box of a tensor of shape \(40, 16\)",
        ),
        ({"shards": shards(first(lambda one: Shard(one.name, (20,), one.tensor)))}, "is no box of a tensor"),
        ({"metadata": metadata(lambda found: [*found, found[0]])}, "rank 1 declares 'embed' twice"),
        (
            {"metadata": metadata(lambda found: [*found[:-1], META])},
            r"rank 0 declares checkpoint tensor 'norm' \[16\]|'norm' \[17\] float32",
        ),
        (
            {"metadata": metadata(lambda found: [TensorMeta(name="embed", shape=[40, 16], dtype="float32")])},
            r"rank 1 declares 'embed' with the shape \[40, 16\], a list; a shape is a tuple of plain integers",
        ),
        (
            {"metadata": metadata(lambda found: [TensorMeta(name="norm", shape=(16,), dtype=torch.float32)])},
            "rank 1 declares 'norm' as torch.float32; dtypes on the wire go by name: write 'float32'",
        ),
        ({"ignored": lambda source, inner: lambda: ["typo"]}, "rank 1 ignores 'typo', which no rank declares"),
        ({"fingerprint": counting}, r"rank 1: fingerprint\(\) differs between two calls"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_broken_source_is_told_why(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConformanceError, match=wrong):
        check_source(broken(**changes), world_size=2)


def test_what_is_no_source_is_told() -> None:
    lacks = r"rank 0 is a Linear, which lacks methods of a source: metadata, ignored, shards \(or __iter__\);"
    with pytest.raises(ConformanceError, match=lacks):
        check_source(lambda rank, ranks: torch.nn.Linear(2, 2))


def test_ranks_that_hold_other_bytes_of_the_same_box_are_told() -> None:
    def make(rank: int, ranks: int) -> TensorSource:
        tensors = weights(1)
        tensors["norm"][3] += rank
        return TensorSource(tensors)

    with pytest.raises(
        ConformanceError, match=r"source ranks 0 and 1 hold 'norm' \[0:16\] with other bytes: 1 of 16 .* at \(3,\)"
    ):
        check_source(make, world_size=2)


class Stale(TensorSource):
    """Copies once what its module has, and says ever since that it is that."""


def test_a_copy_that_is_not_refreshed_is_told() -> None:
    module = torch.nn.Linear(4, 4)
    with pytest.raises(ConformanceError, match=r"after weights changed where they lie.*'bias': 4 of 4 elements differ"):
        check_source(
            lambda rank, ranks: Stale({"bias": module.bias}),
            expected=lambda: {"bias": module.bias},
            change=lambda: module.bias.data.add_(1),
        )


def test_a_tensor_that_is_left_out_is_told() -> None:
    module = torch.nn.Linear(4, 4)
    with pytest.raises(ConformanceError, match="'weight' is missing"):
        check_source(
            lambda rank, ranks: TensorSource({"bias": module.bias}), expected=lambda: dict(module.named_parameters())
        )


class Unmoved(ModuleSource):
    def fingerprint(self) -> Any:
        return 0


class Remembered(ModuleSource):
    """Keeps its first views for ever."""

    def shards(self) -> Any:
        self.first = getattr(self, "first", None) or super().shards()
        return self.first


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Unmoved, r"fingerprint\(\) is the same after parameters moved"),
        (Remembered, "after parameters moved: what is served"),
    ],
)
def test_moves_that_go_unnoticed_are_told(kind: type[ModuleSource], wrong: str) -> None:
    module = model()

    def move() -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone() + 1

    with pytest.raises(ConformanceError, match=wrong):
        check_source(lambda rank, ranks: kind(module), expected=lambda: dict(module.named_parameters()), move=move)


def test_passes_that_cannot_be_repeated_are_told() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = iter(weights(1).items())

        def metadata(self) -> list[TensorMeta]:
            return TensorSource(weights(1)).metadata()

        def ignored(self) -> list[str]:
            return []

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self.left

    with pytest.raises(
        ConformanceError, match=r"pass 1 gives \('layers.0.q', \(16, 16\)\) where \('embed', \(40, 16\)\)"
    ):
        check_source(lambda rank, ranks: Once())


class Landing(ModuleLanding):
    def __init__(self) -> None:
        module = Served(0, 1)
        super().__init__(module, lambda pairs: load(module, pairs))


class WritingTrace(Landing):
    def trace(self, tensors: Any) -> Any:
        self.module.norm.data.fill_(7)
        return super().trace(tensors)


class NewStorage(Landing):
    def storage(self, key: str) -> torch.Tensor:
        return super().storage(key).clone()


class WrongSize(Landing):
    def destinations(self) -> dict[str, Destination]:
        found = dict(super().destinations())
        found["norm"] = Destination("norm", "", True, 3)
        return found


class Forgotten(Landing):
    def destinations(self) -> dict[str, Destination]:
        return {key: one for key, one in super().destinations().items() if key != "norm"}


class StillTorn(Landing):
    def finish(self) -> None:
        pass


class NeverTorn(Landing):
    def abort(self, reason: str) -> None:
        self.torn = None


class OpenWhileWritten(Landing):
    def begin(self) -> None:
        pass


class Dropping(Elsewhere):
    """Closes a module without using what was lent for it."""

    def __init__(self) -> None:
        module = Served(0, 1)
        super().__init__(module, lambda pairs: load(module, pairs))

    def close(self, module: str) -> None:
        if module == "layers.1":
            for key in [key for key in self.lent if key.startswith(module)]:
                del self.lent[key]
        super().close(module)


class Moving(Landing):
    def finish(self) -> None:
        super().finish()
        self.module.norm.data = self.module.norm.data.clone()
        self._find()


class Careless(Landing):
    """Takes what comes, and lets the rest be what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = ("*",)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (WritingTrace, r"trace\(\) changed the model.*'norm': 16 of 16 elements differ"),
        (NewStorage, r"storage\('embed'\) is other memory at its second call"),
        (WrongSize, r"storage\('norm'\) is a torch.uint8 tensor of shape \(64,\); .* 3 bytes"),
        (Forgotten, r"a slice that lands in 'norm', which destinations\(\) does not have"),
        (StillTorn, "in the first sync: the engine still refuses to generate"),
        (NeverTorn, r"after a sync that failed \(finish\): the engine would generate"),
        (OpenWhileWritten, r"between begin\(\) and finish\(\) the engine would generate"),
        (Dropping, r"in the first sync: the model is not what the engine's own load makes of it: 'layers.1"),
        (Moving, "in the first sync: 'norm' lies elsewhere than before"),
        (Careless, "connected to a source that does not offer 'embed'"),
    ],
)
def test_a_broken_landing_is_told_why(kind: Callable[[], ModuleLanding], wrong: str) -> None:
    case = LandingCase(
        lambda rank, ranks: kind(),
        weights,
        state=lambda landing: landing.module.state_dict(),
        load=lambda landing, pairs: load(landing.module, ((name, tensor.detach()) for name, tensor in pairs)),
        refuses=lambda landing: landing.torn is not None,
    )
    with pytest.raises(ConformanceError, match=wrong):
        check_landing(case)


class Client:
    """A client that passes everything on to another one, step by step."""

    def __init__(self, inner: ModuleReplica) -> None:
        self.inner, self.name = inner, inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StampsEarly(Client):
    stamped: int | None = None

    def finish(self, version: int, *, deadline: float) -> None:
        self.inner.finish(version, deadline=deadline)
        self.stamped = version

    def version(self, *, deadline: float) -> int | None:
        return self.stamped


class NeverStamps(Client):
    def version(self, *, deadline: float) -> int | None:
        return None


class DeafToAbort(Client):
    """Its engine goes on with what it had."""

    last: int | None = None
    idle = True

    def pull(self, version: int, *, deadline: float) -> None:
        self.idle = False
        self.inner.pull(version, deadline=deadline)

    def commit(self, version: int, *, deadline: float) -> None:
        self.inner.commit(version, deadline=deadline)
        self.last, self.idle = version, True

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        self.idle = True

    def version(self, *, deadline: float) -> int | None:
        return self.last if self.idle else None


class Dead(Client):
    def health(self, *, deadline: float) -> None:
        raise EngineError("it is dead")


class LetsRayOut(Client):
    def version(self, *, deadline: float) -> int | None:
        if deadline < time.monotonic():
            raise ray.exceptions.GetTimeoutError("Get timed out")
        return self.inner.version(deadline=deadline)


class Halting(Client):
    def resume(self, *, deadline: float) -> None:
        self.halted = True


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (StampsEarly, r"says version 1 after finish\(\) of version 1, before its commit"),
        (NeverStamps, r"says version None after commit\(\); 1 is expected"),
        (DeafToAbort, "says version 2 after a sync that failed; abort.. tears every rank"),
        (Halting, "does not generate after the first sync"),
        (LetsRayOut, r"version\(\) whose deadline has passed raises GetTimeoutError of ray.exceptions"),
    ],
)
def test_a_broken_client_is_told_why(kind: type[Client], wrong: str) -> None:
    with LocalGroup([TensorSource(weights(1))]) as group:
        client = kind(client_of(group))
        with pytest.raises(ConformanceError, match=wrong):
            check_engine_client(client, group.syncs[0], group.publish, generates=lambda: not hasattr(client, "halted"))


def test_a_client_that_is_dead_or_incomplete_is_told() -> None:
    with LocalGroup([TensorSource(weights(1))]) as group:
        replica = client_of(group)
        with pytest.raises(EngineError, match="it is dead"):
            check_engine_client(Dead(replica), group.syncs[0], group.publish)
        with pytest.raises(ConformanceError, match="a object has no `name`"):
            check_engine_client(object(), group.syncs[0], group.publish)
        client = Client(replica)
        client.commit = None
        with pytest.raises(ConformanceError, match="a Client lacks commit"):
            check_engine_client(client, group.syncs[0], group.publish)
