"""A replica of plain torch modules: reward and reference models, evaluation workers, and everything that tests a sync.

`ModuleWorker` is one engine rank around a `torch.nn.Module`; it works in this process or as a Ray actor, and nothing in it
is special to either. `ModuleReplica` drives a list of them. A worker whose module is torn refuses `state` and `call`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import wire
from .control import Control
from .engines import STEPS, ConnectInfo, Receive, keeps_steps
from .errors import CoordinatorLostError, DeadlineError, EngineError, RdtError, StepError, TornReplicaError, death_of
from .landing import ModuleLanding
from .rates import check_slow_links
from .receiver import Receiver
from .rendezvous import ensure_ray, open_coordinator
from .transport import LocalExchange

LoadWeights = Callable[[torch.nn.Module, Iterable[tuple[str, torch.Tensor]]], Any]


class Receiving(ABC):
    """The steps of a sync of whatever has a receiver once it is connected."""

    receiver: Receiver | None = None

    def pull(self, version: int, timeout_s: float) -> wire.ReaderReport:
        """See `Receiver.pull`."""
        return self._connected().pull(version, timeout_s)

    def finish(self, version: int) -> None:
        """See `Receiver.finish`."""
        self._connected().finish(version)

    def receive(self, version: int, timeout_s: float) -> dict[str, float]:
        """`pull` and `finish` in one call. Returns the seconds of each step; those before them are none.

        Raises:
            StepError: one of them failed.
        """
        steps = {"pull": lambda: self.pull(version, timeout_s), "finish": lambda: self.finish(version)}
        seconds = dict.fromkeys(STEPS, 0.0)
        for name, step in steps.items():
            began = time.perf_counter()
            try:
                step()
            except RdtError as error:
                raise StepError(str(error), name) from error
            seconds[name] = time.perf_counter() - began
        return seconds

    def commit(self, version: int) -> None:
        """See `Receiver.commit`."""
        self._connected().commit(version)

    def abort(self, version: int, reason: str) -> None:
        """See `Receiver.abort`."""
        if self.receiver is not None:
            self.receiver.abort(version, reason)

    def version(self) -> int | None:
        """The version that it serves; None before the first, while it is torn, and during a sync."""
        return None if self.receiver is None else self.receiver.version

    @abstractmethod
    def _connected(self) -> Receiver:
        """The receiver. Raises EngineError before the first connect."""


class ModuleWorker(Receiving):
    """One engine rank around a plain module.

    Args:
        make_module: makes the module, in the process that will serve it.
        rank: of this worker in its replica.
        world_size: workers of the replica.
        load_weights: called as `load_weights(module, weights)` while tracing; default: parameters by name.
        control: the coordinator, for workers in the trainer's own process, or what finds it; default: found through Ray.
        exchange: for link kind "local".
        kept: parameters that keep their values; see `ModuleLanding`.
    """

    def __init__(
        self,
        make_module: Callable[[], torch.nn.Module],
        rank: int = 0,
        world_size: int = 1,
        load_weights: LoadWeights | None = None,
        control: Control | Callable[[], Control] | None = None,
        exchange: LocalExchange | None = None,
        kept: Iterable[str] = (),
    ) -> None:
        self.module = make_module()
        self.rank = rank
        self.world_size = world_size
        self._control = control
        self._exchange = exchange
        load = None if load_weights is None else lambda weights: load_weights(self.module, weights)
        self.landing = ModuleLanding(self.module, load, kept=kept)

    def connect(self, info: ConnectInfo) -> None:
        """Connects to the group, or plans again after another epoch, or with another coordinator if the known one died."""
        if info.check:
            self._connected().check(info.check)
            return
        if self.receiver is not None:
            try:
                self.receiver.connect(info.attempt)
                return
            except CoordinatorLostError:
                if isinstance(self._control, Control):
                    raise
                self.close()
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        receiver = Receiver(
            self.landing, control=self._find(info), group=info.group, replica=info.replica, rank=self.rank,
            world_size=self.world_size, device=device, kinds=info.kinds, timeout_s=info.timeout_s,
            pack_threshold=info.pack_threshold, exchange=self._exchange, slow_links=check_slow_links(info.slow_links),
        )  # fmt: skip
        receiver.connect(info.attempt)
        self.receiver = receiver

    def _find(self, info: ConnectInfo) -> Control:
        if isinstance(self._control, Control):
            return self._control
        if self._control is not None:
            return self._control()
        ensure_ray(info.address, info.namespace)
        return open_coordinator(info.group, namespace=info.namespace, create=False, timeout_s=info.timeout_s)

    def call(self, function: Callable[[torch.nn.Module], Any]) -> Any:
        """Returns `function(module)`.

        Raises:
            TornReplicaError: the module holds bytes of two versions, or of one that is not committed.
        """
        if self.landing.torn is not None:
            raise TornReplicaError(f"this worker is torn ({self.landing.torn}); a complete sync heals it")
        pending = self.receiver.uncommitted if self.receiver is not None else None
        if pending is not None:
            raise TornReplicaError(
                f"this worker holds version {pending}, which is not committed; a complete sync heals it"
            )
        return function(self.module)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all parameters and buffers, by name. Raises TornReplicaError as `call` does."""
        return self.call(
            lambda module: {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        )

    def close(self) -> None:
        """Leaves the group. Idempotent. A worker that holds a version which nobody committed becomes torn."""
        if self.receiver is not None:
            pending = self.receiver.uncommitted
            if pending is not None:
                self.receiver.abort(pending, f"it left the group before version {pending} was committed")
            self.receiver.close()
            self.receiver = None

    def _connected(self) -> Receiver:
        if self.receiver is None:
            raise EngineError(f"module worker {self.rank} was never connected to a group; attach its replica first")
        return self.receiver


class ModuleReplica:
    """Client of a replica of `ModuleWorker`s; see `engines.EngineClient`. A subclass that overrides a step is driven by steps.

    Args:
        workers: objects, or handles of Ray actors made from `ModuleWorker`, in rank order.
        name: of the replica, unique in its group.

    Raises:
        EngineError: `workers` is no list.
    """

    def __init__(self, workers: Sequence[Any], *, name: str = "module") -> None:
        if not isinstance(workers, Iterable):
            raise EngineError(
                f"replica {name!r}: workers is a {type(workers).__name__}; give a list of workers in rank order, one a rank"
            )
        self.name = name
        self.workers = list(workers)
        self.receive: Receive | None = self._receive if keeps_steps(self, ModuleReplica) else None

    def _all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        timeout = max(0.0, deadline - time.monotonic())
        remote = [worker for worker in self.workers if hasattr(getattr(worker, method), "remote")]
        if not remote:
            with ThreadPoolExecutor(max_workers=len(self.workers), thread_name_prefix="rdt-worker") as pool:
                return list(pool.map(lambda worker: getattr(worker, method)(*args), self.workers))
        import ray

        calls: list[Any] = []
        try:
            calls += [getattr(worker, method).remote(*args) for worker in self.workers]
            return ray.get(calls, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(f"replica {self.name!r} did not answer {method} within {timeout:.1f} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RdtError):
                raise error.cause from None
            raise EngineError(f"replica {self.name!r} failed in {method}: {error}") from error
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"{self._dead(calls, error)} died (called for {method}): {death_of(error)}") from error

    def _dead(self, calls: Sequence[Any], error: BaseException) -> str:
        """The engine rank whose call ended in this error; Ray does not say which of several."""
        import ray

        for rank, call in enumerate(calls):
            if ray.wait([call], timeout=0)[0]:
                try:
                    ray.get(call, timeout=0)
                except Exception as its:
                    if str(its) == str(error):
                        return f"engine rank {self.name}/{rank}"
        return f"a worker of replica {self.name!r}"

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        """See `EngineClient.connect`."""
        self._all("connect", info, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        """Nothing to pause: a worker runs one call at a time."""

    def begin(self, version: int, *, deadline: float) -> None:
        """Nothing to make ready."""

    def pull(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.pull`."""
        self._all("pull", version, max(0.0, deadline - time.monotonic()), deadline=deadline)

    def finish(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.finish`."""
        self._all("finish", version, deadline=deadline)

    def _receive(self, version: int, *, deadline: float) -> dict[str, float]:
        """`pull` and `finish` of every worker in one call. The seconds are those of the slowest."""
        ranks = self._all("receive", version, max(0.0, deadline - time.monotonic()), deadline=deadline)
        return {step: max(seconds[step] for seconds in ranks) for step in ranks[0]} if ranks else {}

    def commit(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.commit`."""
        self._all("commit", version, deadline=deadline)

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        """See `EngineClient.abort`."""
        self._all("abort", version, reason, deadline=deadline)

    def resume(self, *, deadline: float) -> None:
        """Nothing to resume."""

    def version(self, *, deadline: float) -> int | None:
        """The version that all workers serve; None if they do not agree on one."""
        versions = set(self._all("version", deadline=deadline))
        return versions.pop() if len(versions) == 1 else None

    def health(self, *, deadline: float) -> None:
        """See `EngineClient.health`."""
        self._all("version", deadline=deadline)
