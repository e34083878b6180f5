"""The first steps of a sync, sent to an engine before the sync has begun; for `VllmServer`, in the thread of one event loop.

A sync goes on from there, or its driver takes them back, or somebody else uses the engine, and then they are undone before
anything that the latter sends. It refuses to send them to an engine that was used since the driver let it generate: a driver
whose place was taken learns of that only when its sync begins. A driver that dies leaves no engine paused for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .protocol import ABORTED, NOT_OPEN
from .steps import UpdateRequest

#: seconds that the first steps wait for a sync
LIMIT_S = 2.0

#: calls of named steps that were sent, in their order
Sent = list[tuple[str, asyncio.Future[Any]]]


def send(*calls: tuple[str, Callable[[], Awaitable[Any]]]) -> Sent:
    """Sends calls of named steps together, in this order."""
    sent: Sent = [(name, asyncio.ensure_future(call())) for name, call in calls]
    for _, one in sent:  # seen: the first failure is told, also where nobody waits any more
        one.add_done_callback(lambda done: done.cancelled() or done.exception())
    return sent


async def _settled(sent: Sent) -> None:
    await asyncio.wait([one for _, one in sent])


@dataclass(frozen=True)
class Policy:
    """How an engine pauses; see `AsyncLLM.pause_generation`."""

    mode: str
    clear_cache: bool


@dataclass(frozen=True, eq=False)
class _Opening:
    ticket: str
    uses: int  # when it was sent
    policy: Policy
    sent: Sent


class Ahead:
    """What is sent to one engine ahead of its syncs.

    Args:
        llm: vLLM's `AsyncLLM`, whose EngineCore executes calls in the order in which they come.
        limit_s: after so many seconds without a sync the engine goes on.
    """

    def __init__(self, llm: Any, limit_s: float = LIMIT_S) -> None:
        self._llm = llm
        self._limit_s = limit_s
        self._uses = 0  # counts whoever used the engine in a way that a driver has to know of
        self._left: tuple[int, str] = (-1, "")  # `_uses`, and the driver's mark, when the engine was let generate
        self._opening: _Opening | None = None
        self._over = ""  # ticket of what is not to be sent any more
        self._nothing = ""  # of what was not sent, or is taken back already
        self._undoing = asyncio.Lock()  # first come, first served
        self._expiry: asyncio.Task[bool] | None = None

    def open(self, policy: Policy) -> Sent:
        """Sends what a sync begins with: the pause, and beside it the opening of the update, which writes nothing."""
        llm = self._llm

        async def pause() -> None:
            if policy.clear_cache:
                await llm.renderer.clear_mm_cache_async()
            await llm.engine_core.pause_scheduler_async(mode=policy.mode, clear_cache=policy.clear_cache)

        return send(("pause", pause), ("begin", llm.start_weight_update))

    def leave(self, uses: int, mark: str) -> None:
        """A driver has let the engine generate.

        Args:
            uses: when it began to.
            mark: of the driver's own, by which it is known again; none: it is not.
        """
        if mark:
            self._left = uses, mark

    def begin(self, ticket: str, mark: str, policy: Policy) -> bool:
        """Sends the first steps, if the engine is as the driver with this mark left it.

        Args:
            ticket: for `take_back`.
            mark: see `leave`.
            policy: of the pause.

        Returns:
            Whether they were sent.
        """
        if self._left != (self._uses, mark) or self._opening is not None or ticket == self._over:
            self._nothing = ticket
            return False
        self._uses += 1
        self._opening = _Opening(ticket, self._uses, policy, self.open(policy))
        self._expiry = asyncio.ensure_future(self._expire(ticket, mark))
        return True

    async def _expire(self, ticket: str, mark: str) -> bool:
        await asyncio.sleep(self._limit_s)
        return await self.take_back(ticket, mark)

    def claim(self, policy: Policy) -> Sent | None:
        """A sync goes on from what was sent ahead of it; None: it has to begin by itself.

        Args:
            policy: of its pause.
        """
        opening = self._opening
        if opening is None or opening.policy != policy:
            return None
        self._opening = None
        self._forget()
        return opening.sent

    async def used(self) -> int:
        """Somebody uses the engine: what was sent ahead is undone, but for the pause, before the caller sends anything.

        Returns:
            Of which number this use is.
        """
        self._uses += 1
        uses = self._uses
        async with self._undoing:
            opening, self._opening = self._opening, None
            if opening is not None:
                self._forget()
                self._over = opening.ticket
                await _settled(opening.sent)
                await _settled(self._close())
        return uses

    async def take_back(self, ticket: str, mark: str) -> bool:
        """Undoes what was sent with this ticket, and lets the engine generate, unless somebody used it since.

        Args:
            ticket, mark: as at `begin`.

        Returns:
            Whether the engine goes on as before.
        """
        if ticket == self._nothing:
            return True
        opening = self._opening
        self._over = ticket  # it may not have come yet
        if opening is None or opening.ticket != ticket:
            return False
        await _settled(opening.sent)  # a pause that comes after the resumption would be for ever
        async with self._undoing:
            if self._opening is not opening or self._uses != opening.uses:
                return False  # who uses it now undoes it
            self._opening = None
            self._forget()
            if any(one.cancelled() or one.exception() for _, one in opening.sent):
                return False
            sent = [*self._close(), *send(("resume", self._llm.resume_generation))]
            await _settled(sent)
            (_, aborted), (_, finished), (_, resumed) = sent
            resumed.result()
            is_closed = ABORTED in str(aborted.exception()) and (
                finished.exception() is None or any(text in str(finished.exception()) for text in NOT_OPEN)
            )
            if is_closed:
                self._nothing = ticket
                self.leave(opening.uses, mark)
            return is_closed

    def _close(self) -> Sent:
        """Ends an update of which nothing was received."""
        abort = UpdateRequest({"version": -1, "abort": "its sync could not begin"})
        return send(("abort", partial(self._llm.update_weights, abort)), ("finish", self._llm.finish_weight_update))

    def _forget(self) -> None:
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._expiry = None
