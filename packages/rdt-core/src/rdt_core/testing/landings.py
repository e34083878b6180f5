"""Checks that a landing runs to prove itself: its trace, its destinations, whole syncs, and syncs that fail.

`check_landing` runs them all with one engine's own model and loader, in one process, without Ray. What a sync leaves in the
model is compared bit by bit with what the engine's own load of the same tensors leaves. It looks at what the landing does, not
at how: a landing that computes (quantises, repacks) passes if its load does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ..errors import ConformanceError, RdtError
from ..landing import Landing
from ..wire import TensorMeta
from .comparing import compare, refuse
from .local import LocalGroup, TensorSource

MakeLanding = Callable[[int, int], Landing]
Weights = Callable[[int], Mapping[str, torch.Tensor]]
State = Callable[[Any], Mapping[str, torch.Tensor]]
Load = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class LandingCase:
    """A landing to check, and its engine's own way of loading to check it against.

    Attributes:
        make_landing: makes the landing of engine rank `(rank, world_size)`; over a new model each time, or always over one.
        weights: returns full checkpoint tensors by name on the CPU, other values for each of the numbers 1, 2 and 3.
        state: returns what the landing's model serves, by any names: compared with what `load` left there.
        load: fills the landing's model with `(name, tensor)` pairs by the engine's own way of loading, from start to end.
        refuses: whether the landing's engine would refuse to generate now. Without it that a torn model refuses is not checked.
        world_size: engine ranks, all in this process.
        device: of the model.
        needed: a checkpoint tensor that the model cannot do without; default: the first.
    """

    make_landing: MakeLanding
    weights: Weights
    _: KW_ONLY
    state: State
    load: Load
    refuses: Callable[[Any], bool] | None = None
    world_size: int = 1
    device: torch.device | str = "cpu"
    needed: str | None = None

    def landings(self) -> Iterator[Landing]:
        """Makes the landing of one engine rank after the other, each when it is asked for: models can be large."""
        return (self.make_landing(rank, self.world_size) for rank in range(self.world_size))

    def tensors(self) -> Sequence[TensorMeta]:
        """What a trace is given."""
        return TensorSource(self.weights(1)).metadata()


def check_landing(case: LandingCase) -> None:
    """Runs every check of a landing.

    Raises:
        ConformanceError: the landing does not keep its protocol.
        RdtError: rdt itself refused the landing.
    """
    for landing in case.landings():
        check_trace(landing, case.tensors(), case.state)
    check_landed(case)
    check_missing(case)


def check_trace(landing: Landing, tensors: Sequence[TensorMeta], state: State) -> None:
    """Checks a trace: nothing is written, it is the same each time, and all that it reached is a destination.

    Raises:
        ConformanceError: says which of them is not so.
    """
    if not isinstance(landing, Landing):
        refuse(f"a {type(landing).__name__} lacks methods of `rdt_core.landing.Landing`")
    if not isinstance(getattr(landing, "engine", None), str) or not landing.engine:
        refuse(
            "the landing's attribute `engine` names the engine and its version for manifests and errors; it is missing"
        )
    before = _copy(state(landing))
    first = landing.trace(tensors)
    compare(state(landing), before, "trace() changed the model, where it only runs loaders over stand-ins")
    again = landing.trace(tensors)
    if list(first.slices) != list(again.slices):
        refuse("trace() finds other slices at its second call", "a plan holds as long as the links do")
    known = {meta.name for meta in tensors}
    destinations = landing.destinations()
    for piece in first.slices:
        if piece.name not in known:
            refuse(f"trace() reports a slice of {piece.name!r}, which it was not given")
        if piece.destination not in destinations:
            refuse(f"trace() reports a slice that lands in {piece.destination!r}, which destinations() does not have")
    for key, destination in destinations.items():
        if destination.key != key:
            refuse(f"destinations() has {destination.key!r} under the key {key!r}")
        if destination.in_place:
            _check_storage(landing, key, destination.nbytes)


def _check_storage(landing: Landing, key: str, nbytes: int) -> None:
    storage = landing.storage(key)
    if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() != nbytes:
        refuse(
            f"storage({key!r}) is a {storage.dtype} tensor of shape {tuple(storage.shape)}",
            f"the whole storage is expected as {nbytes} bytes of torch.uint8, as destinations() says",
        )
    if landing.storage(key).data_ptr() != storage.data_ptr():
        refuse(f"storage({key!r}) is other memory at its second call", "it is the model's own memory, for ever")


def check_landed(case: LandingCase) -> None:
    """Checks whole syncs, in place of the engine's own load: bytes, addresses, what refuses when, and healing after a failure.

    Raises:
        ConformanceError: names the engine rank, the tensor, or the moment.
        RdtError: a sync failed.
    """
    weights, state = case.weights, case.state
    wanted: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for rank, reference in enumerate(case.landings()):
        for number in (1, 2):
            case.load(reference, list(weights(number).items()))
            wanted[rank, number] = _copy(state(reference))
    landings = [_Watched(landing, case.refuses) for landing in case.landings()]
    source = TensorSource(weights(1))
    with LocalGroup([source]) as group:
        replica = group.serve(landings, device=case.device)

        def published(version: int, number: int, when: str) -> None:
            source.fill(weights(number))
            group.publish(version)
            for rank, landing in enumerate(landings):
                who = f"engine rank {rank}, {when}"
                what = f"{who}: the model is not what the engine's own load makes of it"
                compare(state(landing.inner), wanted[rank, number], what)
                landing.check_served(who)
            if group.version(replica) != version:
                refuse(f"{when}: the replica says version {group.version(replica)} where {version} is expected")

        published(1, 1, "in the first sync")
        published(2, 2, "in the second sync")
        for version, at in ((3, "finish"), (5, "after finish")):
            landings[-1].fails = at
            source.fill(weights(3))
            if None in group.failure(version):
                refuse(f"a sync whose engine rank failed ({at}) did not fail")
            landings[-1].fails = ""
            for rank, landing in enumerate(landings):
                landing.check_torn(f"engine rank {rank}, after a sync that failed ({at})")
            if group.version(replica) is not None:
                refuse(
                    f"after a sync that failed ({at}) the replica says version {group.version(replica)}",
                    "none is expected",
                )
            published(version + 1, version // 2, f"in the sync after one that failed ({at})")


def check_missing(case: LandingCase) -> None:
    """Checks that a model which would keep old bytes is refused while connecting, with a name that helps.

    Raises:
        ConformanceError: it connected, or the message names neither the tensor nor a destination.
    """
    needed = case.needed or next(iter(case.weights(1)))
    offered = {name: tensor for name, tensor in case.weights(1).items() if name != needed}
    landings = list(case.landings())
    with LocalGroup([TensorSource(offered)]) as group:
        try:
            group.serve(landings, device=case.device)
        except RdtError as error:
            trace = case.make_landing(0, case.world_size).trace(case.tensors())
            names = {needed, *(piece.destination for piece in trace.slices if piece.name == needed)}
            if not any(name in str(error) for name in names):
                raise ConformanceError(
                    f"without {needed!r} the landing refuses, and names neither it nor where it would land: {error}"
                ) from error
            return
    refuse(
        f"the landing connected to a source that does not offer {needed!r}: those weights would stay what they were",
        "trace() refuses parameters that nothing reaches",
    )


class _Watched:
    """A landing that fails when told to, and says what it saw. Everything else is the landing's own.

    Attributes:
        fails: "finish" or "after finish"; "" for never.
    """

    def __init__(self, inner: Landing, refuses: Callable[[Any], bool] | None) -> None:
        self.inner = inner
        self.engine = inner.engine
        self.fails = ""
        self._refuses = refuses
        self._addresses: dict[str, int] = {}
        self._served_while_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def trace(self, tensors: Sequence[TensorMeta]) -> Any:
        return self.inner.trace(tensors)

    def destinations(self) -> Mapping[str, Any]:
        found = self.inner.destinations()
        self._addresses = {key: self.inner.storage(key).data_ptr() for key, one in found.items() if one.in_place}
        return found

    def begin(self) -> None:
        self.inner.begin()
        if self._refuses is not None and not self._refuses(self.inner):
            self._served_while_written = True

    def open(self, modules: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        self.inner.open(modules, memory)

    def storage(self, key: str) -> torch.Tensor:
        return self.inner.storage(key)

    def close(self, module: str) -> None:
        self.inner.close(module)

    def finish(self) -> None:
        if self.fails == "finish":
            raise RdtError("this landing was told to fail")
        self.inner.finish()
        if self.fails == "after finish":
            raise RdtError("this landing was told to fail")

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def check_served(self, who: str) -> None:
        """After a complete sync: it was refusing meanwhile, it does not now, and nothing moved."""
        if self._served_while_written:
            refuse(f"{who}: between begin() and finish() the engine would generate with half of the weights")
        if self._refuses is not None and self._refuses(self.inner):
            refuse(f"{who}: the engine still refuses to generate", "finish() makes the model complete again")
        for key, address in self._addresses.items():
            if self.inner.storage(key).data_ptr() != address:
                refuse(f"{who}: {key!r} lies elsewhere than before", "captured CUDA graphs read the old address")

    def check_torn(self, who: str) -> None:
        """After a sync that failed: it refuses."""
        if self._refuses is not None and not self._refuses(self.inner):
            refuse(
                f"{who}: the engine would generate with weights of two versions",
                "abort() makes it refuse until a finish()",
            )


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


__all__ = ["LandingCase", "check_landed", "check_landing", "check_missing", "check_trace"]
