"""Admin routes on SGLang's own HTTP server, through which a sync reaches every scheduler behind it.

`POST /rdt/weights` runs one call of `protocol.CALLS` on all schedulers, `GET /rdt/actors` says which they are. Both have
the auth level of SGLang's own weight routes. Calls run in threads, so that a pull does not hold the server's loop. They
do not exist where SGLang runs several tokenizer processes: those serve HTTP without knowing the schedulers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rdt_core.errors import DeadlineError, EngineError, RdtError, WireError

from .callers import ActorCaller, Caller, RpcCaller
from .controls import check_settings, settings_of
from .protocol import ACTORS_ROUTE, MAX_BODY, WEIGHTS_ROUTE, error_to_wire

log = logging.getLogger(__name__)

_LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
_SERVER = "sglang.srt.entrypoints.http_server"
#: longest time that one call may ask for, in seconds
MAX_TIMEOUT_S = 3600.0
#: calls at the same time: a pull, and what looks at it or ends it meanwhile
_THREADS = 4


def register() -> None:
    """Hooks the end of SGLang's launch, in any process that loads SGLang's plugins. Called once by rdt's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LAUNCH, _launched, HookType.AFTER)


def _launched(result: Any, _engine_class: type, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Adds the routes to the HTTP app of this process, if it has one."""
    server = sys.modules.get(_SERVER)  # never imported here: a process that serves no HTTP has no use for it
    manager, _, port_args, schedulers = result[:4]
    if server is None or manager is None:
        return
    try:
        count = check_settings(settings_of(server_args), "this server")
    except EngineError as error:
        log.warning("no weight sync over HTTP: %s", error)
        return
    install(server.app, server.ORJSONResponse, Desk(schedulers, port_args, count))


class Desk:
    """The schedulers of the server in this process, as its routes see them.

    Args:
        schedulers: SGLang's `SchedulerInitResult`.
        port_args: SGLang's `PortArgs`.
        count: number of schedulers.
    """

    def __init__(self, schedulers: Any, port_args: Any, count: int) -> None:
        self.handles: list[Any] = list(getattr(schedulers, "scheduler_actors", ()))
        self._pids: list[int] = list(schedulers.all_child_pids)[:count]  # the detokenizer comes behind them
        self._endpoint: str = port_args.rpc_ipc_name
        self._made: Caller | None = None
        self._making = threading.Lock()
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rdt-weights")

    def caller(self) -> Caller:
        """How the schedulers are reached; made once."""
        with self._making:
            if self._made is None:
                who = "the engine"
                self._made = ActorCaller(self.handles, who) if self.handles else RpcCaller.bind(self._endpoint, who)
            return self._made

    def weights(self, body: bytes) -> dict[str, Any]:
        """Answers a POST to the weights route; blocks as long as the call takes.

        Args:
            body: JSON object with `call`, `arguments`, and `timeout_s` in seconds.

        Raises:
            WireError: it is something else.
            EngineError: see `Caller.call`.
            DeadlineError: see `Caller.call`.
        """
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise WireError(f"the body is no JSON: {error}") from error
        if not isinstance(asked, Mapping) or set(asked) != {"call", "arguments", "timeout_s"}:
            raise WireError("the body must be a JSON object of call, arguments and timeout_s")
        timeout_s = asked["timeout_s"]
        if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise WireError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:.0f}")
        deadline = time.monotonic() + timeout_s
        return {"results": self.caller().call(asked["call"], asked["arguments"], deadline=deadline)}

    def actors(self) -> dict[str, Any]:
        """Answers a GET of the actors route: which schedulers there are, and where."""
        if not self.handles:
            return {"mode": "processes", "pids": self._pids, "actors": []}
        import ray
        from ray._private.state import actors

        found = []
        for handle in self.handles:
            identity = handle._actor_id.hex()
            known = actors(identity) or {}
            found.append(
                {
                    "actor_id": identity,
                    "name": known.get("Name", ""),
                    "node_id": known.get("Address", {}).get("NodeID", ""),
                    "state": known.get("State", ""),
                }
            )
        context = ray.get_runtime_context()
        return {
            "mode": "ray",
            "pids": [],
            "actors": found,
            "namespace": context.namespace,
            "address": context.gcs_address,
        }


def install(app: Any, response: Any, desk: Desk) -> None:
    """Adds the routes to a Starlette application, in place of those of an earlier launch.

    Args:
        app: SGLang's.
        response: class of its JSON answers.
        desk: what they answer from.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def answered(work: Any, *args: Any) -> Any:
        try:
            return response(await asyncio.get_running_loop().run_in_executor(desk.threads, work, *args))
        except RdtError as error:
            status = 400 if isinstance(error, WireError) else 504 if isinstance(error, DeadlineError) else 500
            return response({"error": error_to_wire(error)}, status_code=status)
        except Exception as error:
            log.exception("an rdt route failed")
            told = EngineError(f"{type(error).__name__}: {error}")
            return response({"error": error_to_wire(told)}, status_code=500)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def weights(request: Any) -> Any:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                told = WireError(f"the body is larger than {MAX_BODY} bytes")
                return response({"error": error_to_wire(told)}, status_code=413)
        return await answered(desk.weights, body)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def actors(_request: Any) -> Any:
        return await answered(desk.actors)

    paths = {f"/{WEIGHTS_ROUTE}", f"/{ACTORS_ROUTE}"}
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) not in paths]
    app.router.add_route(f"/{WEIGHTS_ROUTE}", weights, methods=["POST"], include_in_schema=False)
    app.router.add_route(f"/{ACTORS_ROUTE}", actors, methods=["GET"], include_in_schema=False)
