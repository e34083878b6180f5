"""A sync of a hosted engine in one call, and its stamp and resumption in another; for `SGLangServer`.

What needs no answer of another step is sent beside it; a step that may move bytes waits until every scheduler has done the one
before. Everything is sent from one thread, in which a later call that ends the sync is seen before anything else is sent.
It refuses to stamp an engine that is not the one that received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError, RdtError, StepError

from .controls import PASSING_S, not_flushed, remaining
from .protocol import RECEIVING

#: seconds that whoever was late is waited for beyond the deadline: what was asked ends by itself then, and says who it was
_GRACE_S = 0.5


class Hosted(Protocol):
    """SGLang's own calls, as `SGLangServer` offers them."""

    async def pause_generation(self, mode: str) -> None:
        """Returns once the pause was sent; `begin` tells of each scheduler that it has taken effect."""
        ...

    async def continue_generation(self) -> None:
        """Returns once it was sent."""
        ...

    async def flush_cache(self) -> tuple[bool, str]:
        """Whether the prefix cache was dropped, and what SGLang says."""
        ...

    async def update_weight_version(self, version: str) -> None:
        """Returns once the first scheduler has taken it."""
        ...

    async def get_weight_version(self) -> str:
        """What the engine says that it serves."""
        ...


class OneCall:
    """The syncs of one engine. All methods run in the thread of one event loop.

    Args:
        hosted: the engine.
        tell: sends a call of `protocol.CALLS` to every scheduler before it returns; what it returns is done when all have
            answered. Takes the name of the call, its arguments and the seconds that there are for it.
        check: raises EngineError if the engine is dead; says why.
    """

    def __init__(
        self,
        hosted: Hosted,
        tell: Callable[[str, Mapping[str, Any], float], asyncio.Future[list[dict[str, Any]]]],
        check: Callable[[], None],
    ) -> None:
        self._hosted = hosted
        self._tell = tell
        self._check = check
        self._turn = 0  # counts what begins or ends a sync
        self._before: tuple[int, str] | None = None  # version of the last sync, and the stamp when it began

    def ended(self) -> None:
        """Whatever sync is running in a call goes no further: its next step is not sent."""
        self._turn += 1

    async def receive(self, version: int, *, mode: str, reset_cache: bool, limit_s: float) -> dict[str, float]:
        """See `SGLangServer.receive_version`."""
        self.ended()
        self._check()
        turn, end = self._turn, time.monotonic() + limit_s
        seconds = dict.fromkeys(STEPS, 0.0)

        def goes_on(step: str) -> None:
            if turn != self._turn:
                raise StepError(f"version {version} was ended by a later call before its {step}", step)

        def told(step: str) -> asyncio.Future[Any]:
            goes_on(step)
            timeout_s = remaining(end, PASSING_S)  # the scheduler's own error comes first
            try:
                answers = self._tell(step, {"version": version, "timeout_s": timeout_s}, end - time.monotonic())
            except RdtError as error:
                raise StepError(str(error), step) from error
            answers.add_done_callback(_seen)
            return answers

        async def done(step: str, work: asyncio.Future[Any]) -> Any:
            began = time.monotonic()
            # not cancelled when it is late: SGLang would take its answer for that of a later call
            await asyncio.wait({work}, timeout=max(end - began, 0.0) + _GRACE_S)
            seconds[step] += time.monotonic() - began
            if not work.done():
                raise StepError(f"the {step} of version {version} was not done {limit_s:.1f} s after it began", step)
            return self._result(step, work)

        # the order in which the schedulers execute: SGLang sends its own calls through one socket, and each of them handles what
        # comes from there one after the other. The stamp follows the pause, so that no token is counted to the wrong version;
        # `begin` waits for the pause by itself
        self._before = version, await self._hosted.get_weight_version()
        pausing = _started(self._hosted.pause_generation(mode))
        await asyncio.sleep(0)  # it is on its way
        beginning = told("begin")
        await done("pause", pausing)
        goes_on("begin")
        stamping = _started(self._hosted.update_weight_version(f"{RECEIVING}{version}"))
        await done("begin", beginning)
        await done("begin", stamping)
        await done("pull", told("pull"))
        # not sent with the pull: where another rank received nothing, one that is finished would be whole, with other weights
        finishing = told("finish")
        flushing = _started(self._hosted.flush_cache()) if reset_cache else None
        await done("finish", finishing)
        if flushing is not None:
            dropped, why = await done("finish", flushing)
            if not dropped:
                raise StepError(not_flushed(why), "finish")
        goes_on("finish")
        return seconds

    async def stamp_and_resume(self, expected: str, version: str) -> tuple[str, str]:
        """See `SGLangServer.stamp_and_resume`."""
        self.ended()
        before = await self._hosted.get_weight_version()
        if before != expected:
            return before, before
        # in this order through one socket: whoever generates again has the stamp
        await asyncio.gather(self._hosted.update_weight_version(version), self._hosted.continue_generation())
        return before, await self._hosted.get_weight_version()

    async def restore(self, version: int) -> bool:
        """See `SGLangServer.restore_version`."""
        self.ended()
        if self._before is None or self._before[0] != version:
            return False
        before = self._before[1]
        # the stamp may be on its way yet: stamps are executed one after the other
        if await self._hosted.get_weight_version() not in (before, f"{RECEIVING}{version}"):
            return False
        await self._hosted.update_weight_version(before)
        return True

    def _result(self, step: str, work: asyncio.Future[Any]) -> Any:
        error = EngineError(f"{step} was cancelled") if work.cancelled() else work.exception()
        if error is None:
            return work.result()
        try:
            self._check()  # who died first says more than those that were ended after it
        except EngineError as dead:
            error = dead
        text = str(error) if isinstance(error, RdtError) else f"{type(error).__name__}: {error}"
        raise StepError(text, step) from error


def _started(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    started = asyncio.ensure_future(work)
    started.add_done_callback(_seen)
    return started


def _seen(work: asyncio.Future[Any]) -> None:
    """Nobody may be waiting any more, and that is no news for a log: the first failure is told."""
    if not work.cancelled():
        work.exception()
