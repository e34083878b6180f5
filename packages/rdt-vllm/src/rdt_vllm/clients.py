"""Clients that drive one vLLM replica through a sync: over Ray actor handles, or over HTTP. vLLM is not imported here.

Both make the calls of `steps` and reach every worker of the replica. They refuse what would be silent elsewhere: a server without
its weight update routes, actors without the methods.
"""

from __future__ import annotations

import time
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

from rdt_core.engines import STEPS, Ahead, CachePolicy, PauseMode, Receive, keeps_steps
from rdt_core.errors import DeadlineError, EngineError, StepError, death_of
from rdt_core.web import StatusError, Web

from .protocol import AT_STEP
from .steps import MARGIN_S, InitRequest, UpdateRequest, VllmSteps


class VllmRayEngine(VllmSteps):
    """A replica behind Ray actors that hold vLLM's `AsyncLLM`, or `LLM`, or offer the same methods.

    Args:
        handles: one actor handle, or those of all data parallel ranks of one deployment. Deployments that do not know
            of one another are replicas of their own: one client each.
        name: see `VllmSteps`.
        cache: see `VllmSteps`.
        pause: see `VllmSteps`. An offline `LLM` has no pause: its actor runs one call at a time, so a sync begins
            when the running `generate` has ended.
    """

    def __init__(
        self,
        handles: Any,
        *,
        name: str,
        cache: CachePolicy = "reset",
        pause: PauseMode = "keep",
    ) -> None:
        super().__init__(name, cache=cache, pause=pause)
        self.handles = list(handles) if isinstance(handles, list | tuple) else [handles]
        if not self.handles:
            raise EngineError(f"replica {name!r} has no actors")
        # one call has one deadline; where requests end first, the pause alone may take as long
        whole = len(self.handles) == 1 and hasattr(self.handles[0], "receive_version") and pause != "wait"
        whole = whole and keeps_steps(self, VllmRayEngine)
        #: a `VllmServer` takes a sync in one call; other actors are driven step by step
        self.receive: Receive | None = self._receive if whole else None
        # only a pause of which requests notice nothing: the sync may not begin
        ahead = whole and pause == "keep" and hasattr(self.handles[0], "pause_ahead")
        self.ahead: Ahead | None = _Ahead(self) if ahead else None
        self._mark = ""  # the engine's latest stamp is this client's
        self._is_resumed = False  # by the call that stamped it

    @property
    def _offline(self) -> bool:
        return not hasattr(self.handles[0], "pause_generation")

    def _call(self, method: str, *args: Any, deadline: float, **kwargs: Any) -> list[Any]:
        """Calls every actor and waits for all of them, also when one failed: a worker must not be left in a call."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            refs = [getattr(handle, method).remote(*args, **kwargs) for handle in self.handles]
        except AttributeError as error:
            raise EngineError(f"the actors of replica {self.name!r} have no method {method}: {error}") from error
        results, failures = [], []
        for index, ref in enumerate(refs):
            try:
                results.append(ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0)))
            except GetTimeoutError as error:
                raise DeadlineError(
                    f"replica {self.name!r}: {method} of actor {index} was not done by its deadline"
                ) from error
            except RayTaskError as error:
                cause = error.cause if error.cause is not None else error
                failures.append((f"actor {index}: {type(cause).__name__}: {cause}", error))
            except RayActorError as error:
                failures.append((f"actor {index} died: {death_of(error)}", error))
        if failures:
            told = "; ".join(text for text, _ in failures)
            raise EngineError(f"replica {self.name!r}: {method} failed: {told}") from failures[0][1]
        return results

    def _receive(self, version: int, *, deadline: float) -> Mapping[str, float]:
        self._remember_stamp(deadline)
        self._open, self._finishing, self._uncommitted, self._is_resumed = False, False, None, False
        failed: str | None = STEPS[2]  # of an engine that does not answer nothing better is known
        try:
            left_s = max(deadline - time.monotonic() - MARGIN_S, 1.0)  # its own error comes first
            (seconds,) = self._call(
                "receive_version", version, mode=self.pause_mode, clear_cache=self.cache == "reset", limit_s=left_s,
                deadline=deadline,
            )  # fmt: skip
            failed = None
        except EngineError as error:
            _, marked, rest = str(error).partition(AT_STEP)
            if not marked:
                raise
            failed, _, text = rest.partition("; ")
            raise StepError(f"replica {self.name!r}: {text}", failed) from error
        finally:
            # what `abort` has to know, as after the single calls
            reached = len(STEPS) if failed is None else STEPS.index(failed)
            # the update is opened while the engine pauses; what it is to do after the pull was sent with that
            self._open, self._finishing = failed is not None, failed in STEPS[2:]
            if reached >= STEPS.index("pull"):
                self._uncommitted, self._before = version, None
            self._is_unsure = self._finishing
        return seconds

    def _restamp(self, expected: str, version: str, deadline: float) -> tuple[list[str], list[str]]:
        if self.receive is None:
            return super()._restamp(expected, version, deadline)
        self._mark = uuid.uuid4().hex if self.ahead is not None else ""
        ((before, after),) = self._call("stamp_and_resume", expected, version, self._mark, deadline=deadline)
        self._is_resumed = before == expected and after == version
        return [before], [after]

    def _init(self, info: dict[str, Any], deadline: float) -> None:
        self._call("init_weight_transfer_engine", InitRequest(info), deadline=deadline)

    def _start(self, deadline: float) -> None:
        self._call("start_weight_update", deadline=deadline)

    def _update(self, info: dict[str, Any], deadline: float) -> None:
        self._call("update_weights", UpdateRequest(info), deadline=deadline)

    def _finish(self, deadline: float) -> None:
        self._call("finish_weight_update", deadline=deadline)

    def _stamp(self, version: str, deadline: float) -> None:
        self._call("update_weight_version", version, deadline=deadline)

    def _weight_version(self, deadline: float) -> list[str]:
        return self._call("get_weight_version", deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`."""
        reset = self.cache == "reset"
        self._is_resumed = False
        if not self._offline:
            self._call("pause_generation", mode=self.pause_mode, clear_cache=reset, deadline=deadline)
        elif reset:
            # as `clear_cache` does: what requests in flight hold as well, and external caches
            done = self._call("reset_prefix_cache", True, True, deadline=deadline)
            if not all(done):
                raise EngineError(
                    f"replica {self.name!r} could not drop its prefix cache, and would go on with keys and values of the old "
                    "weights; cache='keep' allows that"
                )

    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""
        resumed, self._is_resumed = self._is_resumed, False
        if not self._offline and not resumed:
            self._call("resume_generation", deadline=deadline)

    def health(self, *, deadline: float) -> None:
        """See `EngineClient.health`."""
        self._call("get_weight_version" if self._offline else "check_health", deadline=deadline)


class _Ahead:
    """Implements `rdt_core.engines.Ahead` for a client of one `VllmServer`."""

    def __init__(self, client: VllmRayEngine) -> None:
        self._client = client
        self._ticket = ""

    def send(self) -> bool:
        client = self._client
        if client._before is None or client._uncommitted is not None or not client._mark:
            return False  # it would have to be asked first
        self._ticket = uuid.uuid4().hex
        client.handles[0].pause_ahead.remote(
            self._ticket, client._mark, mode=client.pause_mode, clear_cache=client.cache == "reset"
        )
        return True

    def take_back(self, *, deadline: float) -> bool:
        client = self._client
        before, client._before = client._before, None
        (done,) = client._call("take_back", self._ticket, client._mark, deadline=deadline)
        if done:
            client._before = before
        return bool(done)


class VllmHttpEngine(VllmSteps):
    """A replica behind `vllm serve` with its weight update routes (`VLLM_SERVER_DEV_MODE=1`).

    Args:
        url: of the server, e.g. `http://node7:8000`.
        name: see `VllmSteps`; default: the URL's host and port.
        cache: see `VllmSteps`.
        pause: see `VllmSteps`.
        headers: sent with every request, e.g. `{"Authorization": "Bearer …"}`.
        end_open_syncs: whether `connect` ends a sync that another driver left open; its replica is torn then.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        cache: CachePolicy = "reset",
        pause: PauseMode = "keep",
        headers: Mapping[str, str] | None = None,
        end_open_syncs: bool = True,
    ) -> None:
        self._web = Web(url, headers)
        super().__init__(name or self._web.netloc, cache=cache, pause=pause)
        self.url = self._web.url
        self._ends_open_syncs = end_open_syncs

    def _request(
        self, path: str, deadline: float, body: Mapping[str, Any] | None = None, *, method: str = "POST"
    ) -> Any:
        try:
            answer = self._web.request(method, path, (body or {}) if method == "POST" else None, deadline)
        except StatusError as error:
            if error.status in (404, 405):
                raise EngineError(
                    f"replica {self.name!r}: {method} {self.url}/{path}: the server has no such route; start it with "
                    f'VLLM_SERVER_DEV_MODE=1 in its environment and --weight-transfer-config \'{{"backend": "rdt"}}\''
                ) from error
            raise EngineError(f"replica {self.name!r}: {error}") from error
        except DeadlineError as error:
            raise DeadlineError(f"replica {self.name!r}: {error}") from error
        except EngineError as error:
            raise EngineError(f"replica {self.name!r}: {error}") from error
        if isinstance(answer, str) and answer:
            where = f"replica {self.name!r}: {method} {self.url}/{path}"
            raise EngineError(f"{where} answered what is no JSON: {answer[:200]!r}")
        return answer

    def _init(self, info: dict[str, Any], deadline: float) -> None:
        self._request("init_weight_transfer_engine", deadline, {"init_info": info})

    def _start(self, deadline: float) -> None:
        self._request("start_weight_update", deadline)

    def _update(self, info: dict[str, Any], deadline: float) -> None:
        self._request("update_weights", deadline, {"update_info": info})

    def _finish(self, deadline: float) -> None:
        self._request("finish_weight_update", deadline)

    def _stamp(self, version: str, deadline: float) -> None:
        self._request("update_weight_version", deadline, {"new_version": version})

    def _weight_version(self, deadline: float) -> list[str]:
        answer = self._request("weight_info", deadline, method="GET")
        return [str(answer["weight_version"])]

    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`."""
        query = urllib.parse.urlencode({"mode": self.pause_mode, "clear_cache": str(self.cache == "reset").lower()})
        self._request(f"pause?{query}", deadline)

    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""
        self._request("resume", deadline)

    def health(self, *, deadline: float) -> None:
        """See `EngineClient.health`."""
        self._request("health", deadline, method="GET")
