"""One stock SGLang engine in Ray mode inside this process: its HTTP server in a thread, its schedulers as actors.

It does what SGLang's own Ray launcher does, in the same order, apart from three things: nothing needs the main thread,
every wait has a deadline, and a failure ends the engine but not this process, which is left to say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from rdt_core.errors import DeadlineError, EngineError

from .leftovers import Leftovers

log = logging.getLogger(__name__)

#: seconds for each step of the engine's end
END_S = 20.0
#: seconds that SGLang's HTTP server gets to end by itself
ORDERLY_S = 2.0
_POLL_S = 0.5
#: seconds in which the others are heard of when one scheduler ended
_OTHERS_S = 2.0


class HostedEngine:
    """One engine, from its start to its end. The constructor returns when it can generate.

    Args:
        model: path or name, as for SGLang.
        placement_group: see `SGLangServer`.
        timeout_s: deadline of the start, in seconds.
        server_args: keyword arguments of SGLang's `ServerArgs`.

    Attributes:
        manager: SGLang's `TokenizerManager`; its coroutines are for `run`.
        handles: of the schedulers' actors, in rank order.
        url: of the HTTP server.
        server_args: SGLang's `ServerArgs`.
        reason: why the engine is dead, or None.

    Raises:
        EngineError: SGLang did not start; says why.
        DeadlineError: it was not up within `timeout_s`.
    """

    def __init__(self, model: str, *, placement_group: Any, timeout_s: float, server_args: Mapping[str, Any]) -> None:
        self.reason: str | None = None
        self.manager: Any = None
        self.handles: list[Any] = []
        self.url = ""
        self.server_args: Any = None
        self._failure: Exception | None = None
        self._closing = False
        self._leftovers: Leftovers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()  # set as well when the start failed
        self._ended = threading.Event()  # the HTTP server's thread is through
        # in a thread: SGLang waits for its schedulers without a deadline
        _spawn(self._start, model, placement_group, dict(server_args))
        try:
            if not self._up.wait(timeout_s):
                raise DeadlineError(
                    f"SGLang did not start within {timeout_s:.0f} s; are the GPUs that it asks for free?"
                )
            if self._failure is not None:
                raise self._failure
            if self.reason is not None:
                raise EngineError(f"SGLang did not start: {self.reason}")
        except BaseException:
            self.close("it did not start")
            raise

    @property
    def alive(self) -> bool:
        """Whether every process of the engine lives."""
        return self.reason is None and not self._closing

    def check(self) -> None:
        """Raises EngineError if the engine is dead; says why."""
        if self.reason is not None:
            raise EngineError(f"SGLang at {self.url} is dead: {self.reason}")
        if self._closing:
            raise EngineError(f"SGLang at {self.url} was shut down")

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a coroutine of `manager`, which runs in the HTTP server's loop.

        Raises:
            EngineError: SGLang refused, or the engine died meanwhile; says why.
        """
        try:
            self.check()
            assert self._loop is not None
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.check()
            raise  # the caller gave it up
        except ValueError as error:  # how SGLang refuses a request
            raise EngineError(f"SGLang refused: {error}") from error
        except Exception as error:
            detail = getattr(
                error, "detail", None
            )  # how its schedulers do; such an error does not travel between processes
            if detail is None:
                raise
            raise EngineError(f"SGLang refused: {detail}") from None

    async def generate(self, request: Any) -> Any:
        """SGLang's answer to a `GenerateReqInput`; for `run`."""
        answer = None
        async for part in self.manager.generate_request(request, None):
            answer = part
        return answer

    def close(self, reason: str) -> None:
        """Ends actors, processes and HTTP server, and removes their files. Idempotent; the dead are no obstacle.

        Args:
            reason: for the log.
        """
        import ray

        self._closing = True
        self._up.set()
        for handle in self.handles:
            with contextlib.suppress(Exception):
                ray.kill(handle)
        if self._loop is not None and not self._ended.is_set():
            self._close_http(self._loop, reason)
        with contextlib.suppress(Exception):
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=END_S)
        leftovers, self._leftovers = self._leftovers, None
        if leftovers is not None:
            self._await_deaths()
            leftovers.remove(END_S)

    # the start, in threads of its own

    def _start(self, *args: Any) -> None:
        try:
            self._launch(*args)
        except Exception as error:
            told = EngineError(f"SGLang did not start: {type(error).__name__}: {error}")
            self._failure = error if isinstance(error, EngineError) else told
            self._up.set()

    def _launch(self, model: str, placement_group: Any, given: dict[str, Any]) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import ray
        import sglang.srt.entrypoints.http_server  # noqa: F401 - before the launch, so that rdt's routes find it
        from sglang.srt.entrypoints.engine import init_tokenizer_manager, run_detokenizer_process, run_scheduler_process
        from sglang.srt.ray.engine import RayEngine
        from sglang.srt.server_args import ServerArgs

        host = given.setdefault("host", ray.util.get_node_ip_address())
        given.setdefault("port", _free_port(host))
        self.server_args = ServerArgs(model_path=model, **given)
        self.url = self.server_args.url()
        self.manager, templates, ports, schedulers, watchdog, _ = RayEngine._launch_subprocesses(
            self.server_args,
            init_tokenizer_manager_func=init_tokenizer_manager,
            run_scheduler_process_func=run_scheduler_process,
            run_detokenizer_process_func=run_detokenizer_process,
            placement_group=placement_group,
        )
        self.handles = list(schedulers.scheduler_actors)
        # its signal would end this process before it can say why
        watchdog.stop()
        processes = list(watchdog._processes)
        self._leftovers = Leftovers(ports, self.handles, [process.pid for process in processes])
        if self._closing:  # the deadline passed meanwhile
            self.close("it did not start in time")
            return
        here = ray.get_runtime_context().get_node_id()
        if self._leftovers.first_node != here:
            raise EngineError(
                f"the bundle of rank 0 is on node {self._leftovers.first_node}, and this server on node {here}: SGLang's server "
                "and its rank 0 talk over files; place the server's actor on the node of that bundle, as `launch` does"
            )
        _spawn(self._serve, templates, ports, schedulers, watchdog)
        _spawn(self._watch, schedulers, processes)

    def _serve(self, templates: Any, ports: Any, schedulers: Any, watchdog: Any) -> None:
        """SGLang's HTTP server; returns when it has ended."""
        from sglang.srt.entrypoints import http_server

        inner = http_server.app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> Any:
            self._loop = asyncio.get_running_loop()
            async with inner(app) as state:
                yield state

        http_server.app.router.lifespan_context = lifespan
        try:
            http_server._setup_and_run_http_server(
                self.server_args, self.manager, templates, ports, schedulers.scheduler_infos, watchdog,
                execute_warmup_func=self._warm_up, launch_callback=self._up.set,
            )  # fmt: skip
            self._died("its HTTP server ended")
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # uvicorn ends with SystemExit when it cannot listen
            self._died(f"its HTTP server failed: {type(error).__name__}: {error}")
        finally:
            http_server.app.router.lifespan_context = inner
            self._ended.set()
            self._up.set()

    def _warm_up(self, _server_args: Any) -> bool:
        """One request, in place of SGLang's own warm-up, which ends this process when it fails."""
        from sglang.srt.entrypoints.http_server import ServerStatus
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(input_ids=[0, 1, 2, 3], sampling_params={"temperature": 0, "max_new_tokens": 8})
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(self.generate(request), self._loop).result()
        except BaseException as error:
            self._died(f"its first request failed: {type(error).__name__}: {error}")
            self._up.set()
            return False
        self.manager.server_status = ServerStatus.Up
        return True

    def _watch(self, schedulers: Any, processes: list[Any]) -> None:
        """Notices that a scheduler or a subprocess ended, and ends the rest."""
        import inspect

        import ray

        loops = list(inspect.getclosurevars(schedulers.block_until_scheduler_exits).nonlocals["event_loop_refs"])
        while self.alive:
            ended, _ = ray.wait(loops, num_returns=1, timeout=_POLL_S)
            if ended:
                # one that fails because another died may be heard of first
                ended, _ = ray.wait(loops, num_returns=len(loops), timeout=_OTHERS_S)
                errors = {loops.index(one): _error(one) for one in ended}
                dead = [index for index, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)]
                first = (dead or sorted(errors))[0]
                told = errors[first] or "its event loop ended"
                self._died(f"scheduler {first} of {len(loops)} died: {told}")
            for process in processes:
                if not process.is_alive() and process.exitcode != 0:
                    self._died(f"process {process.name} (pid {process.pid}) died with exit code {process.exitcode}")
        if self.reason is not None and not self._closing:
            # the others wait for the dead one in collectives, and requests for an answer that never comes
            self.close(self.reason)

    def _died(self, reason: str) -> None:
        if self.alive:
            self.reason = reason
            log.error("SGLang is dead: %s", reason)

    # the end

    def _close_http(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        stop = self.manager._server_stop_hook
        if stop is not None:
            stop()
        if self._ended.wait(ORDERLY_S):
            return

        # requests whose schedulers are gone would keep the server open for ever
        def cancel() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()

        with contextlib.suppress(RuntimeError):  # it ended just now
            loop.call_soon_threadsafe(cancel)
        if not self._ended.wait(END_S):
            log.error("SGLang's HTTP server did not end within %.0f s after %s", END_S, reason)

    def _await_deaths(self) -> None:
        from ray._private.state import actors

        deadline = time.monotonic() + END_S
        waiting = [handle._actor_id.hex() for handle in self.handles]
        while waiting and time.monotonic() < deadline:
            waiting = [one for one in waiting if (actors(one) or {}).get("State", "DEAD") != "DEAD"]
            time.sleep(_POLL_S if waiting else 0)


def _spawn(target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True, name=f"rdt{target.__name__}").start()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def _error(answer: Any) -> Exception | None:
    """What a finished call raised; None if it returned."""
    import ray

    try:
        ray.get(answer)
    except Exception as error:
        return error
    return None
