"""A barrier for one event loop: a set of members that are waited for, and the coroutines that wait for them.

It counts every member once, however often it arrives, can be taken back to closed, and knows who is missing, so that a
deadline can name them. Waking the waiters with an error leaves the gate itself as it was. Not for threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable

from .errors import RdtError, some

_NAMED = 16


class Gate:
    """Opens when every expected member has arrived.

    Args:
        expected: the members; a gate that expects nobody is open.
    """

    __slots__ = ("_missing", "_waiters")

    def __init__(self, expected: Iterable[Hashable] = ()) -> None:
        self._missing: dict[Hashable, None] = dict.fromkeys(expected)
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def missing(self) -> tuple[Hashable, ...]:
        """Members that have not arrived."""
        return tuple(self._missing)

    @property
    def is_open(self) -> bool:
        """Whether nobody is missing."""
        return not self._missing

    @property
    def waiting(self) -> int:
        """Number of coroutines that wait here."""
        return len(self._waiters)

    def arrive(self, member: Hashable) -> None:
        """Counts `member`, once."""
        self._missing.pop(member, None)
        if not self._missing:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def expect(self, members: Iterable[Hashable]) -> None:
        """Adds members to wait for; those who arrived before are waited for again."""
        self._missing.update(dict.fromkeys(members))

    def reset(self, members: Iterable[Hashable]) -> None:
        """Waits for exactly these members from now on; those who wait stay."""
        self._missing = dict.fromkeys(members)

    def wake(self, error: RdtError) -> None:
        """Raises `error`'s class and message in every coroutine that waits now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))

    async def wait(self, timeout_s: float) -> None:
        """Returns when the gate is open.

        Raises:
            TimeoutError: still closed after `timeout_s` seconds.
            RdtError: what `wake` was given meanwhile.
        """
        if self.is_open:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=max(timeout_s, 0.0))
            if not waiter.done():
                raise TimeoutError
            waiter.result()
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()


def member_name(member: Hashable) -> str:
    """Returns how messages call a member: source ranks are ints, engine ranks are strings `replica/rank`."""
    return f"source rank {member}" if isinstance(member, int) else f"engine rank {member}"


def member_names(members: Iterable[Hashable]) -> str:
    """Returns the names of members for a message, the first few of many."""
    return some(map(member_name, members), _NAMED)
