"""Clients that drive one SGLang replica through a sync: over actor handles, an engine object, or HTTP alone.

They reach every scheduler of the replica and collect what each has to say; a call returns when all have done it. SGLang
is imported only for an engine object. They refuse what would be silent elsewhere: a cache that SGLang does not drop, a
version that it does not report back, fewer schedulers than it has. After a failure nothing generates again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from rdt_core.engines import STEPS, CachePolicy, ConnectInfo, Receive, keeps_steps
from rdt_core.errors import DeadlineError, EngineError, StepError
from rdt_core.web import StatusError, Web

from .callers import ActorCaller, Caller, RpcCaller
from .controls import PASSING_S, ActorControl, Control, EngineControl, WebControl, remaining
from .protocol import RECEIVING, UNSTAMPED, WEIGHTS_ROUTE, check_call, error_from_wire

PauseMode = Literal["retract", "in_place"]
Selector = Literal["target", "draft", "all"]

#: seconds that a scheduler gets less than its caller, so that its own error comes first
MARGIN_S = 2.0


class _SglangEngine(ABC):
    """The sync of one replica. Implements `rdt_core.engines.EngineClient`.

    Args:
        name: of the replica, unique in its group.
        selector: whose weights are synced: "target", "draft" (of speculative decoding), or "all".
        cache: "reset" drops the prefix cache while the engine is paused; "keep" goes on with what was computed with the
            old weights.
        pause: what happens to requests in flight: "retract" puts them back in the queue, and they compute their keys and
            values again with the new weights; "in_place" freezes them and they go on with the old ones. Neither loses a
            token. SGLang drops no cache that frozen requests use, so that "in_place" needs cache="keep".

    Raises:
        EngineError: an empty name, an unknown choice, or "in_place" with "reset".
    """

    def __init__(self, name: str, *, selector: Selector, cache: CachePolicy, pause: PauseMode) -> None:
        if not name:
            raise EngineError("a replica needs a name, unique in its sync group")
        for what, value, known in (
            ("selector", selector, get_args(Selector)),
            ("cache", cache, ("reset", "keep")),
            ("pause", pause, get_args(PauseMode)),
        ):
            if value not in known:
                raise EngineError(f"replica {name!r}: {what}={value!r}; choose one of {', '.join(known)}")
        if pause == "in_place" and cache == "reset":
            raise EngineError(
                f"replica {name!r}: pause='in_place' keeps the keys and values of requests in flight, and SGLang drops no "
                "cache meanwhile; choose pause='retract' (they are computed again) or cache='keep' (old ones stay in use)"
            )
        self.name = name
        self.selector = selector
        self.cache = cache
        self.pause_mode = pause
        self._open = False  # schedulers may have begun a sync that was neither committed nor aborted
        self._before: str | None = None  # the engine's stamp when that sync began; None: not known

    @abstractmethod
    def _caller(self) -> Caller:
        """How the schedulers are reached."""

    @abstractmethod
    def _control(self) -> Control:
        """How the engine is paused, stamped and resumed."""

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        """See `EngineClient.connect`."""
        self._before = None
        expected = self._control().check(deadline=deadline)
        wanted = {**msgspec.to_builtins(info), "selector": self.selector}
        answers = self._call("prepare", {"info": wanted}, deadline)
        ranks = sorted(int(answer["rank"]) for answer in answers)
        if expected and ranks != list(range(expected)):
            raise EngineError(
                f"replica {self.name!r} has {expected} schedulers, and ranks {ranks} answered; every rank must be reached"
            )

    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`. SGLang does not acknowledge a pause; `begin` does, on every rank."""
        self._say(lambda control: control.pause(self.pause_mode, deadline=deadline))

    def begin(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.begin`. Returns once every scheduler has paused.

        The engine is stamped with no version until the commit, so that it never claims one that it does not hold.
        """
        if self._before is None or self._open:
            self._before = self._stamped(deadline)
        self._open = True
        self._call("begin", {"version": version, "timeout_s": remaining(deadline, MARGIN_S)}, deadline)
        self._say(lambda control: control.stamp(f"{RECEIVING}{version}", deadline=deadline))

    def pull(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.pull`."""
        self._call("pull", {"version": version, "timeout_s": remaining(deadline, MARGIN_S)}, deadline)

    def finish(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.finish`. The cache follows the policy, so that no version is stamped over a stale one."""
        self._call("finish", {"version": version, "timeout_s": remaining(deadline, MARGIN_S)}, deadline)
        if self.cache == "reset":
            self._say(lambda control: control.flush(deadline=deadline))

    def commit(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.commit`. The engine must be the one that received the version, and say it afterwards."""
        receiving = f"{RECEIVING}{version}"
        found, now = self._restamp(receiving, str(version), deadline)
        if found != receiving:
            raise EngineError(
                f"replica {self.name!r} is not stamped with version {version}: it says {found!r} instead of receiving it. It was "
                "started again, or another driver uses it; it has to be connected again"
            )
        if now != str(version):
            raise EngineError(f"replica {self.name!r} was given version {version} and says that it serves {now!r}")
        self._open, self._before = False, now

    def _restamp(self, expected: str, version: str, deadline: float) -> tuple[str, str]:
        """Stamps the engine if it says `expected`; returns what it says before and after."""
        found = self._stamped(deadline)
        if found != expected:
            return found, found
        self._say(lambda control: control.stamp(version, deadline=deadline))
        return found, self._stamped(deadline)

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        """See `EngineClient.abort`. A torn replica answers new requests with an error from here on.

        Raises:
            EngineError: a scheduler could not be told, e.g. because it died.
        """
        if not self._open:
            return
        self._call("abort", {"version": version, "reason": f"version {version}: {reason}"}, deadline)
        self._open = False
        torn = any(one.get("torn") for one in self.status(deadline=deadline))
        before, self._before = self._before, None
        if not torn:  # no byte moved
            self._restore(version, before, deadline)
        if torn:
            # torn schedulers stay paused whatever they are told (`guard.around_continue`); but SGLang's tokenizer would
            # hold every new request, which they refuse at once, until somebody resumes it
            self.resume(deadline=deadline)

    def _restore(self, version: int, before: str | None, deadline: float) -> None:
        """Stamps the engine with what it said before this sync, if it is the same one: it holds what it held then."""
        if before is not None and self._stamped(deadline) == f"{RECEIVING}{version}":
            self._say(lambda control: control.stamp(before, deadline=deadline))

    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""
        self._say(lambda control: control.resume(deadline=deadline))

    def version(self, *, deadline: float) -> int | None:
        """See `EngineClient.version`."""
        found = self._stamped(deadline)
        return int(found) if found != UNSTAMPED and found.isdecimal() else None

    def health(self, *, deadline: float) -> None:
        """See `EngineClient.health`. Asks the server and every scheduler."""
        self._stamped(deadline)
        self.status(deadline=deadline)

    def status(self, *, deadline: float) -> list[dict[str, Any]]:
        """Returns what every scheduler says about its side of the sync: rank, version, torn, paused, phase, …

        Raises:
            EngineError: a scheduler failed or died.
            DeadlineError: one did not answer in time.
        """
        return self._call("status", {}, deadline)

    def _call(self, name: str, arguments: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        try:
            return self._caller().call(name, arguments, deadline=deadline)
        except (EngineError, DeadlineError) as error:
            raise self._named(error) from error

    def _stamped(self, deadline: float) -> str:
        found: list[str] = []
        self._say(lambda control: found.append(control.stamped(deadline=deadline)))
        return found[0]

    def _say(self, what: Any) -> None:
        try:
            what(self._control())
        except (EngineError, DeadlineError) as error:
            raise self._named(error) from error

    def _named(self, error: EngineError | DeadlineError) -> EngineError | DeadlineError:
        told = f"replica {self.name!r}: {error}"
        if isinstance(error, StepError):
            return StepError(told, error.step)
        return DeadlineError(told) if isinstance(error, DeadlineError) else EngineError(told)


class SglangRayEngine(_SglangEngine):
    """A replica whose schedulers are reached directly, without HTTP.

    Args:
        target: one of
            the handle of an `SGLangServer` actor (`rdt_sglang.launch`);
            the handles of all SchedulerActors of an engine, with `control`;
            a `RayEngine` or a plain `Engine` object of this process (such a client cannot be pickled).
        name: see `_SglangEngine`.
        control: who pauses, stamps and resumes, where `target` is a list: the handle of an `SGLangServer`, or the URL of
            the engine's HTTP server.
        selector: see `_SglangEngine`.
        cache: see `_SglangEngine`.
        pause: see `_SglangEngine`.
        headers: sent with every request, where `control` is a URL.

    Raises:
        EngineError: a list without `control`, no handle at all, or see `_SglangEngine`.
    """

    def __init__(
        self,
        target: Any,
        *,
        name: str,
        control: Any = None,
        selector: Selector = "all",
        cache: CachePolicy = "reset",
        pause: PauseMode = "retract",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, selector=selector, cache=cache, pause=pause)
        self._reached: Caller
        self._controlled: Control
        if isinstance(target, list | tuple):
            self._reached = ActorCaller(target, "the engine")
            if control is None:
                raise EngineError(
                    f"replica {name!r}: scheduler actors neither pause nor stamp a version; say who does with control=, the "
                    "handle of an SGLangServer or the URL of the engine's HTTP server"
                )
            self._controlled = WebControl(Web(control, headers)) if isinstance(control, str) else ActorControl(control)
        elif control is not None:
            raise EngineError(f"replica {name!r}: control= belongs to a list of scheduler actors; {target!r} is none")
        elif hasattr(target, "tokenizer_manager"):
            self._controlled = EngineControl(target)
            self._reached = _caller_of(target)
        elif hasattr(target, "actors"):
            self._controlled = self._reached = ActorControl(target)
        else:
            raise EngineError(
                f"replica {name!r}: {target!r} is no handle of an SGLangServer, no list of scheduler actors and no engine"
            )
        whole = self._reached is self._controlled and hasattr(target, "receive_version")
        whole = whole and keeps_steps(self, SglangRayEngine)
        #: an `SGLangServer` takes a sync in one call; everything else is driven step by step
        self.receive: Receive | None = self._receive if whole else None
        self._in_one_call = False  # the sync that runs, or ran last
        self._is_resumed = False  # by the call that stamped it

    def _caller(self) -> Caller:
        return self._reached

    def _control(self) -> Control:
        return self._controlled

    def _ask(self, method: str, *args: Any, deadline: float, **kwargs: Any) -> Any:
        found: list[Any] = []
        self._say(lambda control: found.append(control.ask(method, *args, deadline=deadline, **kwargs)))
        return found[0]

    def _receive(self, version: int, *, deadline: float) -> Mapping[str, float]:
        # what the engine says now is kept where it runs, in case that no byte moves
        self._open, self._in_one_call, self._is_resumed, self._before = True, True, False, None
        seconds: Mapping[str, float] = self._ask(
            "receive_version", version, mode=self.pause_mode, reset_cache=self.cache == "reset",
            limit_s=remaining(deadline, PASSING_S), deadline=deadline,
        )  # fmt: skip
        return {step: seconds[step] for step in STEPS}

    def begin(self, version: int, *, deadline: float) -> None:
        """See `EngineClient.begin`."""
        self._in_one_call = False
        super().begin(version, deadline=deadline)

    def _restamp(self, expected: str, version: str, deadline: float) -> tuple[str, str]:
        if not self._in_one_call:
            return super()._restamp(expected, version, deadline)
        before, after = self._ask("stamp_and_resume", expected, version, deadline=deadline)
        self._is_resumed = before == expected and after == version
        return before, after

    def _restore(self, version: int, before: str | None, deadline: float) -> None:
        if self._in_one_call:
            self._ask("restore_version", version, deadline=deadline)
        else:
            super()._restore(version, before, deadline)

    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`."""
        self._is_resumed = False
        super().pause(deadline=deadline)

    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""
        resumed, self._is_resumed = self._is_resumed, False
        if not resumed:
            super().resume(deadline=deadline)


class SglangHttpEngine(_SglangEngine):
    """A replica of which only the URL is known: everything goes through its HTTP server.

    It works with stock `python -m sglang.launch_server`, with and without `--use-ray`, where rdt-sglang is installed.

    Args:
        url: of the server, e.g. `http://node7:30000`.
        name: see `_SglangEngine`; default: the URL's host and port.
        selector: see `_SglangEngine`.
        cache: see `_SglangEngine`.
        pause: see `_SglangEngine`.
        headers: sent with every request; for a server with `--admin-api-key`, `{"Authorization": "Bearer KEY"}`.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        selector: Selector = "all",
        cache: CachePolicy = "reset",
        pause: PauseMode = "retract",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._web = Web(url, headers)
        super().__init__(name or self._web.netloc, selector=selector, cache=cache, pause=pause)
        self.url = self._web.url

    def _caller(self) -> Caller:
        return _WebCaller(self._web)

    def _control(self) -> Control:
        return WebControl(self._web)


class _WebCaller:
    """Schedulers behind the routes that rdt's plugin adds to SGLang's HTTP server."""

    def __init__(self, web: Web) -> None:
        self._web = web

    def call(self, name: str, arguments: Mapping[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        _, checked = check_call(name, arguments)
        body = {"call": name, "arguments": checked, "timeout_s": remaining(deadline, PASSING_S)}
        try:
            answer = self._web.post(WEIGHTS_ROUTE, body, deadline=deadline)
        except StatusError as error:
            raise _explained(error, self._web) from error
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise EngineError(f"{self._web.url}/{WEIGHTS_ROUTE} answered no results: {str(answer)[:200]}")
        return results


def _explained(error: StatusError, web: Web) -> EngineError | DeadlineError:
    if error.status in (404, 405):
        return EngineError(
            f"{web.url} has no route {WEIGHTS_ROUTE}: rdt-sglang is not installed in the server's environment, SGLANG_PLUGINS "
            "leaves out its plugin rdt, or it runs with several tokenizer workers"
        )
    if error.status in (401, 403):
        return EngineError(
            f"{error}; give the client the server's admin key, headers={{'Authorization': 'Bearer KEY'}}"
        )
    try:
        told = error_from_wire(msgspec.json.decode(error.body).get("error"))
    except (msgspec.DecodeError, AttributeError):
        return error
    return type(told)(str(told)) if isinstance(told, EngineError | DeadlineError) else EngineError(str(told))


def _caller_of(engine: Any) -> Caller:
    actors: Sequence[Any] = getattr(engine._scheduler_init_result, "scheduler_actors", ())
    return ActorCaller(actors, "the engine") if actors else RpcCaller(engine.send_to_rpc, "the engine")
