"""An `AsyncLLM` that executes one call after the other, as EngineCore does for one client, and writes down which. No engine runs.

That vLLM's client sends a call before anything else runs, and that EngineCore executes calls in the order in which they come, is
seen by the syncs of tests/vllm/test_sync.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from rdt_vllm.protocol import ABORTED


class Engine:
    """Executes one call after the other.

    Attributes:
        calls: in the order of their execution, with the calls that were sent and not executed yet.
        fails: calls that fail.
        text: with which they fail; default: one that names the call.
        hangs: calls that take for ever, and all after them.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.text = ""
        self.says = "6"
        self.on: dict[str, Callable[[], None]] = {}
        self._queue: list[tuple[str, asyncio.Future[Any], Callable[[], Any]]] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=lambda **_: self._send("pause"))
        self.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0))

    async def _send(self, name: str, run: Callable[[], Any] = lambda: None, fails: str = "") -> Any:
        def failing() -> None:
            raise RuntimeError(fails)

        done = asyncio.get_running_loop().create_future()
        self._queue.append((name, done, failing if fails else run))
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_later(0.001, self._execute)
        return await done

    def _execute(self) -> None:
        while self._queue:
            name, done, run = self._queue[0]
            if name in self.hangs:
                return
            self.calls.append((name, tuple(waiting for waiting, *_ in self._queue[1:])))
            self.on.get(name, lambda: None)()
            del self._queue[0]
            if done.cancelled():
                continue
            if name in self.fails:
                done.set_exception(RuntimeError(self.text or f"{name} broke"))
                continue
            try:
                done.set_result(run())
            except RuntimeError as error:
                done.set_exception(error)

    def start_weight_update(self) -> Coroutine[Any, Any, None]:
        return self._send("start")

    def update_weights(self, request: Any) -> Coroutine[Any, Any, None]:
        if getattr(request, "update_info", {}).get("abort"):
            return self._send("abort", fails=ABORTED)
        return self._send("update")

    def finish_weight_update(self, weight_version: str | None = None) -> Coroutine[Any, Any, None]:
        return self._send("finish")

    def update_weight_version(self, version: str) -> Coroutine[Any, Any, None]:
        return self._send(f"stamp {version}", lambda: setattr(self, "says", version))

    def get_weight_version(self) -> Coroutine[Any, Any, str]:
        return self._send("ask", lambda: self.says)

    def pause_generation(self, **_: Any) -> Coroutine[Any, Any, None]:
        return self._send("pause by itself")

    def init_weight_transfer_engine(self, request: Any) -> Coroutine[Any, Any, None]:
        return self._send("init")

    def resume_generation(self) -> Coroutine[Any, Any, None]:
        return self._send("resume")

    @property
    def names(self) -> list[str]:
        """Of the calls that were executed."""
        return [name for name, _ in self.calls]
