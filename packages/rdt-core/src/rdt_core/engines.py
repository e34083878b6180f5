"""What the driver of a sync needs from an inference engine: one small client protocol that the adapters implement.

A client stands for one replica and reaches every rank of it. Every call returns when all ranks have done it, raises
`EngineError` when any failed or `DeadlineError` when `deadline` passed, and is never retried behind the caller's back.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from .wire import Struct

CachePolicy = Literal["reset", "keep"]
PauseMode = Literal["keep", "wait", "abort"]


class ConnectInfo(Struct, frozen=True):
    """What an engine rank must know to connect to a sync group; JSON-safe, so that it can travel over HTTP."""

    group: str
    replica: str
    namespace: str  # Ray namespace of the coordinator
    address: str  # of the Ray cluster, for workers that are not Ray processes yet
    kinds: tuple[str, ...]  # link kinds allowed, in order of preference
    timeout_s: float
    pack_threshold: int = 0  # bytes below which a piece is packed; 0: the kind's own default
    slow_links: str | float = "refuse"  # links far below what they should do; see `WeightSync.join`
    attempt: str = ""  # names this connect of the replica; ranks that come with an older one are refused
    check: int = 0  # a check that runs: a rank that is connected hands in digests of what it holds, and stays connected


#: what a replica goes through from the start of a sync to its commit, in this order
STEPS = ("pause", "begin", "pull", "finish")


class Receive(Protocol):
    """All steps of a sync but the commit in one call, for an engine that offers it; see `EngineClient` for each.

    A client that has it carries it as its own attribute `receive`; None, or no such attribute: it is driven step by step.
    """

    def __call__(self, version: int, *, deadline: float) -> Mapping[str, float]:
        """Returns the seconds of each step.

        Args:
            version: to be received.
            deadline: of the whole call. An abort ends what an engine that answers too late would still do.

        Raises:
            StepError: a step failed; the steps after it did not begin.
            DeadlineError: the engine did not answer.
        """
        ...


class Ahead(Protocol):
    """The beginning of a `receive`, before any byte may move, sent while the sync begins. For an engine that serves.

    A client that has it carries it as its own attribute `ahead`. What follows is a `receive`, which goes on from there, or, if
    the sync cannot begin, `take_back`. An engine that another driver has used since does neither.
    """

    def send(self) -> bool:
        """Returns at once; False: nothing was sent. Whether what was sent worked, `receive` tells."""
        ...

    def take_back(self, *, deadline: float) -> bool:
        """The engine goes on as before; False: it was not as it was left, and is left alone.

        Raises:
            EngineError, DeadlineError: it is not known whether it does.
        """
        ...


def keeps_steps(client: object, base: type) -> bool:
    """Returns whether every step of a client is that of `base`: one with a step of its own is not to be driven by one call.

    Args:
        client: an instance of `base`.
        base: the class whose `receive` does what its steps do.
    """
    return all(getattr(type(client), step) is getattr(base, step) for step in STEPS)


def receive_of(client: EngineClient) -> Receive | None:
    """Returns how a client takes a sync in one call; None where it has to be driven step by step.

    That is also where a step was replaced on the instance, and where `receive` is another client's to which it passes calls on.
    """
    is_own = inspect.getattr_static(client, "receive", None) is not None
    if not is_own or getattr(client, "__dict__", {}).keys() & set(STEPS):
        return None
    receive: Receive | None = getattr(client, "receive", None)
    return receive


def ahead_of(client: EngineClient) -> Ahead | None:
    """Returns how a client that takes a sync in one call begins it ahead; None where it does not."""
    ahead: Ahead | None = None if receive_of(client) is None else getattr(client, "ahead", None)
    return ahead


@runtime_checkable
class EngineClient(Protocol):
    """One replica of an inference engine."""

    name: str  # the replica's name, unique in its group

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        """Every rank of the replica reads the manifests, traces, plans and posts its read requests. Idempotent."""
        ...

    def pause(self, *, deadline: float) -> None:
        """Generation stops; returns once no forward pass is running."""
        ...

    def begin(self, version: int, *, deadline: float) -> None:
        """Every rank is made ready to receive `version`."""
        ...

    def pull(self, version: int, *, deadline: float) -> None:
        """Every rank pulls all its bytes and lands them."""
        ...

    def finish(self, version: int, *, deadline: float) -> None:
        """Every rank runs its remaining post-load steps and checks its accounts. The replica is complete, and says no version.

        Prefix caches are dropped or kept by the client's explicit policy.
        """
        ...

    def commit(self, version: int, *, deadline: float) -> None:
        """The sync is committed: the replica is stamped with the version, and says from here on that it serves it."""
        ...

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        """Ends a sync that failed: ranks that received bytes of it become torn and refuse to generate, finished or not."""
        ...

    def resume(self, *, deadline: float) -> None:
        """Generation goes on. Called after `commit`, never for a replica whose sync failed."""
        ...

    def version(self, *, deadline: float) -> int | None:
        """The version that the engine itself says it serves; None before the first commit, during a sync and when torn."""
        ...

    def health(self, *, deadline: float) -> None:
        """Raises EngineError if the replica is not alive."""
        ...
