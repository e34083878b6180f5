"""Controls: what a caller gets from a coordinator in a thread, and from the real actor in a real Ray cluster."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rdt_core import errors, wire
from rdt_core.control import Control, LocalControl, RayControl
from rdt_core.coordinator import Coordinator
from rdt_core.errors import CoverageError, DeadlineError, MembershipError, RdtError, SyncError, VersionError, WireError
from rdt_core.rendezvous import ensure_ray, open_coordinator
from rdt_testbed.cluster import Cluster
from rdt_testbed.group import GROUP, TENSORS, engine, offer, source, token
from rdt_testbed.members import Reader, Trainer

#: contradicts what `source` declares
OTHER = (wire.TensorMeta(name=TENSORS[1].name, shape=(5,), dtype="int8"),)

WATCHDOG_S = 60.0


@pytest.mark.unit
def test_what_no_message_carries_is_refused_before_it_is_sent():
    control = RayControl(GROUP, handle=None)
    control._handle = object()  # never called
    with pytest.raises(WireError, match=r"a call of commit cannot be sent to the coordinator: .*object"):
        control._post("commit", (1, 0, object()))
    with pytest.raises(WireError, match="a call of enter cannot be sent to the coordinator"):
        control._post("enter", ("a/0", "first", 1 << 64, 1.0))


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Runs the tasks in threads and returns their results; a hang is an error after `WATCHDOG_S` seconds."""
    pool = ThreadPoolExecutor(max_workers=len(tasks))
    futures = [pool.submit(task) for task in tasks]
    try:
        return [future.result(WATCHDOG_S) for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def local() -> Iterator[LocalControl]:
    control = LocalControl(Coordinator(GROUP, 2, 600.0))
    yield control
    control.close()


# --- in a thread


@pytest.mark.unit
def test_syncs_with_threads_as_members(local: LocalControl) -> None:
    trainers = [Trainer(local, rank, 2) for rank in range(2)]
    reader = Reader(local, "a")
    for version in (1, 2, 3):
        first, second = together(
            lambda version=version: trainers[0].publish(version, ["a"], reader.pull),
            lambda version=version: trainers[1].publish(version, [], None),
        )
        assert first == second
        assert (first.version, first.seconds, first.phases) == (version, 0.5, {"pull": 0.25})
    local.settled(1)
    assert local.current() == (3, None)
    status = local.status()
    assert (status.version, status.replicas[0].state, status.replicas[0].version) == (3, "serving", 3)


@pytest.mark.unit
def test_errors_keep_their_class_and_text(local: LocalControl) -> None:
    local.join(source(0, 2), token(0))
    with pytest.raises(MembershipError, match="two joins under one rank"):
        local.join(source(0, 2), "stranger")
    with pytest.raises(CoverageError, match="declares checkpoint tensor"):
        local.join(source(1, 2, tensors=OTHER), token(1))
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s .* no answer from source rank 1"):
        local.sources(0.05)
    with pytest.raises(SyncError, match="stale: sync 4"):
        local.published(0, 4, 0, None, 1)
    with pytest.raises(WireError, match="outside its world"):
        local.join(source(5, 2), token(5))


@pytest.mark.unit
def test_every_method_of_the_coordinator_has_its_synchronous_twin(local: LocalControl) -> None:
    methods = {name for name, kind in vars(Coordinator).items() if callable(kind) and not name.startswith("_")}
    assert methods <= {name for name in dir(Control) if not name.startswith("_")}
    for rank in range(2):
        local.join(source(rank, 2), token(rank))
    local.connect(engine("a", 0, 1))
    assert [one.rank for one in local.replica_ready("a", 1)] == [0]
    (sync, asked, _), (same, *_) = together(
        lambda: local.begin(0, token(0), 1, ("a",), 5), lambda: local.begin(1, token(1), 1, None, 5)
    )
    assert sync == same
    local.offer(0, sync, [offer(asked[0], refs=1)], [["a reference"]])
    assert local.status().replicas[0].readers[0].offered == 1
    assert local.fail(sync, "engine rank a/0", "pull", "broke") == "version 1: engine rank a/0 failed in pull: broke"
    with pytest.raises(SyncError, match="broke"):
        local.outcome(sync, 1, 5)
    local.settled(1)
    local.disconnect("a/0", "first")
    local.detach("a")
    local.leave(1, token(1))
    assert local.status().missing == (1,)


@pytest.mark.unit
def test_a_call_that_the_coordinator_does_not_answer_has_a_deadline_of_its_own() -> None:
    control = LocalControl(Coordinator(GROUP, 1, 600.0), call_timeout_s=0.1)
    held = threading.Event()
    control._loop.call_soon_threadsafe(held.wait, 5)
    with pytest.raises(DeadlineError, match=r"group 'policy' did not answer current within 0\.1 s"):
        control.current()
    held.set()
    control.call_timeout_s = 5
    assert control.current() == (None, None)
    control.close()


@pytest.mark.unit
def test_a_closed_control_refuses_and_releases_who_waits() -> None:
    control = LocalControl(Coordinator(GROUP, 1, 600.0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(control.sources, 30)
        while control._coordinator._members.joined.waiting == 0:
            time.sleep(0.01)
        control.close()
        with pytest.raises(SyncError, match="closed while sources was waiting"):
            waiting.result(5)
    control.close()
    with pytest.raises(SyncError, match="is closed"):
        control.current()
    assert not control._thread.is_alive()


@pytest.mark.unit
@pytest.mark.parametrize(
    "kind", [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, RdtError)]
)
def test_errors_travel_between_processes(kind: type[RdtError]) -> None:
    more = {"step": "finish"} if kind is errors.StepError else {}
    found = pickle.loads(pickle.dumps(kind("what was found", **more)))
    assert type(found) is kind
    assert str(found) == "what was found"
    assert vars(found) == more


@pytest.mark.unit
def test_without_a_cluster_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(MembershipError, match="knows no cluster: pass address= or set RAY_ADDRESS"):
        ensure_ray()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(MembershipError, match=f"no Ray cluster answers at '{address}'"):
        ensure_ray(address)
    assert time.monotonic() - began < WATCHDOG_S  # Ray would try for many minutes
    with pytest.raises(MembershipError, match="not connected to Ray; call ensure_ray"):
        open_coordinator(GROUP, create=False, timeout_s=1)


# --- in a cluster


def program(cluster: Cluster, namespace: str, rank: int, world_size: int, versions: int) -> subprocess.Popen[str]:
    """Starts a trainer as a driver of its own Ray job."""
    arguments = (cluster.address, namespace, rank, world_size, versions)
    return subprocess.Popen(
        [sys.executable, "-c", f"from rdt_testbed.members import main; main(*{arguments!r})"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )


def end(process: subprocess.Popen[str]) -> str:
    process.kill()
    said, _ = process.communicate()
    return said


@pytest.fixture(scope="module")
def warm_core() -> None:
    """New processes: a coordinator's is small, and some tests kill them."""


@pytest.mark.integration
def test_syncs_with_drivers_of_two_jobs_and_an_actor(ray_cluster: Cluster) -> None:
    import ray

    other = program(ray_cluster, "whole", 1, 2, versions=3)
    try:
        control = open_coordinator(GROUP, namespace="whole", world_size=2, create=True, timeout_s=30)
        trainer = Trainer(control, 0, 2)

        class Engine:
            def __init__(self) -> None:
                self.reader = Reader(open_coordinator(GROUP, namespace="whole", create=False, timeout_s=30), "a")

            def pull(self, version: int) -> list[int]:
                return self.reader.pull(version)

        engine = ray.remote(Engine).options(num_cpus=0).remote()
        control.replica_ready("a", WATCHDOG_S)
        for version in (1, 2, 3):
            report = trainer.publish(
                version, ["a"], lambda version: ray.get(engine.pull.remote(version), timeout=WATCHDOG_S)
            )
            assert (report.version, [one.reader for one in report.readers]) == (version, ["a/0"])
        control.settled(WATCHDOG_S)
        assert other.wait(WATCHDOG_S) == 0
    finally:
        said = end(other)
    assert said.split()[-4:] == ["joined", "1", "2", "3"], said


@pytest.mark.integration
def test_errors_cross_the_actor_with_class_and_text(ray_cluster: Cluster) -> None:
    control = open_coordinator(GROUP, namespace="errors", world_size=2, create=True, timeout_s=30)
    again = open_coordinator(GROUP, namespace="errors", world_size=2, create=True, timeout_s=30)
    control.join(source(0, 2), token(0))
    newer = wire.VersionMeta(rdt="9", wire_major=9, wire_minor=0, ray="", nixl="", torch="", python="")
    for kind, text, call in (
        (MembershipError, "two joins under one rank", lambda: again.join(source(0, 2), "stranger")),
        (MembershipError, "the group was opened for 2", lambda: again.join(source(0, 3), token(0))),
        (VersionError, "speaks wire format 9.0", lambda: again.join(source(1, 2, versions=newer), token(1))),
        (
            CoverageError,
            "declares checkpoint tensor",
            lambda: again.join(source(1, 2, tensors=OTHER), token(1)),
        ),
        (WireError, "source rank 9: outside its world of 2", lambda: again.join(source(9, 2), token(9))),
        (DeadlineError, "waited 0.2 s for all 2 source ranks to join (every rank calls", lambda: again.sources(0.2)),
        (
            SyncError,
            "stale: sync 5 of group 'policy' is over; none has begun",
            lambda: again.published(0, 5, 0, None, 1),
        ),
    ):
        with pytest.raises(RdtError) as found:
            call()
        assert type(found.value) is kind
        assert text in str(found.value)
        assert "Traceback" not in str(found.value)
    with pytest.raises(SyncError, match="broke in join: TypeError"):
        again._call("join", (3, "not a message"), 5.0)
    with pytest.raises(DeadlineError, match=r"did not answer sources within 0\.1 s"):
        again._call("sources", (30.0,), 0.1)


@pytest.mark.integration
def test_a_group_that_is_not_there_is_named_with_those_that_are(ray_cluster: Cluster) -> None:
    kept = open_coordinator("other", namespace="elsewhere", world_size=1, create=True, timeout_s=30)
    began = time.monotonic()
    with pytest.raises(DeadlineError) as found:
        open_coordinator("other", namespace="here", create=False, timeout_s=0.5)
    assert time.monotonic() - began < 15
    for part in (
        "waited 0.5 s",
        "'rdt.other' in namespace 'here'",
        ray_cluster.address,
        "rdt.other in namespace 'elsew",
    ):
        assert part in str(found.value)
    assert "Start the trainer first" in str(found.value)
    with pytest.raises(
        DeadlineError, match="source rank 0 that opens it, and it has not joined: source ranks count from 0"
    ):
        open_coordinator("other", namespace="here", create=False, timeout_s=0.1, is_source=True)
    with pytest.raises(MembershipError, match="without a world_size"):
        open_coordinator("other", namespace="here", create=True, timeout_s=1)
    kept.close()


@pytest.mark.integration
def test_a_coordinator_ends_with_the_process_that_created_it(ray_cluster: Cluster) -> None:
    owner = program(ray_cluster, "owned", 0, 2, versions=1)
    try:
        control = open_coordinator(GROUP, namespace="owned", create=False, timeout_s=WATCHDOG_S)
        control.join(source(1, 2), token(1))
        control.sources(WATCHDOG_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(control.replica_ready, "a", WATCHDOG_S)
            time.sleep(0.2)
            owner.kill()
            with pytest.raises(SyncError, match=r"the coordinator of group 'policy' died \(called for replica_ready\)"):
                waiting.result(WATCHDOG_S)
        with pytest.raises(SyncError, match="the coordinator of group 'policy' died"):
            control.current()
    finally:
        end(owner)
    # the name is free for the next run
    again = open_coordinator(GROUP, namespace="owned", world_size=3, create=True, timeout_s=30)
    assert again.status().world_size == 3


@pytest.mark.integration
def test_dropping_the_control_that_created_it_ends_the_coordinator(ray_cluster: Cluster) -> None:
    created = open_coordinator(GROUP, namespace="dropped", world_size=1, create=True, timeout_s=30)
    found = open_coordinator(GROUP, namespace="dropped", create=False, timeout_s=30)
    created.close()
    with pytest.raises(SyncError, match="is closed"):
        created.current()

    def call_until_it_fails() -> None:
        give_up = time.monotonic() + WATCHDOG_S
        while time.monotonic() < give_up:
            found.current()
            time.sleep(0.05)

    with pytest.raises(SyncError, match="died"):
        call_until_it_fails()


@pytest.mark.integration
def test_many_waits_at_once_leave_the_actor_quick(ray_cluster: Cluster) -> None:
    control = open_coordinator(GROUP, namespace="many", world_size=2, create=True, timeout_s=30)
    assert isinstance(control, RayControl)
    control.join(source(0, 2), token(0))
    waits = [control._handle.sources.remote(30.0) for _ in range(500)]
    control.current()
    began = time.perf_counter()
    for _ in range(100):
        control.current()
    assert (time.perf_counter() - began) / 100 < 0.05
    control.join(source(1, 2), token(1))
    import ray

    assert {epoch for epoch, _ in ray.get(waits, timeout=WATCHDOG_S)} == {0}


@pytest.mark.integration
def test_references_to_tensors_pass_through_the_coordinator(ray_cluster: Cluster) -> None:
    import ray

    control = open_coordinator(GROUP, namespace="refs", world_size=1, create=True, timeout_s=30)

    class Owner:
        def __init__(self) -> None:
            import torch

            self.control = open_coordinator(GROUP, namespace="refs", create=False, timeout_s=30)
            self.control.join(source(0, 1), token(0))
            self.tensor = torch.arange(4096, dtype=torch.float32)

        def offer(self) -> int:
            sync, asked, _ = self.control.begin(0, token(0), 1, ["a"], WATCHDOG_S)
            ref = ray.put([self.tensor], _tensor_transport="nixl")
            self.control.offer(0, sync, [offer(asked[0], refs=1)], [[ref]])
            return sync

    class Taker:
        def take(self) -> float:
            control = open_coordinator(GROUP, namespace="refs", create=False, timeout_s=30)
            _, refs = control.offers("a/0", "first", WATCHDOG_S)
            return float(ray.get(refs[0][0], timeout=WATCHDOG_S)[0].sum())

    def actor(kind: type) -> Any:
        return ray.remote(kind).options(num_cpus=0, enable_tensor_transport=True).remote()

    owner = actor(Owner)
    control.sources(WATCHDOG_S)
    control.connect(engine("a", 0, 1, sources=1))
    ray.get(owner.offer.remote(), timeout=WATCHDOG_S)
    assert ray.get(actor(Taker).take.remote(), timeout=WATCHDOG_S) == 4095 * 4096 / 2
