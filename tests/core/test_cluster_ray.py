"""Placement in a real Ray cluster of two nodes with logical GPUs: who starts, where it runs, and what is refused in time."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from rdt_core import cluster
from rdt_core.actoroptions import engine_options, make_actor, server_options, trainer_options
from rdt_core.errors import DeadlineError, PlacementError
from rdt_core.placement import EngineShape, Placement, Ranks
from rdt_testbed.cluster import LEAN
from rdt_testbed.processes import descendants

pytestmark = pytest.mark.integration

TIMEOUT_S = 240.0  # nothing waits for it unless it is broken; a busy machine starts a process in seconds
DOCUMENT = Path(__file__).parents[2] / "docs" / "placement.md"


class Rank:
    """Any rank: says where it runs."""

    def where(self, names: tuple[str, ...] = ()) -> tuple[str, list[str], dict[str, str | None]]:
        import ray

        context = ray.get_runtime_context()
        values = {name: os.environ.get(name) for name in names}
        return context.get_node_id(), context.get_accelerator_ids()["GPU"], values


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Two nodes of 8 GPUs and 8 CPUs each; yields their ids."""
    import ray
    from ray.cluster_utils import Cluster

    before = {process.pid for process in descendants()}
    size = {"num_cpus": 8, "num_gpus": 8, "object_store_memory": 80 << 20, **LEAN}
    # The address is not written down where any other `ray.init()` on this machine would find it and connect.
    with mock.patch("ray._private.utils.write_ray_address"):
        simulated = Cluster(initialize_head=True, head_node_args=size)
        try:
            simulated.add_node(**size)
            ray.init(address=simulated.address, namespace="placement", log_to_driver=False)
            yield [node["NodeID"] for node in ray.nodes()]
        finally:
            ray.shutdown()
            simulated.shutdown()
            psutil.wait_procs([one for one in descendants() if one.pid not in before], timeout=20)


@pytest.fixture
def placing(nodes: list[str]) -> Iterator[list[Placement]]:
    """Placements of a test, removed after it; the next test finds every GPU free."""
    placements: list[Placement] = []
    yield placements
    for placement in placements:
        cluster.release(placement)
    wait_for(lambda: free_gpus() == 16)


def free_gpus() -> float:
    import ray

    return ray.available_resources().get("GPU", 0)


def wait_for(condition, timeout_s: float = 30.0) -> None:
    """Ray tells of resources only by polling."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.05)


def start(placement: Placement, ranks: Ranks, replica: int | None = None, **options) -> list:
    """Starts all ranks of a role."""
    of = trainer_options if replica is None else engine_options
    arguments = (placement,) if replica is None else (placement, replica)
    return [make_actor(Rank, of(*arguments, rank, **options)).remote() for rank in range(len(ranks))]


def check_all_run_where_they_are_said_to(placement: Placement) -> None:
    """Starts every rank of a placement at once; each answers from its node and GPU."""
    import ray

    actors = []
    for replica, ranks in enumerate((placement.trainers, *placement.engines), start=-1):
        for rank, seat in enumerate(ranks):
            options = trainer_options(placement, rank) if replica < 0 else engine_options(placement, replica, rank)
            # Without an environment of its own an actor takes over a process that ran a probe; a new one costs a second
            # of a core. What the environment holds is tested below.
            del options["runtime_env"]
            actors.append((seat, make_actor(Rank, options).remote()))
    answers = ray.get([actor.where.remote() for _, actor in actors], timeout=TIMEOUT_S)
    assert [(node, gpus) for node, gpus, _ in answers] == [(seat.node_id, [seat.gpu]) for seat, _ in actors]
    if not placement.shared:
        assert len({(node, *gpus) for node, gpus, _ in answers}) == len(actors)


def test_six_trainers_and_an_engine_of_two_start_on_one_node(placing: list[Placement], nodes: list[str]) -> None:
    placement = cluster.place(trainers=6, engines=[EngineShape(tp=2)], timeout_s=TIMEOUT_S)
    placing.append(placement)
    assert placement.trainers.nodes == placement.engines[0].nodes
    assert placement.trainers.gpus + placement.engines[0].gpus == tuple("01234567")
    assert set(placement.trainers.nodes) <= set(nodes)
    assert all(ipaddress.ip_address(seat.address) for seat in placement.trainers)
    check_all_run_where_they_are_said_to(placement)


def test_eight_and_eight_fill_a_node_each(placing: list[Placement], nodes: list[str]) -> None:
    placement = cluster.place(trainers=8, engines=[EngineShape(tp=4, replicas=2)], timeout_s=TIMEOUT_S)
    placing.append(placement)
    assert placement.trainers.nodes + placement.engines[0].nodes == tuple(sorted(nodes))
    assert placement.engines[0].nodes == placement.engines[1].nodes
    assert [engine.gpus for engine in placement.engines] == [("0", "1", "2", "3"), ("4", "5", "6", "7")]
    check_all_run_where_they_are_said_to(placement)


def test_an_engine_over_two_nodes_in_a_group_that_exists_and_mixes_them(
    placing: list[Placement], nodes: list[str]
) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    groups = len(placement_group_table())
    # spread, so that bundle 0 is on one node, bundle 1 on the other, and so on; one bundle is for something else
    group = placement_group([{"GPU": 1}] * 16 + [{"CPU": 1}], strategy="SPREAD")
    try:
        placement = cluster.place(engines=[EngineShape(tp=16)], group=group, timeout_s=TIMEOUT_S)
        placing.append(placement)
        engine = placement.engines[0]
        assert engine.node_ids == tuple(node for node in sorted(nodes) for _ in range(8))
        assert engine.gpus == tuple("01234567" * 2)
        assert engine.bundles != tuple(range(16)), "the group was to mix the nodes"
        assert sorted(engine.bundles) == list(range(16))
        # bundles without a CPU: ranks that asked for one would never start
        assert engine_options(placement, 0, 0)["num_cpus"] == 0
        check_all_run_where_they_are_said_to(placement)
        assert len(placement_group_table()) == groups + 1, "a second group was made"
        cluster.release(placement)
        assert placement_group_table(group)["state"] == "CREATED", "a group that existed was removed"
    finally:
        remove_placement_group(group)
        wait_for(lambda: ray.available_resources().get("CPU") == 16)


def test_an_impossible_request_fails_in_time_and_says_what_there_is(placing: list[Placement], nodes: list[str]) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    began = time.monotonic()
    with pytest.raises(DeadlineError) as raised:
        cluster.place(trainers=9, engines=[EngineShape(tp=8)], timeout_s=1.5)
    assert time.monotonic() - began < 10
    text = str(raised.value)
    assert "17 bundles (17 of 1 GPU and 1 CPU) was not placed within 1.5 s" in text
    assert "17 GPU needed, 16 in the cluster, 16 free; 17 CPU needed, 16 in the cluster, 16 free" in text
    for node in nodes:
        assert f"(node {node[:12]}): 8 GPU (8 free), 8 CPU (8 free)" in text
    wait_for(lambda: {group["state"] for group in placement_group_table().values()} == {"REMOVED"})

    holder = ray.remote(num_gpus=3, num_cpus=0)(Rank).remote()
    ray.get(holder.where.remote(), timeout=TIMEOUT_S)
    wait_for(lambda: free_gpus() == 13)
    with pytest.raises(DeadlineError, match=r"14 GPU needed, 16 in the cluster, 13 free\. .* 8 GPU \(5 free\)"):
        cluster.place(trainers=14, timeout_s=1)
    with pytest.raises(DeadlineError, match=r"enough is free in all, but not on nodes where whole bundles fit"):
        cluster.place(trainers=1, cpus=9, timeout_s=1)
    ray.kill(holder)


def test_bundles_that_somebody_has_are_refused_unless_shared(placing: list[Placement]) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 1, "CPU": 1}] * 2, strategy="PACK")
    try:
        # a rank with a fraction leaves too little on its bundle for a whole one
        critic = (
            ray.remote(Rank)
            .options(num_gpus=0.4, num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 1))
            .remote()
        )
        ray.get(critic.where.remote(), timeout=TIMEOUT_S)
        name = f"GPU_group_1_{group.id.hex()}"
        wait_for(lambda: ray.available_resources().get(name) == 0.6)
        with pytest.raises(DeadlineError) as raised:
            cluster.place(trainers=2, group=group, timeout_s=6)
        assert "Bundles [1] were taken by other actors" in str(raised.value)
        assert "shared=True" in str(raised.value)
        # asked for on purpose, the rest of the GPU can be had
        placement = cluster.place(trainers=2, group=group, shared=True, timeout_s=TIMEOUT_S)
        actors = start(placement, placement.trainers, gpus=0.6)
        assert len(ray.get([actor.where.remote() for actor in actors], timeout=TIMEOUT_S)) == 2
        ray.kill(critic)
    finally:
        remove_placement_group(group)


def test_shared_roles_all_start_and_the_cost_is_said(
    placing: list[Placement], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rdt_core.cluster"):
        placement = cluster.place(trainers=2, engines=[EngineShape(tp=2)], shared=True, timeout_s=TIMEOUT_S)
    placing.append(placement)
    assert placement.trainers.seats == placement.engines[0].seats
    assert "its own memory registered with NIXL" in caplog.text
    check_all_run_where_they_are_said_to(placement)


def test_options_reach_the_actors(placing: list[Placement]) -> None:
    import ray

    placement = cluster.place(trainers=1, engines=[EngineShape(tp=2)], cpus=2, timeout_s=TIMEOUT_S)
    placing.append(placement)
    names = ("CUDA_VISIBLE_DEVICES", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "OMP_NUM_THREADS", "CUDA_DEVICE_ORDER")
    (trainer,) = start(placement, placement.trainers)
    engine = start(placement, placement.engines[0], 0)[1]
    server = make_actor(Rank, server_options(placement, 0, processes=True)).remote()
    answers = ray.get([actor.where.remote(names) for actor in (trainer, engine, server)], timeout=TIMEOUT_S)
    masks = [values["CUDA_VISIBLE_DEVICES"] for _, _, values in answers]
    gpus = placement.engines[0].gpus
    assert masks == [placement.trainers.gpus[0], None, ",".join(gpus)]
    assert [values["OMP_NUM_THREADS"] for _, _, values in answers[:2]] == ["2", "2"]
    assert {values["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] for _, _, values in answers} == {"on"}
    assert {values["CUDA_DEVICE_ORDER"] for _, _, values in answers} == {"PCI_BUS_ID"}
    assert {node for node, _, _ in answers[1:]} == set(placement.engines[0].nodes)
    assert trainer._ray_enable_tensor_transport is True
    assert engine._ray_enable_tensor_transport is True


def test_ray_drops_these_options_in_options() -> None:
    """Why `make_actor` exists; the day this fails it may go."""
    import ray

    handle = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote()
    assert not handle._ray_enable_tensor_transport
    ray.kill(handle)


def test_control_calls_get_through_a_call_that_never_returns(placing: list[Placement]) -> None:
    import ray

    class Busy:
        def __init__(self) -> None:
            import threading

            self.stop, self.entered = threading.Event(), threading.Event()

        def publish(self) -> str:
            self.entered.set()
            return "stopped" if self.stop.wait(TIMEOUT_S) else "nobody came"

        @ray.method(concurrency_group="control")
        def status(self) -> bool:
            entered = self.entered.wait(TIMEOUT_S)
            self.stop.set()
            return entered

    placement = cluster.place(trainers=1, timeout_s=TIMEOUT_S)
    placing.append(placement)
    busy = make_actor(Busy, trainer_options(placement, 0)).remote()
    running = busy.publish.remote()
    assert ray.get(busy.status.remote(), timeout=TIMEOUT_S) is True
    assert ray.get(running, timeout=TIMEOUT_S) == "stopped"


def test_groups_with_other_bundles_are_refused(placing: list[Placement]) -> None:
    def group(*bundles: dict[str, float]) -> SimpleNamespace:
        return SimpleNamespace(bundle_specs=list(bundles))  # refused before Ray is asked about it

    with pytest.raises(PlacementError, match=r"another number of GPUs than one: \{1: 8\}"):
        cluster.place(trainers=1, group=group({"GPU": 1}, {"GPU": 8}))
    with pytest.raises(PlacementError, match=r"another number of GPUs than one: \{0: 0\.5\}"):
        cluster.place(trainers=1, group=group({"GPU": 0.5}))
    with pytest.raises(PlacementError, match="no bundle of the placement group has a GPU"):
        cluster.place(trainers=1, group=group({"CPU": 1}))


def test_a_logical_gpu_is_not_taken_for_a_device(placing: list[Placement]) -> None:
    import ray

    if cluster.gpus.inventory():
        pytest.skip("this machine has GPUs")
    with pytest.raises(PlacementError, match="has 0 GPUs from Ray"):
        cluster.own_device()
    with pytest.raises(PlacementError, match="only a logical one"):
        ray.get(ray.remote(num_cpus=0, num_gpus=1)(cluster.own_device).remote(), timeout=TIMEOUT_S)


def test_the_page_says_what_works(placing: list[Placement]) -> None:
    import ray

    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    before, after = block.split("...\n")
    names: dict = {"__name__": "placement_page"}
    exec(compile(before, str(DOCUMENT), "exec"), names)
    placement = names["placement"]
    answers = ray.get([trainer.where.remote() for trainer in names["trainers"]], timeout=TIMEOUT_S)
    assert answers == [(seat.node_id, [seat.gpu]) for seat in placement.trainers]
    exec(compile(after, str(DOCUMENT), "exec"), names)

    def until_gone() -> None:  # an actor may answer one more call before its end reaches it
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            ray.get(names["trainers"][0].where.remote(), timeout=TIMEOUT_S)

    with pytest.raises(ray.exceptions.RayActorError):
        until_gone()
