"""The clients' order of calls and what they refuse, against a server that records. Real ones: test_routes, test_server."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rdt_core.engines import STEPS, ConnectInfo, EngineClient
from rdt_core.errors import DeadlineError, EngineError, StepError
from rdt_sglang import SglangHttpEngine, SglangRayEngine

pytestmark = pytest.mark.unit

INFO = ConnectInfo(
    group="g", replica="r", namespace="rdt", address="head:1", kinds=("mapped", "prepared"), timeout_s=30.0
)


class Recorder:
    """Answers as SGLang does, and remembers what was asked. `answers` overrides by path: (status, body)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.version = "default"
        self.delay_s = 0.0
        self.settings = {"tp_size": 2, "pp_size": 1, "dp_size": 1, "tokenizer_worker_num": 1}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: Any) -> None:
                status, told = recorder.reply(self.path.strip("/"), body, dict(self.headers))
                raw = (told if isinstance(told, str) else json.dumps(told)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        serve = {"poll_interval": 0.02}  # what a test's end waits for
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.headers: dict[str, str] = {}

    def reply(self, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        self.headers = headers
        name = f"{path}:{body['call']}" if path == "rdt/weights" else path
        self.asked.append((name, body))
        time.sleep(self.delay_s)
        if name in self.answers:
            return self.answers[name]
        if path == "server_info":
            return 200, self.settings
        if path == "update_weight_version":
            self.version = body["new_version"]
        if path == "model_info":
            return 200, {"weight_version": self.version}
        if path == "flush_cache":
            return 200, "Cache flushed.\n"
        if path == "rdt/weights":
            return 200, {"results": [{"rank": rank} for rank in range(2)]}
        return 200, {"status": "ok"}

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.asked]

    def body(self, name: str) -> Any:
        return dict(self.asked)[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def server() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


def sync(client: Any, version: int = 7) -> None:
    client.pause(deadline=soon())
    client.begin(version, deadline=soon())
    client.pull(version, deadline=soon())
    client.finish(version, deadline=soon())
    client.commit(version, deadline=soon())
    client.resume(deadline=soon())


def test_a_whole_sync_in_order(server):
    client = SglangHttpEngine(server.url, name="a", selector="target", headers={"Authorization": "Bearer k"})
    assert isinstance(client, EngineClient)
    assert client.version(deadline=soon()) is None
    client.connect(INFO, deadline=soon())
    prepared = server.body("rdt/weights:prepare")["arguments"]["info"]
    assert prepared["selector"] == "target"
    assert prepared["group"] == "g"
    assert prepared["kinds"] == ["mapped", "prepared"]
    server.asked.clear()
    sync(client)
    assert server.order == [
        "pause_generation", "model_info", "rdt/weights:begin", "update_weight_version", "rdt/weights:pull",
        "rdt/weights:finish", "flush_cache", "model_info", "update_weight_version", "model_info", "continue_generation",
    ]  # fmt: skip
    stamps = [body["new_version"] for name, body in server.asked if name == "update_weight_version"]
    assert stamps == ["receiving 7", "7"], "it claims no version that it does not hold"
    assert server.body("pause_generation") == {"mode": "retract"}
    assert server.body("update_weight_version") == {"new_version": "7", "abort_all_requests": False}
    begun = server.body("rdt/weights:begin")
    assert begun["arguments"]["timeout_s"] < begun["timeout_s"] < 10
    assert client.version(deadline=soon()) == 7
    assert server.headers["Authorization"] == "Bearer k"


def test_a_kept_cache_is_not_dropped(server):
    sync(SglangHttpEngine(server.url, pause="in_place", cache="keep"))
    assert "flush_cache" not in server.order
    assert server.body("pause_generation") == {"mode": "in_place"}


def test_a_cache_that_is_not_dropped_leaves_the_version_as_it_was(server):
    server.answers["flush_cache"] = (400, "Flush cache failed.\n")
    with pytest.raises(EngineError, match=r"Flush cache failed.*pause='retract', or cache='keep'"):
        sync(SglangHttpEngine(server.url))
    assert server.version == "receiving 7"
    assert "continue_generation" not in server.order


def test_a_version_that_is_not_reported_back_is_an_error(server):
    server.answers["model_info"] = (200, {"weight_version": "receiving 7"})
    with pytest.raises(EngineError, match="given version 7 and says that it serves 'receiving 7'"):
        sync(SglangHttpEngine(server.url))
    assert "continue_generation" not in server.order


@pytest.mark.parametrize("stamp", ["default", "3", "receiving 8"])
def test_an_engine_that_is_another_one_by_now_is_not_stamped(server, stamp):
    client = SglangHttpEngine(server.url)
    client.begin(7, deadline=soon())
    client.pull(7, deadline=soon())
    client.finish(7, deadline=soon())
    server.version = stamp
    with pytest.raises(EngineError, match=f"says '{stamp}' instead of receiving it"):
        client.commit(7, deadline=soon())
    assert server.version == stamp
    client.abort(7, "it was started again", deadline=soon())
    assert server.version == stamp


def test_an_engine_that_was_started_again_is_not_given_its_old_stamp(server):
    client = SglangHttpEngine(server.url)
    sync(client, 1)
    server.version = "default"
    server.answers["rdt/weights:begin"] = (500, {"error": {"type": "EngineError", "message": "it is not connected"}})
    with pytest.raises(EngineError, match="not connected"):
        client.begin(2, deadline=soon())
    client.abort(2, "it is not connected", deadline=soon())
    assert server.version == "default"


def test_every_rank_must_be_reached(server):
    server.settings["tp_size"] = 4
    with pytest.raises(EngineError, match=r"has 4 schedulers, and ranks \[0, 1\] answered"):
        SglangHttpEngine(server.url).connect(INFO, deadline=soon())


@pytest.mark.parametrize(("setting", "told"), [("tokenizer_worker_num", "tokenizer workers"), ("dp_size", "replica")])
def test_engines_that_are_not_one_are_refused(server, setting, told):
    server.settings[setting] = 2
    with pytest.raises(EngineError, match=told):
        SglangHttpEngine(server.url).connect(INFO, deadline=soon())
    assert server.order == ["server_info"]


def test_an_abort_is_told_only_where_something_began(server):
    client = SglangHttpEngine(server.url)
    client.abort(7, "why", deadline=soon())
    assert server.order == []
    client.begin(7, deadline=soon())
    client.abort(7, "why", deadline=soon())
    client.abort(7, "why", deadline=soon())
    assert server.order == [
        "model_info", "rdt/weights:begin", "update_weight_version", "rdt/weights:abort", "rdt/weights:status",
        "model_info", "update_weight_version",
    ]  # fmt: skip
    assert server.version == "default", "nothing was pulled: it holds what it held before"
    assert server.body("rdt/weights:abort")["arguments"] == {"version": 7, "reason": "version 7: why"}


def test_an_abort_after_finish_reaches_the_schedulers_and_one_after_commit_does_not(server):
    client = SglangHttpEngine(server.url)
    client.begin(7, deadline=soon())
    client.pull(7, deadline=soon())
    client.finish(7, deadline=soon())
    assert client.version(deadline=soon()) is None
    client.abort(7, "another replica failed", deadline=soon())
    assert "rdt/weights:abort" in server.order
    assert client.version(deadline=soon()) is None
    sync(client, 8)
    server.asked.clear()
    client.abort(8, "too late", deadline=soon())
    assert server.order == []
    assert client.version(deadline=soon()) == 8


def test_only_a_torn_replica_is_let_answer_after_an_abort(server):
    # SGLang's tokenizer would hold new requests, which torn schedulers refuse; whole ones would generate
    client = SglangHttpEngine(server.url)
    torn = [{"rank": 0, "torn": None}, {"rank": 1, "torn": "half of version 7"}]
    server.answers["rdt/weights:status"] = (200, {"results": torn})
    client.begin(7, deadline=soon())
    client.abort(7, "why", deadline=soon())
    assert server.order[-2:] == ["rdt/weights:status", "continue_generation"]


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        ((404, "nothing here"), EngineError, "has no route rdt/weights: rdt-sglang is not installed"),
        ((401, '{"error":"Unauthorized"}'), EngineError, "Authorization"),
        ((500, {"error": {"type": "EngineError", "message": "scheduler 1: no"}}), EngineError, "scheduler 1: no"),
        (
            (504, {"error": {"type": "DeadlineError", "message": "scheduler 1: late"}}),
            DeadlineError,
            "scheduler 1: late",
        ),
        ((400, {"error": {"type": "WireError", "message": "odd"}}), EngineError, "odd"),
        ((500, "Internal Server Error"), EngineError, "status 500: Internal"),
        ((200, "hm"), EngineError, "answered no results"),
    ],
)
def test_what_a_failed_call_says(server, answer, kind, told):
    server.answers["rdt/weights:pull"] = answer
    with pytest.raises(kind, match=told) as raised:
        SglangHttpEngine(server.url, name="a").pull(7, deadline=soon())
    assert type(raised.value) is kind
    assert str(raised.value).startswith("replica 'a': ")


def test_a_silent_server_costs_no_more_than_the_deadline(server):
    server.delay_s = 3.0
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"pause_generation was not answered within 0\.\d s"):
        SglangHttpEngine(server.url).pause(deadline=soon(0.5))
    assert time.monotonic() - began < 2
    with pytest.raises(DeadlineError, match="was not sent"):
        SglangHttpEngine(server.url).pause(deadline=time.monotonic() - 1)


def test_no_server(server):
    server.close()
    with pytest.raises(EngineError, match="no answer"):
        SglangHttpEngine(server.url).health(deadline=soon())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pause": "in_place"}, "cache='keep'"),
        ({"pause": "abort"}, "choose one of retract, in_place"),
        ({"cache": "drop"}, "choose one of reset, keep"),
        ({"selector": "both"}, "choose one of target, draft, all"),
    ],
)
def test_choices_that_cannot_work(options, told):
    with pytest.raises(EngineError, match=told):
        SglangHttpEngine("http://host:1", **options)


def test_targets_that_cannot_work():
    with pytest.raises(EngineError, match="no URL"):
        SglangHttpEngine("host:1")
    with pytest.raises(EngineError, match="needs a name"):
        SglangRayEngine([object()], name="", control="http://host:1")
    with pytest.raises(EngineError, match="say who does with control="):
        SglangRayEngine([object()], name="a")
    with pytest.raises(EngineError, match="no scheduler actors"):
        SglangRayEngine([], name="a", control="http://host:1")
    with pytest.raises(EngineError, match="belongs to a list"):
        SglangRayEngine(object(), name="a", control="http://host:1")
    with pytest.raises(EngineError, match="no handle of an SGLangServer"):
        SglangRayEngine(object(), name="a")


def test_a_client_travels_to_another_process(server):
    client = pickle.loads(pickle.dumps(SglangHttpEngine(server.url, pause="in_place", cache="keep")))
    sync(client)
    assert client.version(deadline=soon()) == 7


class Server:
    """Stands for the handle of an `SGLangServer`, for what a client makes of its answers; real ones: test_server.

    Attributes:
        failing: the step at which a sync fails, if any.
        torn: what the schedulers say after an abort.
        said: the engine's stamp.
    """

    def __init__(self, *, failing: str = "", torn: str | None = None, said: str = "6") -> None:
        self.failing, self.torn, self.said = failing, torn, said
        self.asked: list[str] = []
        self.options: dict[str, Any] = {}

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or method == "tokenizer_manager":
            raise AttributeError(method)
        return Remote(self, method)

    def answer(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.asked.append(f"weights:{args[0]}" if method == "weights" else method)
        if method == "receive_version":
            self.options = options
            self.said = f"receiving {args[0]}"
            if self.failing:
                raise StepError("it broke", self.failing)
            return dict.fromkeys(STEPS, 0.5)
        if method == "stamp_and_resume":
            before, self.said = self.said, args[1] if self.said == args[0] else self.said
            return before, self.said
        if method == "update_weight_version":
            self.said = args[0]
        if method == "flush_cache":
            return True, ""
        if method == "weights":
            return [{"rank": 0, "torn": self.torn}]
        return self.said if method == "get_weight_version" else None


class Remote:
    def __init__(self, server: Server, method: str) -> None:
        self.server, self.method = server, method

    def remote(self, *args: Any, **options: Any) -> Any:
        return self.server, self.method, args, options


@pytest.fixture
def ray_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of `Server` without a cluster."""
    import ray

    def get(ref: Any, timeout: float) -> Any:
        server, method, args, options = ref
        try:
            return server.answer(method, args, options)
        except EngineError as cause:
            raise ray.exceptions.RayTaskError(method, "", cause) from cause

    monkeypatch.setattr(ray, "get", get)


def received(server: Any, version: int = 7, **options: Any) -> SglangRayEngine:
    client = SglangRayEngine(server, name="a", **options)
    assert client.receive is not None
    assert client.receive(version, deadline=soon()) == dict.fromkeys(STEPS, 0.5)
    return client


def test_a_server_of_ours_takes_a_sync_in_one_call(ray_get):
    server = Server()
    client = received(server)
    assert {**server.options, "limit_s": None} == {"mode": "retract", "reset_cache": True, "limit_s": None}
    assert 8 < server.options["limit_s"] < 9.5, "its own error comes first"
    client.commit(7, deadline=soon())
    client.resume(deadline=soon())
    assert server.asked == ["receive_version", "stamp_and_resume"]
    assert client.version(deadline=soon()) == 7
    server.asked.clear()
    client.abort(7, "too late", deadline=soon())
    assert server.asked == []
    client = received(server, 8)
    client.commit(8, deadline=soon())
    server.asked.clear()
    client.pause(deadline=soon())  # whatever resumed it is over
    client.resume(deadline=soon())
    assert server.asked == ["pause_generation", "continue_generation"]


def test_the_policies_travel_with_the_call(ray_get):
    server = Server()
    received(server, pause="in_place", cache="keep")
    assert (server.options["mode"], server.options["reset_cache"]) == ("in_place", False)


@pytest.mark.parametrize("said", ["default", "3", "7"])
def test_one_call_is_stamped_only_if_it_is_the_engine_that_received(ray_get, said):
    server = Server()
    client = received(server)
    server.said = said
    with pytest.raises(EngineError, match=f"says '{said}' instead of receiving it"):
        client.commit(7, deadline=soon())
    assert server.said == said
    server.asked.clear()
    client.resume(deadline=soon())
    assert server.asked == ["continue_generation"], "what did not stamp it did not resume it either"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("torn", "then"), [(None, "restore_version"), ("half of it", "continue_generation")])
def test_an_abort_after_one_call_says_who_stamps_what(ray_get, step, torn, then):
    server = Server(failing=step, torn=torn)
    client = SglangRayEngine(server, name="a")
    assert client.receive is not None
    with pytest.raises(StepError, match=r"^replica 'a': receive_version of the server actor: it broke$") as caught:
        client.receive(7, deadline=soon())
    assert caught.value.step == step
    assert pickle.loads(pickle.dumps(caught.value)).step == step
    server.asked.clear()
    client.abort(7, "why", deadline=soon())
    # the stamp of the engine that took the call is known there; the client may know that of one before it
    assert server.asked == ["weights:abort", "weights:status", then]
    client.abort(7, "why", deadline=soon())
    assert len(server.asked) == 3


def test_a_server_of_ours_can_be_driven_step_by_step(ray_get):
    server = Server()
    client = received(server)
    client.commit(7, deadline=soon())
    client.resume(deadline=soon())
    server.asked.clear()
    sync(client, 8)
    assert server.asked == [
        "pause_generation", "weights:begin", "update_weight_version", "weights:pull", "weights:finish", "flush_cache",
        "get_weight_version", "update_weight_version", "get_weight_version", "continue_generation",
    ]  # fmt: skip
    client.begin(9, deadline=soon())
    client.abort(9, "why", deadline=soon())
    assert server.said == "8", "nothing was pulled: it holds what it held before"
    assert "restore_version" not in server.asked


def test_what_is_no_server_of_ours_is_driven_step_by_step():
    assert getattr(SglangHttpEngine("http://host:1"), "receive", None) is None
    assert SglangRayEngine([object()], name="a", control=Server()).receive is None


def test_a_client_that_takes_one_call_travels_to_another_process():
    client = pickle.loads(pickle.dumps(SglangRayEngine(Handle(), name="a")))
    assert client.receive.__self__ is client


class Handle:
    """What there is to see of a handle that is not called."""

    actors = receive_version = None
