"""The clients' own logic against a small HTTP server that answers what a test tells it; whole syncs: test_sync.py."""

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
from rdt_vllm import VllmHttpEngine, VllmRayEngine
from rdt_vllm.protocol import ABORTED, AT_STEP, LEFT_OPEN

pytestmark = pytest.mark.unit

INFO = ConnectInfo(group="g", replica="r", namespace="rdt", address="head:1", kinds=("mapped",), timeout_s=9.0)


class Server:
    """Answers by path; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.delay = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                path = self.path.lstrip("/")
                outer.asked.append((self.command, path, body))
                time.sleep(outer.delay)
                queue = outer.answers.get(path.partition("?")[0], [])
                status, answer = queue.pop(0) if queue else (200, {})
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except BrokenPipeError:
                    pass

            do_GET = do_POST = respond

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def failed(message: str) -> tuple[int, Any]:
    return 500, {"error": {"message": message}}


def test_a_sync_is_vllms_own_calls_in_order(server):
    client = VllmHttpEngine(server.url + "/", name="r")
    assert isinstance(client, EngineClient)
    versions = ("default", "default", "receiving 7", "7")
    server.answers["weight_info"] = [(200, {"weight_version": one}) for one in versions]
    assert client.version(deadline=soon()) is None
    client.connect(INFO, deadline=soon())
    client.pause(deadline=soon())
    client.begin(7, deadline=soon())
    client.pull(7, deadline=soon(20))
    client.finish(7, deadline=soon())
    client.commit(7, deadline=soon())
    client.resume(deadline=soon())
    client.health(deadline=soon())
    assert server.paths() == [
        "weight_info", "init_weight_transfer_engine", "pause?mode=keep&clear_cache=true", "weight_info",
        "start_weight_update", "update_weight_version", "update_weights", "finish_weight_update", "weight_info",
        "update_weight_version", "weight_info", "resume", "health",
    ]  # fmt: skip
    bodies = {path: body for _, path, body in server.asked}
    init = bodies["init_weight_transfer_engine"]["init_info"]
    assert init["kinds"] == ["mapped"]
    assert init["address"] == "head:1"
    update = bodies["update_weights"]["update_info"]
    assert update["version"] == 7
    assert 10 < update["timeout_s"] < 20  # the engine's deadline comes before the caller's
    stamps = [body["new_version"] for _, path, body in server.asked if path == "update_weight_version"]
    assert stamps == ["receiving 7", "7"], "it claims no version that it does not hold"


@pytest.mark.parametrize(("cache", "query"), [("reset", "clear_cache=true"), ("keep", "clear_cache=false")])
def test_the_cache_policy_is_explicit(server, cache, query):
    VllmHttpEngine(server.url, cache=cache, pause="wait").pause(deadline=soon())
    assert server.paths() == [f"pause?mode=wait&{query}"]


def test_a_version_that_is_not_reported_back_is_an_error(server):
    client = VllmHttpEngine(server.url, name="r")
    server.answers["weight_info"] = [(200, {"weight_version": one}) for one in ("6", "receiving 7", "receiving 7")]
    client.begin(7, deadline=soon())
    with pytest.raises(EngineError, match="given version 7 and says that it serves receiving 7"):
        client.commit(7, deadline=soon())


def test_a_server_without_the_routes_says_what_to_start_it_with(server):
    server.answers["pause"] = [(404, {"detail": "Not Found"})]
    with pytest.raises(EngineError, match=r"VLLM_SERVER_DEV_MODE=1.*weight-transfer-config"):
        VllmHttpEngine(server.url).pause(deadline=soon())


def test_errors_carry_the_servers_words_and_deadlines_hold(server):
    client = VllmHttpEngine(server.url, name="r")
    server.answers["update_weights"] = [failed("rank 1: CoverageError: nobody holds x")]
    with pytest.raises(EngineError, match=r"status 500.*nobody holds x"):
        client.pull(1, deadline=soon())
    server.answers["resume"] = [(200, b"<html>")]
    with pytest.raises(EngineError, match="no JSON"):
        client.resume(deadline=soon())
    server.delay = 2.0
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="not answered within"):
        client.health(deadline=soon(0.3))
    assert time.monotonic() - began < 1.5
    with pytest.raises(DeadlineError, match="deadline has passed"):
        client.health(deadline=time.monotonic() - 1)


def test_a_server_that_is_not_there():
    with pytest.raises(EngineError, match="no answer"):
        VllmHttpEngine("http://127.0.0.1:9").health(deadline=soon())


def test_abort_does_what_the_failed_call_left_to_do(server):
    client = VllmHttpEngine(server.url, name="r")
    client.abort(1, "nothing began", deadline=soon())
    assert server.paths() == []

    ended = {
        "update_weights": [failed(f"{ABORTED}: because")],
        "finish_weight_update": [failed("finish_weight_update called without a matching start_weight_update.")],
    }
    server.answers["weight_info"] = [(200, {"weight_version": "6"})]
    client.begin(1, deadline=soon())
    server.asked.clear()
    server.answers = {name: list(answers) for name, answers in ended.items()}
    server.answers["weight_info"] = [(200, {"weight_version": "receiving 1"})]
    client.abort(1, "because", deadline=soon())
    assert server.paths() == ["update_weights", "finish_weight_update", "weight_info", "update_weight_version"]
    assert server.asked[0][2]["update_info"] == {"abort": "version 1: because", "version": -1}
    assert server.asked[1][2] == {}
    assert server.asked[3][2] == {"new_version": "6"}, "nothing was pulled: it holds what it held before"
    client.abort(1, "again", deadline=soon())
    assert len(server.asked) == 4

    server.answers["weight_info"] = [(200, {"weight_version": "6"})]

    client.begin(2, deadline=soon())
    client.pull(2, deadline=soon())
    server.answers = {"finish_weight_update": [failed("no version was pulled")]}
    with pytest.raises(EngineError, match="no version was pulled"):
        client.finish(2, deadline=soon())
    server.asked.clear()
    server.answers = {
        **{name: list(answers) for name, answers in ended.items()},
        "start_weight_update": [failed("already active")],
    }
    client.abort(2, "because", deadline=soon())
    assert server.paths() == ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.parametrize("stamp", ["default", "3", "receiving 8"])
def test_an_engine_that_is_another_one_by_now_is_not_stamped(server, stamp):
    client = VllmHttpEngine(server.url, name="r")
    server.answers["weight_info"] = [(200, {"weight_version": one}) for one in ("6", stamp, stamp)]
    client.begin(7, deadline=soon())
    client.pull(7, deadline=soon())
    client.finish(7, deadline=soon())
    server.asked.clear()
    with pytest.raises(EngineError, match=f"says '{stamp}' instead of receiving it"):
        client.commit(7, deadline=soon())
    client.abort(7, "it was started again", deadline=soon())
    assert "update_weight_version" not in server.paths()


def test_an_abort_after_finish_reaches_the_workers(server):
    client = VllmHttpEngine(server.url, name="r")
    server.answers["weight_info"] = [(200, {"weight_version": "6"})]
    client.begin(7, deadline=soon())
    client.pull(7, deadline=soon())
    client.finish(7, deadline=soon())
    server.asked.clear()
    server.answers = {
        "update_weights": [failed(f"{ABORTED}: because")],
        "finish_weight_update": [failed("finish_weight_update called without a matching start_weight_update.")],
    }
    client.abort(7, "another replica failed", deadline=soon())
    assert server.paths() == ["start_weight_update", "update_weights", "finish_weight_update"]
    assert server.asked[1][2]["update_info"] == {"version": 7, "abort": "version 7: another replica failed"}


def test_a_client_that_only_looks_ends_no_sync(server):
    client = VllmHttpEngine(server.url, name="r", end_open_syncs=False)
    server.answers["init_weight_transfer_engine"] = [failed(f"{LEFT_OPEN}:all an earlier weight update never ended")]
    with pytest.raises(EngineError, match="in the middle of a sync of another driver"):
        client.connect(INFO, deadline=soon())
    assert server.paths() == ["init_weight_transfer_engine"]


def test_an_abort_that_the_engine_does_not_understand_is_an_error(server):
    client = VllmHttpEngine(server.url, name="r")
    server.answers["weight_info"] = [(200, {"weight_version": "6"})]
    client.begin(1, deadline=soon())
    server.answers = {"update_weights": [failed("EngineCore died")]}
    with pytest.raises(EngineError, match=r"did not end its sync: update: .*EngineCore died"):
        client.abort(1, "because", deadline=soon())


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("all", ["update_weights", "finish_weight_update"]),
        ("others", ["update_weights", "finish_weight_update"]),
        ("last", ["start_weight_update", "update_weights", "finish_weight_update"]),
    ],
)
def test_a_sync_that_another_driver_left_open_is_ended_first(server, where, calls):
    server.answers = {
        "init_weight_transfer_engine": [failed(f"{LEFT_OPEN}:{where} an earlier weight update never ended")],
        "update_weights": [failed(ABORTED)],
    }
    VllmHttpEngine(server.url, name="r").connect(INFO, deadline=soon())
    assert server.paths() == ["init_weight_transfer_engine", *calls, "init_weight_transfer_engine"]


def test_wrong_arguments_are_refused():
    for url in ("localhost:8000", "ftp://host", "http://"):
        with pytest.raises(EngineError, match="no URL"):
            VllmHttpEngine(url)
    with pytest.raises(EngineError, match="cache='drop'"):
        VllmHttpEngine("http://host", cache="drop")
    with pytest.raises(EngineError, match="needs a name"):
        VllmRayEngine(["handle"], name="")
    with pytest.raises(EngineError, match="no actors"):
        VllmRayEngine([], name="r")


def test_clients_travel_to_the_trainer():
    client = pickle.loads(pickle.dumps(VllmHttpEngine("http://host:1", cache="keep")))
    assert (client.name, client.cache, client.url) == ("host:1", "keep", "http://host:1")


class Handle:
    """An actor handle whose methods answer at once through Ray, for the one call that takes a whole sync."""

    def __init__(self, failing: str = "", said: str = "receiving 7") -> None:
        self.failing = failing
        self.said = said
        self.asked: list[str] = []
        self.taken_back = True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Remote(self, method)


class Remote:
    def __init__(self, handle: Handle, method: str) -> None:
        self.handle, self.method = handle, method

    def remote(self, *args: Any, **_: Any) -> Any:
        self.handle.asked.append(self.method)
        return self.handle, self.method, args


@pytest.fixture
def answers(monkeypatch):
    """Answers of handles, without a cluster: what a client makes of them is the subject."""
    import ray

    def get(ref: Any, timeout: float) -> Any:
        handle, method, args = ref
        if method == "receive_version":
            if handle.failing:
                cause = EngineError(f"{AT_STEP}{handle.failing}; it broke")
                raise ray.exceptions.RayTaskError("receive_version", "", cause)
            return dict.fromkeys(STEPS, 0.5)
        if method == "take_back":
            return handle.taken_back
        if method == "stamp_and_resume":
            before, handle.said = handle.said, args[1] if handle.said == args[0] else handle.said
            return before, handle.said
        return "6" if method == "get_weight_version" else None

    monkeypatch.setattr(ray, "get", get)


def test_a_server_of_ours_takes_a_sync_in_one_call(answers):
    handle = Handle()
    client = VllmRayEngine(handle, name="r")
    assert client.receive is not None
    assert client.receive(7, deadline=soon()) == dict.fromkeys(STEPS, 0.5)
    client.commit(7, deadline=soon())
    client.resume(deadline=soon())
    assert handle.asked == ["get_weight_version", "receive_version", "stamp_and_resume"]
    assert handle.said == "7"
    client.pause(deadline=soon())
    client.resume(deadline=soon())
    assert handle.asked[3:] == ["pause_generation", "resume_generation"]


def test_a_server_of_ours_pauses_ahead_once_its_stamp_is_known(answers):
    handle = Handle()
    client = VllmRayEngine(handle, name="r")
    assert client.receive is not None
    assert client.ahead is not None
    assert not client.ahead.send()
    client.receive(7, deadline=soon())
    assert not client.ahead.send(), "7 is not committed"
    client.commit(7, deadline=soon())
    client.resume(deadline=soon())
    for done in (True, False):
        handle.asked.clear()
        handle.taken_back = done
        assert client.ahead.send()
        assert client.ahead.take_back(deadline=soon()) is done
        assert handle.asked == ["pause_ahead", "take_back"]
    handle.asked.clear()
    assert not client.ahead.send(), "who has it now may stamp it"
    client.receive(8, deadline=soon())
    assert handle.asked == ["get_weight_version", "receive_version"]


def test_one_call_is_stamped_only_if_it_is_the_engine_that_received(answers):
    client = VllmRayEngine(Handle(said="3"), name="r")
    assert client.receive is not None
    client.receive(7, deadline=soon())
    with pytest.raises(EngineError, match="says '3' instead of receiving it"):
        client.commit(7, deadline=soon())


def test_an_engine_that_was_not_stamped_by_this_call_is_resumed_by_its_own(answers):
    handle = Handle(said="7")  # the version was there already: another one received it
    client = VllmRayEngine(handle, name="r")
    assert client.receive is not None
    client.receive(7, deadline=soon())
    with pytest.raises(EngineError, match="says '7' instead of receiving it"):
        client.commit(7, deadline=soon())
    handle.asked.clear()
    client.resume(deadline=soon())
    assert handle.asked == ["resume_generation"]


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        ("pause", ["update_weights", "finish_weight_update", "get_weight_version"]),
        ("begin", ["update_weights", "finish_weight_update", "get_weight_version"]),
        ("pull", ["update_weight_version", "start_weight_update", "update_weights", "finish_weight_update"]),
        ("finish", ["update_weight_version", "start_weight_update", "update_weights", "finish_weight_update"]),
    ],
)
def test_an_abort_does_what_the_failed_step_of_one_call_left_to_do(answers, step, calls):
    handle = Handle(failing=step)
    client = VllmRayEngine(handle, name="r")
    assert client.receive is not None
    with pytest.raises(StepError, match=r"^replica 'r': it broke") as caught:
        client.receive(7, deadline=soon())
    assert caught.value.step == step
    assert pickle.loads(pickle.dumps(caught.value)).step == step
    handle.asked.clear()
    client.abort(7, "because", deadline=soon())
    assert handle.asked == calls


def test_several_actors_are_driven_step_by_step():
    assert VllmRayEngine([Handle(), Handle()], name="r").receive is None
    assert VllmRayEngine([Handle(), Handle()], name="r").ahead is None
    assert VllmRayEngine(Handle(), name="r", pause="abort").ahead is None, (
        "requests would end for a sync that may not begin"
    )
    assert VllmRayEngine(Handle(), name="r", pause="wait").receive is None
