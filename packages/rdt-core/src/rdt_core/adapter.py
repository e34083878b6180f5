"""Weight sync as the four calls that training frameworks make of a weight update mode: connect, begin, send, finalize.

For a framework that plugs rdt in as one more mode: every trainer rank makes the same calls in the same order, and says in
each round which engines there are. The whole move is in `send`, as one step that succeeds or fails on every rank together.
It refuses calls out of order, a round after a connect that failed, and an engine that says another version than was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Literal, get_args

from .driver import side_by_side
from .engines import ConnectInfo, EngineClient
from .errors import CoordinatorLostError, EngineError, MembershipError, RdtError, SyncError
from .sources.base import IterableWeightSource, WeightSource
from .sync import WeightSync
from .wire import SyncReport

PausedBy = Literal["rdt", "framework"]


class SyncAdapter:
    """One trainer rank's side of a weight update mode.

    A round is `begin`, `send`, `finalize`, on every rank; `connect` comes before the first one and whenever engines come or
    go. Whatever a call raises, the next round may begin: a failed `send` has torn the replicas that had received bytes, and
    the next one that succeeds heals them.

    Args:
        group: name of the sync group; the same on every rank, unique in the namespace.
        source: makes this rank's weights; called by the first `connect`, when the model is there.
        rank: this source rank, 0 to world_size - 1. Rank 0 drives the engines.
        world_size: number of source ranks.
        client: makes the client of an engine; called on rank 0, once for each engine. Default: engines are clients.
        paused_by: "rdt" pauses engines for the length of a `send` and resumes them when all serve the new version.
            "framework": the framework has paused them before `send`, and resumes them after `finalize`, not after a failure.
            It then drops their caches too where the engine does so with the pause (vLLM).
        timeout_s: deadline of every single wait, in seconds.
        options: of `WeightSync.join`: mode, kinds, bucket_bytes, lookahead, namespace, address, ….

    Attributes:
        version: last version that was sent, or None.
    """

    def __init__(
        self,
        group: str,
        *,
        source: Callable[[], WeightSource | IterableWeightSource],
        rank: int,
        world_size: int,
        client: Callable[[Any], EngineClient] | None = None,
        paused_by: PausedBy = "rdt",
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        if paused_by not in get_args(PausedBy):
            raise MembershipError(
                f"group {group!r}: paused_by={paused_by!r}; choose one of {', '.join(get_args(PausedBy))}"
            )
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.version: int | None = None
        self._source = source
        self._client = client
        self._paused_by = paused_by
        self._timeout_s = timeout_s
        self._options = options
        self._sync: WeightSync | None = None
        self._engines: dict[Hashable, EngineClient] = {}
        self._state = "new"  # then connected, begun, sent
        self._next: int | None = None
        self._report: SyncReport | None = None
        self._doubted = False  # an engine may have been started again since it was attached

    def connect(self, engines: Iterable[Hashable] = ()) -> None:
        """Joins the group, and makes its replicas these engines: attaches new ones, detaches those that are gone.

        On every rank, as a collective the first time; later only rank 0 has something to do. An engine is known again by
        equality, so a second call with the same ones does nothing; after a `send` that failed all are connected again, since
        one may have been started again behind the same address. An engine that was attached here has no new weights before
        the next `send`: let it answer requests after `finalize`.

        Args:
            engines: all engines that take part from now on: clients, or what `client` takes (actor handles, URLs). Only
                rank 0's count; other ranks may leave them out.

        Raises:
            MembershipError: the rank is taken, or two engines have one name.
            DeadlineError: other ranks did not join in time, or an engine did not answer; names them.
            CoverageError: an engine wants what no rank holds, or nobody takes what the ranks offer.
            EngineError: an engine failed to connect. Engines before it stay attached; call again with those that live.
        """
        if self._sync is None:
            self._sync = self._join()
        # what was begun is dropped: nothing of it has moved
        self._state, self._next, self._report = "broken", None, None
        if self.rank == 0:
            self._attach(self._sync, list(dict.fromkeys(engines)))
        self._state = "connected"

    def _join(self) -> WeightSync:
        return WeightSync.join(
            self.group,
            source=self._source(),
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self._timeout_s,
            **self._options,
        )

    def _attach(self, sync: WeightSync, engines: list[Hashable]) -> None:
        for gone in [one for one in self._engines if one not in engines]:
            # the entry goes first: an engine that could not be detached is not mistaken for an attached one
            sync.detach(self._engines.pop(gone))
        for engine in engines:
            known = self._engines.get(engine)
            if known is None:
                client = self._made(engine)
                if self._paused_by == "framework":
                    client = _PausedByFramework(client)
                sync.attach(client)
                self._engines[engine] = client
            elif self._doubted:
                # in place: a living engine keeps its links, one that was started again plans and takes its place
                try:
                    sync.reconnect(known)
                except CoordinatorLostError:
                    return  # the next send opens another coordinator, and connects all of them then
        self._doubted = False

    def _made(self, engine: Any) -> EngineClient:
        if self._client is not None:
            return self._client(engine)
        if not isinstance(engine, EngineClient):
            raise MembershipError(
                f"source rank 0 of group {self.group!r}: {engine!r} is no engine client; pass clients (VllmHttpEngine, "
                "SglangRayEngine, …), or client=, a function that makes the client of an engine"
            )
        return engine

    def begin(self, version: int) -> None:
        """Opens a round for the present weights. Nothing is moved or paused yet; a round that was not sent is replaced.

        Args:
            version: the training step; the same on every rank, never lower than the last one.

        Raises:
            SyncError: `connect` was not called or failed, the round before was not finalized, or the version goes back.
        """
        if self._state not in ("connected", "begun"):
            raise self._misplaced(f"begin({version})")
        if self.version is not None and version < self.version:
            raise SyncError(
                f"{self._me}: begin({version}) after version {self.version}; versions never go back, publish the older "
                "weights as a new version"
            )
        self._state, self._next = "begun", version

    def send(self) -> None:
        """Moves the weights to every engine, on every rank: returns when all of them serve the version.

        Parameters must not change until it returns. Between the engines' pause and their resumption there is nothing but
        the move, unless the framework pauses them.

        Raises:
            SyncError: no round is open; or the sync failed, with the same message on every rank.
            DeadlineError: a rank did not take part in time; names it.
        """
        if self._state != "begun" or self._sync is None or self._next is None:
            raise self._misplaced("send()")
        self._state = "connected"
        try:
            self._report = self._sync.publish(self._next)
        except BaseException:
            self._doubted = True
            raise
        self._state, self.version = "sent", self._next

    def finalize(self) -> SyncReport:
        """Closes the round; on rank 0 every engine is asked which version it serves.

        Returns:
            What the sync did, the same on every rank.

        Raises:
            SyncError: nothing was sent.
            EngineError: an engine says that it serves another version; on rank 0. The round is over nevertheless.
        """
        if self._state != "sent" or self._report is None:
            raise self._misplaced("finalize()")
        report, self._report = self._report, None
        self._state, self._next = "connected", None
        deadline = time.monotonic() + self._timeout_s
        serving = [one for one in self._engines.values() if one.name in report.replicas]
        failure = side_by_side([partial(_check, one, report.version, deadline) for one in serving])
        if failure is not None:
            self._doubted = True
            raise failure
        return report

    @property
    def sync(self) -> WeightSync:
        """This rank's membership in the group, e.g. for its publish mode. Raises SyncError before the first `connect`."""
        if self._sync is None:
            raise self._misplaced("sync")
        return self._sync

    def close(self) -> None:
        """Leaves the group, after the last round; a later `connect` joins it again. Idempotent, engines are left alone."""
        sync, self._sync = self._sync, None
        self._engines, self._state, self._next, self._report = {}, "new", None, None
        if sync is not None:
            sync.leave()

    @property
    def _me(self) -> str:
        return f"source rank {self.rank} of group {self.group!r}"

    def _misplaced(self, call: str) -> RdtError:
        found, way_out = {
            "new": ("it is not connected", "call connect(engines) first, on every rank"),
            "broken": ("its last connect failed", "call connect again, with the engines that live"),
            "connected": ("no round is open", "the order is connect, then begin, send, finalize for each version"),
            "begun": (f"version {self._next} was begun and not sent", "call send()"),
            "sent": (f"version {self._next} was sent and not finalized", "call finalize()"),
        }[self._state]
        return SyncError(f"{self._me}: {call} out of order: {found}; {way_out}")


class _PausedByFramework:
    """A client whose engine somebody else pauses and resumes."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.name = client.name

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        self._client.connect(info, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        """The framework has done it."""

    def begin(self, version: int, *, deadline: float) -> None:
        self._client.begin(version, deadline=deadline)

    def pull(self, version: int, *, deadline: float) -> None:
        self._client.pull(version, deadline=deadline)

    def finish(self, version: int, *, deadline: float) -> None:
        self._client.finish(version, deadline=deadline)

    def commit(self, version: int, *, deadline: float) -> None:
        self._client.commit(version, deadline=deadline)

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        self._client.abort(version, reason, deadline=deadline)

    def resume(self, *, deadline: float) -> None:
        """The framework does it."""

    def version(self, *, deadline: float) -> int | None:
        return self._client.version(deadline=deadline)

    def health(self, *, deadline: float) -> None:
        self._client.health(deadline=deadline)


def _check(client: EngineClient, version: int, deadline: float) -> None:
    found = client.version(deadline=deadline)
    if found != version:
        raise EngineError(
            f"replica {client.name!r} says that it serves version {found}; version {version} was sent to it. Somebody else "
            "updates it, or it was started again: connect again, and send again before it answers requests"
        )
