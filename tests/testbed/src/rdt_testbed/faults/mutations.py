"""Mechanisms of the product switched off, by name, to show that a campaign notices when a promise is broken.

Each is a few lines that replace one method in every process of a world. Nothing here is used without a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdt_core.connection import Connection
from rdt_core.control import Control
from rdt_core.coordinator import Coordinator
from rdt_core.driver import Driver
from rdt_core.members import Members, Source
from rdt_core.receiver import Receiver
from rdt_core.record import SyncRecord
from rdt_core.replica import ModuleWorker
from rdt_core.syncs import Syncs


def _set(owner: type, name: str, function: Callable[..., Any] | property) -> None:
    setattr(owner, name, function)


def _accounts() -> None:
    """A version is committed although engine ranks have not accounted for their bytes."""
    commit = Coordinator.commit

    async def committed(self: Coordinator, sync: int, *rest: Any) -> bytes:
        record = self._syncs.find(sync)
        for reader in record.accounted.missing:
            record.accounted.arrive(reader)
        return await commit(self, sync, *rest)

    _set(Coordinator, "commit", committed)


def _torn() -> None:
    """A torn engine rank serves what it has."""
    _set(ModuleWorker, "call", lambda self, function: function(self.module))


def _stamp() -> None:
    """An engine rank takes the version when it is complete instead of when it is committed."""
    stock = Receiver.finish

    def finish(self: Receiver, version: int) -> None:
        stock(self, version)
        self.commit(version)

    _set(Receiver, "finish", finish)


def _token() -> None:
    """Calls of a process whose rank was taken over are accepted."""
    _set(Members, "check_token", lambda self, rank, token: None)
    _set(Source, "begins", lambda self, attempt: None)


def _epoch() -> None:
    """Replicas go on with their plans when parameters moved."""
    stock = Members.join

    def join(self: Members, *args: Any) -> None:
        before = self.epoch
        stock(self, *args)
        self.epoch = before

    _set(Members, "join", join)


def _rounds() -> None:
    """Buckets are written again although readers have not read them."""
    stock = Coordinator.published

    async def published(
        self: Coordinator, rank: int, sync: int, round: int, awaited: int | None, timeout_s: float, *more: Any
    ) -> None:
        await stock(self, rank, sync, round, None, timeout_s, *more)

    _set(Coordinator, "published", published)


def _digests() -> None:
    """Digests that differ are not noticed."""
    _set(SyncRecord, "compare", lambda self, reader, digests: {})


def _watchdog() -> None:
    """A sync that everybody forgot runs for ever."""
    _set(Syncs, "_watch", lambda self, record: None)


def _deadlines() -> None:
    """Calls of the coordinator wait as long as it takes."""
    _set(Control, "_call", lambda self, method, args, limit_s: self._post(method, args)(3600.0))


def _begin_twice() -> None:
    """A begin that comes twice is taken for another one."""
    _set(Source, "begins", lambda self, attempt: None)


def _late_connect() -> None:
    """An engine rank that connects too late takes the place of the one that came after it."""
    _set(Members, "expect", lambda self, name: "")


def _broken_links() -> None:
    """An engine rank keeps the links of a pull that broke off."""
    stock = Receiver.connect

    def connect(self: Receiver, *args: Any) -> Any:
        self._is_doubted = False
        return stock(self, *args)

    _set(Receiver, "connect", connect)


def _early() -> None:
    """An engine rank reads before it has the coordinator's word whatever it reads."""
    _set(Connection, "is_readable_at_once", property(lambda self: bool(self.steps)))


def _take_back() -> None:
    """Engines that paused for a sync that could not begin are forgotten."""
    _set(Driver, "take_back", lambda self, told, timeout_s: None)


#: name of the mechanism that is switched off
MUTATIONS: dict[str, Callable[[], None]] = {
    "accounts": _accounts,
    "torn": _torn,
    "stamp": _stamp,
    "token": _token,
    "epoch": _epoch,
    "rounds": _rounds,
    "digests": _digests,
    "watchdog": _watchdog,
    "deadlines": _deadlines,
    "begin-twice": _begin_twice,
    "late-connect": _late_connect,
    "broken-links": _broken_links,
    "early": _early,
    "take-back": _take_back,
}


def apply(name: str) -> None:
    """Switches a mechanism off in this process; an empty name: none."""
    if name:
        MUTATIONS[name]()
