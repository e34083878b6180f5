"""Options of actors: what each rank gets, and the parts of GPUs that would never be given. Ray is imported, not started."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ray

from rdt_core import cluster
from rdt_core.actoroptions import CONTROL, WEIGHTS, engine_options, make_actor, server_options, trainer_options
from rdt_core.errors import PlacementError
from rdt_core.placement import EngineShape, Placement, Seat, assign

pytestmark = pytest.mark.unit

GROUP = object()  # options only carry it
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def placed(*, cpus: float = 1.0, nodes: int = 1, **asked: Any) -> Placement:
    seats = [
        Seat(8 * node + gpu, f"n{node}", f"10.0.0.{node}", str(gpu), cpus=cpus)
        for node in range(nodes)
        for gpu in range(8)
    ]
    return dataclasses.replace(assign(seats, **asked), group=GROUP)


def variables(options: dict[str, Any]) -> dict[str, str]:
    return options["runtime_env"]["env_vars"]


def test_a_trainer_has_its_bundle_whole() -> None:
    placement = placed(trainers=6, engines=[EngineShape(tp=2)], cpus=4)
    options = trainer_options(placement, 5)
    assert (options["num_gpus"], options["num_cpus"], options["enable_tensor_transport"]) == (1, 4, True)
    strategy = options["scheduling_strategy"]
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == (GROUP, 5)
    assert strategy.placement_group_capture_child_tasks is False
    assert options["concurrency_groups"] == {CONTROL: 1}
    assert "max_concurrency" not in options
    assert variables(options) == {
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }


def test_what_a_trainer_may_add() -> None:
    options = trainer_options(placed(trainers=1), 0, see_node=True, threads=3, env={"A": "b", "CUDA_DEVICE_ORDER": "X"})
    assert {name: variables(options)[name] for name in (NOSET, "OMP_NUM_THREADS", "A", "CUDA_DEVICE_ORDER")} == {
        NOSET: "1",
        "OMP_NUM_THREADS": "3",
        "A": "b",
        "CUDA_DEVICE_ORDER": "X",
    }


def test_an_engine_rank_can_pull_while_its_loop_runs_and_sees_its_node() -> None:
    options = engine_options(placed(trainers=6, engines=[EngineShape(tp=2)]), 0, 1)
    assert options["scheduling_strategy"].placement_group_bundle_index == 7
    assert options["concurrency_groups"] == {WEIGHTS: 1, CONTROL: 1}
    assert options["enable_tensor_transport"] is True
    assert variables(options)[NOSET] == "1"


def test_a_server_takes_nothing_that_its_ranks_need() -> None:
    placement = placed(trainers=4, engines=[EngineShape(tp=2, replicas=2)])
    options = server_options(placement, 1)
    assert (options["num_gpus"], options["num_cpus"]) == (0, 0)
    assert options["scheduling_strategy"].placement_group_bundle_index == 6
    assert options["max_concurrency"] > 1
    assert "CUDA_VISIBLE_DEVICES" not in variables(options)
    options = server_options(placement, 1, processes=True)
    assert (variables(options)["CUDA_VISIBLE_DEVICES"], variables(options)[NOSET]) == ("6,7", "1")


def test_processes_of_an_engine_stay_on_one_node() -> None:
    placement = placed(trainers=0, engines=[EngineShape(tp=16)], nodes=2)
    assert server_options(placement, 0)["num_gpus"] == 0
    with pytest.raises(PlacementError, match=r"engine 0 has ranks on 2 nodes \(n0, n1\)"):
        server_options(placement, 0, processes=True)


@pytest.mark.parametrize("gpus", [0.4, 0.999, 1.5, 2, 0, -1])
def test_one_rank_a_gpu(gpus: float) -> None:
    placement = placed(trainers=2, engines=[EngineShape()])
    with pytest.raises(PlacementError, match=f"trainer rank 1 asks for {gpus:g} GPU; .* shared=True"):
        trainer_options(placement, 1, gpus=gpus)
    with pytest.raises(PlacementError, match="engine 0 rank 0 asks"):
        engine_options(placement, 0, 0, gpus=gpus)


def test_shared_parts_never_add_up_to_more_than_the_gpu() -> None:
    placement = placed(trainers=2, engines=[EngineShape(tp=2)], shared=True)
    assert trainer_options(placement, 0)["num_gpus"] + engine_options(placement, 0, 0)["num_gpus"] == 1
    assert trainer_options(placement, 0)["num_cpus"] == 0.5
    assert trainer_options(placement, 0, gpus=0.4)["num_gpus"] == 0.4
    with pytest.raises(PlacementError, match="would wait for ever for its part"):
        engine_options(placement, 0, 0, gpus=1.0)


@pytest.mark.parametrize(("cpus", "expected"), [(0.0, 0), (1.0, 0.5), (3.0, 1), (4.0, 2)])
def test_shared_cpus_are_numbers_that_ray_takes(cpus: float, expected: float) -> None:
    options = trainer_options(placed(trainers=1, engines=[EngineShape()], shared=True, cpus=cpus), 0)
    assert options["num_cpus"] == expected
    ray.remote(**options)(type("Rank", (), {}))


def test_other_roles_and_unknown_ones() -> None:
    placement = placed(trainers=2, others={"critic": 2})
    assert trainer_options(placement, 1, role="critic")["scheduling_strategy"].placement_group_bundle_index == 3
    with pytest.raises(PlacementError, match="no role 'reward' was placed; there are trainer, critic"):
        trainer_options(placement, 0, role="reward")
    with pytest.raises(PlacementError, match="critic has 2 ranks; rank 2"):
        trainer_options(placement, 2, role="critic")
    with pytest.raises(PlacementError, match="there are 0 engines"):
        engine_options(placement, 0, 0)
    with pytest.raises(PlacementError, match="there are 0 engines"):
        server_options(placement, -1)


def test_a_computed_placement_has_no_options() -> None:
    placement = assign([Seat(0, "n", "", "0")], trainers=1)
    with pytest.raises(PlacementError, match="no placement group"):
        trainer_options(placement, 0)
    cluster.release(placement)


def test_a_decorated_class_is_refused() -> None:
    class Rank:
        pass

    options = trainer_options(placed(trainers=1), 0)
    assert make_actor(Rank, options).__ray_metadata__.enable_tensor_transport is True
    with pytest.raises(PlacementError, match="pass the plain class"):
        make_actor(ray.remote(Rank), options)


def test_placing_needs_a_cluster() -> None:
    assert not ray.is_initialized()
    with pytest.raises(PlacementError, match=r"not connected to Ray; call ray\.init"):
        cluster.place(trainers=1)
