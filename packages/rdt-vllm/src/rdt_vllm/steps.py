"""A sync of one vLLM replica in terms of vLLM's own weight update calls, whichever way they travel. vLLM is not imported here.

A call returns when all workers have done it, and raises when any failed or the deadline passed; nothing is retried. It refuses to
stamp an engine that is not the one that received, and one that does not report the version back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rdt_core.engines import CachePolicy, ConnectInfo, PauseMode
from rdt_core.errors import EngineError

from .protocol import ABORTED, ALREADY_OPEN, LEFT_OPEN, NOT_OPEN, OPEN_ON_LAST, RECEIVING

#: seconds that an engine gets less than its caller for a pull, so that its own error comes first
MARGIN_S = 2.0


@dataclass
class InitRequest:
    """What vLLM's `init_weight_transfer_engine` takes, without importing vLLM."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateRequest:
    """What vLLM's `update_weights` takes, without importing vLLM."""

    update_info: dict[str, Any] = field(default_factory=dict)


class VllmSteps(ABC):
    """The sync of one replica in terms of vLLM's calls. Implements `rdt_core.engines.EngineClient`.

    Args:
        name: of the replica, unique in its group.
        cache: "reset" drops prefix, multi-modal and encoder caches while the engine is paused, and has requests in
            flight recompute their keys and values with the new weights; "keep" keeps all of them.
        pause: what happens to requests in flight: "keep" freezes them and goes on afterwards, "wait" lets them end
            first, "abort" ends them.
    """

    def __init__(self, name: str, *, cache: CachePolicy = "reset", pause: PauseMode = "keep") -> None:
        if not name:
            raise EngineError("a replica needs a name, unique in its sync group")
        if cache not in ("reset", "keep") or pause not in ("keep", "wait", "abort"):
            raise EngineError(
                f"replica {name!r}: cache={cache!r} is reset or keep; pause={pause!r} is keep, wait or abort"
            )
        self.name = name
        self.cache = cache
        self.pause_mode = pause
        self._ends_open_syncs = True
        self._open = False  # a weight update was started and not finished
        self._finishing = False
        self._uncommitted: int | None = None  # version that was pulled, in part or whole
        self._before: str | None = None  # the engine's stamp when the sync began; None: not known
        self._is_unsure = False  # whether the engine was told that it is receiving, though it may have received

    # what each transport gives

    @abstractmethod
    def _init(self, info: dict[str, Any], deadline: float) -> None: ...

    @abstractmethod
    def _start(self, deadline: float) -> None: ...

    @abstractmethod
    def _update(self, info: dict[str, Any], deadline: float) -> None: ...

    @abstractmethod
    def _finish(self, deadline: float) -> None: ...

    @abstractmethod
    def _stamp(self, version: str, deadline: float) -> None: ...

    @abstractmethod
    def _weight_version(self, deadline: float) -> list[str]: ...

    @abstractmethod
    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`."""

    @abstractmethod
    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""

    @abstractmethod
    def health(self, *, deadline: float) -> None:
        """See `EngineClient.health`."""

    # what all share

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        """See `EngineClient.connect`. A sync that another driver left open is ended first; its replica is torn then."""
        wanted = msgspec.to_builtins(info)
        self._before = None
        try:
            self._init(wanted, deadline)
        except EngineError as error:
            text = str(error)
            if LEFT_OPEN not in text:
                raise
            if not self._ends_open_syncs:
                raise EngineError(
                    f"replica {self.name!r} is in the middle of a sync of another driver; wait until that has ended"
                ) from error
            self._end(f"{LEFT_OPEN}:{OPEN_ON_LAST}" in text, "its driver went away in the middle of a sync", deadline)
            self._init(wanted, deadline)

    def begin(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.begin`.

        The engine is stamped with no version until the commit, so that it never claims one that it does not hold. It is
        stamped only once it has begun: one that was started again since is not connected, and refuses to.
        """
        self._remember_stamp(deadline)
        self._open, self._finishing, self._uncommitted = True, False, None
        self._start(deadline)
        self._stamp(f"{RECEIVING}{version}", deadline)

    def _remember_stamp(self, deadline: float) -> None:
        if self._before is None or self._uncommitted is not None:
            stamps = set(self._weight_version(deadline))
            self._before = stamps.pop() if len(stamps) == 1 else None

    def pull(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.pull`."""
        timeout_s = max(deadline - time.monotonic() - MARGIN_S, 1.0)
        self._uncommitted, self._before = version, None
        self._update({"version": version, "timeout_s": timeout_s}, deadline)

    def finish(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.finish`."""
        self._finishing = True
        self._finish(deadline)
        self._open = self._finishing = False

    def commit(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.commit`. The engine must be the one that received the version, and say it afterwards."""
        receiving = f"{RECEIVING}{version}"
        before, after = self._restamp(receiving, str(version), deadline)
        if set(before) != {receiving}:
            raise EngineError(
                f"replica {self.name!r} is not stamped with version {version}: it says {', '.join(map(repr, before))} instead of "
                "receiving it. It was started again, or another driver uses it; it has to be connected again"
            )
        if set(after) != {str(version)}:
            raise EngineError(
                f"replica {self.name!r} was given version {version} and says that it serves {', '.join(after)}"
            )
        self._uncommitted, self._before = None, str(version)

    def _restamp(self, expected: str, version: str, deadline: float) -> tuple[list[str], list[str]]:
        """Stamps the engine if it says `expected`; returns what it says before and after."""
        before = self._weight_version(deadline)
        if set(before) != {expected}:
            return before, before
        self._stamp(version, deadline)
        return before, self._weight_version(deadline)

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        """See `EngineClient.abort`.

        Raises:
            EngineError: the engine could not be told, e.g. because it died.
        """
        pulled = self._uncommitted is not None
        if not self._open and not pulled:
            return
        unsure, self._is_unsure = self._is_unsure, False
        # an update that is finished, or of which the last worker is, has to be started once more to be aborted; a version that
        # was not pulled in this sync may be the one that is served
        try:
            if unsure:
                self._stamp(f"{RECEIVING}{version}", deadline)  # it must not claim what it may not hold
        finally:
            self._end(
                self._finishing or not self._open, f"version {version}: {reason}", deadline, version if pulled else -1
            )
        self._open, self._finishing, self._uncommitted = False, False, None
        before, self._before = self._before, None
        if before is not None and set(self._weight_version(deadline)) == {f"{RECEIVING}{version}"}:
            self._stamp(before, deadline)  # no byte moved, and the engine is the same: it holds what it held before

    def _end(self, finish_failed: bool, reason: str, deadline: float, version: int = -1) -> None:
        """Closes a weight update on every worker, whichever of them have closed it already.

        vLLM's worker closes an update when `update_weights` raises or `finish` returns. The backend raises on the last
        worker only, so after a failed `start` or `update` the others are open, and after a failed `finish` the last one
        is. `start` evens out the latter; the aborting update closes the last worker and the `finish` the others.
        """
        unexpected: list[str] = []

        def tell(what: str, expected: Sequence[str], call: Any, *args: Any) -> None:
            try:
                call(*args, deadline)
            except EngineError as error:
                if not any(word in str(error) for word in expected):
                    unexpected.append(f"{what}: {error}")

        if finish_failed:
            tell("start", [ALREADY_OPEN], self._start)
        tell("update", [ABORTED, *NOT_OPEN], self._update, {"version": version, "abort": reason})
        tell("finish", list(NOT_OPEN), self._finish)
        if unexpected:
            raise EngineError(f"replica {self.name!r} did not end its sync: " + "; ".join(unexpected))

    def version(self, *, deadline: float) -> int | None:
        """See `EngineClient.version`.

        Raises:
            EngineError: the replica's actors say that they serve different versions.
        """
        found = set(self._weight_version(deadline))
        if len(found) > 1:
            raise EngineError(
                f"the actors of replica {self.name!r} serve different versions: {', '.join(sorted(found))}"
            )
        text = found.pop()
        return int(text) if text.isdecimal() else None
