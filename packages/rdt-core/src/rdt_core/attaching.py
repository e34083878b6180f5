"""The replicas of a source rank's group: attached, connected again after a failure, taken out. On rank 0, which drives them.

A replica that comes late is paused until a sync has brought it the version of the group, and one that cannot be connected goes
on as it did. Refuses a name that is taken, and replicas on any other rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from .driver import Driver
from .engines import EngineClient
from .errors import (
    CoordinatorLostError,
    CoverageError,
    DeadlineError,
    EngineError,
    MembershipError,
    RdtError,
    TracingError,
    TransportError,
    text_of,
)
from .membership import Membership

log = logging.getLogger(__name__)

_ASK_S = 5.0
#: what may come of a connect that an engine, or the plan of one, fails
_OF_AN_ENGINE: tuple[type[RdtError], ...] = (EngineError, DeadlineError, CoverageError, TracingError, TransportError)


class Attaching(Membership):
    """A membership with replicas."""

    _driver: Driver  # of the replicas; rank 0's has some

    def attach(self, client: EngineClient, *, timeout_s: float | None = None) -> None:
        """Adds a replica: it traces, plans, and takes part from the next sync on. On rank 0 only.

        In a group that has a version the replica is paused, once it is connected, until a sync has brought it there
        (`catch_up`, or the next `publish`), so that it never serves what the others do not. One that could not be connected
        goes on as it did.

        Raises:
            MembershipError: another rank than 0, or the replica's name is taken.
            CoverageError: the engine wants what no rank holds, or nobody takes what the source offers.
            EngineError: an engine rank failed to connect.
        """
        if self.rank != 0:
            raise MembershipError(
                f"replicas are attached on source rank 0, which drives them; this is rank {self.rank}"
            )
        if client.name in self._driver.clients:
            raise MembershipError(f"a replica named {client.name!r} is attached to group {self.group!r} already")
        self._add(client, timeout_s)

    def reconnect(self, client: EngineClient, *, timeout_s: float | None = None) -> None:
        """Connects an attached replica again, in place, e.g. after its engine was started again. On rank 0 only.

        A living engine keeps its links; one that was started again plans and takes its old place. It is paused until the next
        sync has brought it the version of the group, as after `attach`; also where it could not be connected, which the error
        says.

        Raises:
            MembershipError: the replica is not attached.
            CoverageError, EngineError: as `attach`.
        """
        if client.name not in self._driver.clients:
            raise MembershipError(f"no replica named {client.name!r} is attached to group {self.group!r}; attach it")
        self._add(client, timeout_s)

    def _add(self, client: EngineClient, timeout_s: float | None) -> None:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        version = self.version
        try:
            if not self._is_lost:
                version, _ = self._control.current()  # this rank may not have heard of the last commit
        except CoordinatorLostError:
            self._is_lost = True
        if self._is_lost:
            raise CoordinatorLostError(
                f"replica {client.name!r} cannot be connected: the coordinator of group {self.group!r} died, and the other "
                "source ranks join a new one with their next publish; publish first (detach replicas that died as well)"
            )
        known = client.name in self._driver.clients
        self._driver.serving.discard(client.name)
        if known and version is not None:  # a member never serves what the others do not
            client.pause(deadline=time.monotonic() + timeout_s)
        try:
            self._driver.connect(self._control, client, timeout_s)
            if version is not None and not known:  # only now: one that cannot be connected goes on as it did
                self._pause(client, timeout_s)
        except _OF_AN_ENGINE as error:
            text = str(error) if repr(client.name) in str(error) else f"replica {client.name!r}: {error}"
            if known and version is not None:
                text += (
                    f". It is paused until it has version {version} of {self.group!r}: reconnect it and call catch_up() on every "
                    "source rank, or publish"
                )
            raise next(kind for kind in _OF_AN_ENGINE if isinstance(error, kind))(text) from error
        self._driver.clients[client.name] = client
        if version is None:
            return
        serves = {one.name: one.version for one in self._control.status().replicas}
        if serves.get(client.name) == version:
            client.resume(deadline=time.monotonic() + timeout_s)
        else:
            log.info(
                "replica %r is paused until it has version %d of %r: sync.catch_up() on every source rank brings it there, or "
                "the next publish",
                client.name, version, self.group,
            )  # fmt: skip

    def _pause(self, client: EngineClient, timeout_s: float) -> None:
        """Pauses a replica that is no member yet; one that cannot be paused is let go again, but not resumed: it may be torn."""
        try:
            client.pause(deadline=time.monotonic() + timeout_s)
        except RdtError as error:
            self._control.detach(client.name, self._token)
            raise EngineError(
                f"{error}. It is not attached, and may be paused: attach it again, or resume it by its own means if it was never "
                "left half-way by a sync"
            ) from error

    def detach(self, client: EngineClient | str) -> None:
        """Takes a replica out of the group (also one that died). The engine itself is left alone."""
        name = client if isinstance(client, str) else client.name
        self._driver.remove(name)
        try:
            self._control.detach(name, self._token)
        except CoordinatorLostError:  # the next one knows only who joins it
            self._is_lost = True

    def _states(self) -> dict[str, str]:
        """The state of every attached replica, as far as the coordinator knows it."""
        if self._is_lost:
            return {}
        known = {one.name: one.state for one in self._control.status(_ASK_S).replicas if one.state != "connecting"}
        return {name: known.get(name, "absent") for name in self._driver.clients}

    def _connect_again(
        self,
        version: int,
        some: Sequence[str],
        names: Sequence[str],
        out: dict[str, str],
        timeout_s: float,
        policy: str,
    ) -> None:
        """Connects some of the replicas that shall take part again; those that cannot are out, or the sync is."""
        try:
            self._control.current()  # engines would only say that they could not connect
        except CoordinatorLostError:
            self._restore(timeout_s)
        failures = self._driver.connect_all(self._control, some, timeout_s)
        out.update({name: text_of(error) for name, error in failures.items()})
        if failures and (policy == "require_all" or len(out) == len(names)):
            name, error = next(iter(failures.items()))
            raise self._failed(None, "connect", error, version, f"replica {name!r}") from error
