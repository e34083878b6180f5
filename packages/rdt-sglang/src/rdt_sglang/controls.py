"""Who pauses, flushes, stamps and resumes one SGLang engine: its HTTP server, rdt's server actor, or the engine object.

All of them reach SGLang's own control calls; none touches weights. Requests in flight are never aborted, and what
SGLang refuses is an error here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from rdt_core.errors import DeadlineError, EngineError, RdtError, StepError, death_of
from rdt_core.web import StatusError, Web

#: seconds that who passes a call on gets less than its caller, so that its error comes first
PASSING_S = 1.0


def remaining(deadline: float, margin_s: float) -> float:
    """Seconds that who is asked gets: `margin_s` less than the caller has, and half a second at least."""
    return max(deadline - time.monotonic() - margin_s, 0.5)


class Control(Protocol):
    """SGLang's own control calls for one engine. Each raises EngineError, or DeadlineError when it was late."""

    def pause(self, mode: str, *, deadline: float) -> None:
        """Tells the schedulers to stop generating; SGLang does not say when they have."""
        ...

    def flush(self, *, deadline: float) -> None:
        """Drops the prefix cache; an error when SGLang does not."""
        ...

    def stamp(self, version: str, *, deadline: float) -> None:
        """Stamps the version, without aborting anything."""
        ...

    def stamped(self, *, deadline: float) -> str:
        """The version that the engine says it serves."""
        ...

    def resume(self, *, deadline: float) -> None:
        """Generation goes on."""
        ...

    def check(self, *, deadline: float) -> int:
        """Refuses an engine that cannot be synced as one; returns the number of its schedulers, 0 if it is not told."""
        ...


class WebControl:
    """Through SGLang's HTTP server.

    Args:
        web: the server.
    """

    def __init__(self, web: Web) -> None:
        self._web = web

    def pause(self, mode: str, *, deadline: float) -> None:
        """See `Control.pause`."""
        self._web.post("pause_generation", {"mode": mode}, deadline=deadline)

    def flush(self, *, deadline: float) -> None:
        """See `Control.flush`."""
        try:
            self._web.post("flush_cache", deadline=deadline)
        except StatusError as error:
            raise EngineError(not_flushed(error.body)) from error

    def stamp(self, version: str, *, deadline: float) -> None:
        """See `Control.stamp`."""
        # SGLang's default would abort every request in flight
        body = {"new_version": version, "abort_all_requests": False}
        self._web.post("update_weight_version", body, deadline=deadline)

    def stamped(self, *, deadline: float) -> str:
        """See `Control.stamped`."""
        answer = self._web.get("model_info", deadline=deadline)
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise EngineError(f"{self._web.url}/model_info says nothing of a weight_version: {str(answer)[:200]}")
        return str(answer["weight_version"])

    def resume(self, *, deadline: float) -> None:
        """See `Control.resume`."""
        self._web.post("continue_generation", deadline=deadline)

    def check(self, *, deadline: float) -> int:
        """See `Control.check`."""
        info = self._web.get("server_info", deadline=deadline)
        if not isinstance(info, dict):
            raise EngineError(f"{self._web.url}/server_info answered no object: {str(info)[:200]}")
        return check_settings(info, self._web.url)


class ActorControl:
    """Through the actor of an `SGLangServer`.

    Args:
        handle: of the actor.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def pause(self, mode: str, *, deadline: float) -> None:
        """See `Control.pause`."""
        self.ask("pause_generation", mode, deadline=deadline)

    def flush(self, *, deadline: float) -> None:
        """See `Control.flush`."""
        success, told = self.ask("flush_cache", deadline=deadline)
        if not success:
            raise EngineError(not_flushed(told))

    def stamp(self, version: str, *, deadline: float) -> None:
        """See `Control.stamp`."""
        self.ask("update_weight_version", version, deadline=deadline)

    def stamped(self, *, deadline: float) -> str:
        """See `Control.stamped`."""
        return str(self.ask("get_weight_version", deadline=deadline))

    def resume(self, *, deadline: float) -> None:
        """See `Control.resume`."""
        self.ask("continue_generation", deadline=deadline)

    def check(self, *, deadline: float) -> int:
        """See `Control.check`."""
        return check_settings(self.ask("settings", deadline=deadline), "the server actor")

    def call(self, name: str, arguments: Mapping[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """See `callers.Caller.call`. The server passes it on: a handle of a scheduler would make this process import SGLang."""
        return list(self.ask("weights", name, dict(arguments), remaining(deadline, PASSING_S), deadline=deadline))

    def ask(self, method: str, *args: Any, deadline: float, **kwargs: Any) -> Any:
        """Calls a method of the server actor."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            asked = getattr(self.handle, method).remote(*args, **kwargs)
            return ray.get(asked, timeout=max(deadline - time.monotonic(), 0.0))
        except AttributeError as error:
            raise EngineError(f"the actor has no method {method}; expected an SGLangServer") from error
        except GetTimeoutError as error:
            raise DeadlineError(f"{method} of the server actor was not done by its deadline") from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            kind = DeadlineError if isinstance(cause, DeadlineError) else EngineError
            told = str(cause) if isinstance(cause, RdtError) else f"{type(cause).__name__}: {cause}"
            if isinstance(cause, StepError):
                raise StepError(f"{method} of the server actor: {told}", cause.step) from error
            raise kind(f"{method} of the server actor: {told}") from error
        except RayActorError as error:
            raise EngineError(f"the server actor died: {death_of(error)}") from error


class EngineControl:
    """Through an SGLang `Engine` or `RayEngine` of this process.

    Args:
        engine: the engine. Its loop must not be running in this thread.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def pause(self, mode: str, *, deadline: float) -> None:
        """See `Control.pause`."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._manager.pause_generation(PauseGenerationReqInput(mode=mode)), "pause_generation", deadline)

    def flush(self, *, deadline: float) -> None:
        """See `Control.flush`."""
        answer = self._run(self._manager.flush_cache(), "flush_cache", deadline)
        if not answer.success:
            raise EngineError(not_flushed(answer.message))

    def stamp(self, version: str, *, deadline: float) -> None:
        """See `Control.stamp`."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._run(self._manager.update_weight_version(request), "update_weight_version", deadline)

    def stamped(self, *, deadline: float) -> str:
        """See `Control.stamped`."""
        return str(self._manager.config_value("weight_version"))

    def resume(self, *, deadline: float) -> None:
        """See `Control.resume`."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._manager.continue_generation(ContinueGenerationReqInput()), "continue_generation", deadline)

    def check(self, *, deadline: float) -> int:
        """See `Control.check`."""
        return check_settings(settings_of(self._engine.server_args), "the engine")

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    def _run(self, work: Coroutine[Any, Any, Any], what: str, deadline: float) -> Any:
        """Runs a coroutine on the engine's loop, whether or not another thread is running it at the moment."""
        loop, left = self._engine.loop, max(deadline - time.monotonic(), 0.001)
        limited = asyncio.wait_for(work, left)
        try:
            if loop.is_running():
                # the other thread may stop running the loop before this is done
                return asyncio.run_coroutine_threadsafe(limited, loop).result(left + 1.0)
            return loop.run_until_complete(limited)
        except TimeoutError as error:
            raise DeadlineError(f"{what} of the engine was not done within {left:.1f} s") from error
        finally:
            limited.close()


def settings_of(server_args: Any) -> dict[str, Any]:
    """Returns what `check_settings` looks at, as SGLang resolved it."""
    found = server_args.resolved_dict()
    return {name: found[name] for name in ("tp_size", "pp_size", "dp_size", "tokenizer_worker_num")}


def check_settings(settings: dict[str, Any], who: str) -> int:
    """Returns the number of schedulers of an engine.

    Args:
        settings: of `settings_of`, or of SGLang's route `server_info`.
        who: the engine, for messages.

    Raises:
        EngineError: it has several tokenizer processes or data parallel ranks.
    """
    workers, dp = int(settings.get("tokenizer_worker_num") or 1), int(settings.get("dp_size") or 1)
    if workers > 1:
        raise EngineError(
            f"{who} runs {workers} tokenizer workers, and SGLang stamps a weight version in only one of them; start it "
            "with --tokenizer-worker-num 1"
        )
    if dp > 1:
        raise EngineError(
            f"{who} runs {dp} data parallel ranks, and SGLang reports only the first one's answer to control calls such as "
            "flush_cache; start one engine (one replica) per data parallel rank instead"
        )
    return int(settings.get("tp_size") or 0) * int(settings.get("pp_size") or 1)


def not_flushed(told: str | None) -> str:
    """Returns what there is to say of a cache that SGLang did not drop.

    Args:
        told: SGLang's own words, if any.
    """
    return (
        f"SGLang did not drop its prefix cache: {(told or 'it gave no reason').strip()}. It never does while requests hold "
        "keys and values: use pause='retract', or cache='keep' to go on with those of the old weights"
    )
