"""The bench as a whole on a CPU: every option with tiny shapes, exactness that is noticed, errors that hide nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_core.bench import BenchOptions, fleet, run, show
from rdt_core.bench.laidout import LaidOutRank
from rdt_core.bench.layouts import EngineModule
from rdt_core.bench.placement import environment
from rdt_core.plan.cluster import Cluster, seat
from rdt_core.plan.readers import EngineLayout, plan_readers
from rdt_core.plan.trainers import make_manifests
from rdt_core.routing import Routing
from rdt_core.shapes import checkpoint_tensors
from rdt_core.sources.base import Shard
from rdt_core.trainers import MegatronLayout

pytestmark = pytest.mark.integration

ALL_PEERS = ("broadcast", "gather", "disk", "objects")


def one_bit(module: EngineModule) -> None:
    """Spoils one bit of the last tensor's last element on this rank."""
    name = list(module.slices)[-1]
    module.part(name).view(torch.int16)[..., -1:] ^= 1


def test_modes_kinds_and_peers_are_exact_with_several_ranks_on_both_sides(ray_cluster) -> None:
    seen: list[tuple[int, str]] = []
    synced: list[int] = []
    options = BenchOptions(
        model="tiny-moe", ranks=2, tp=2, ep=2, kinds=("mapped", "prepared"), modes=("live", "snapshot", "bucket"),
        peers=ALL_PEERS, rounds=2, peer_rounds=1, bucket_bytes=64 << 10,
    )  # fmt: skip
    report = run(options, observe=lambda report, doing: seen.append((len(report.rows), doing)), synced=synced.append)
    # one by one, and after each piece again
    assert list(dict.fromkeys(synced)) == list(range(1, 6 * 3 + len(ALL_PEERS) * 2 + 1))
    assert synced[-1] == show.syncs_of(options)
    assert [row.error for row in report.rows] == [""] * 10
    assert all(row.exact for row in report.rows)
    assert not report.failed
    for cell in report.cells:
        assert (cell.used_mode, cell.used_kinds, len(cell.seconds)) == (cell.mode, (cell.kind,), 2)
        assert sum(cell.received) == sum(cell.sent) == cell.bytes > report.bytes  # norms and routers twice
        assert len(cell.sent) == len(cell.received) == 2
        assert cell.floors.copy > 0
        assert cell.floors.span > 0
        assert cell.floors.nixl > 0
        assert len(cell.moving) == 2
        assert all(0 < moving < total for moving, total in zip(cell.moving, cell.seconds, strict=True))
        assert cell.phases_p95.keys() == cell.phases.keys()
        assert all(cell.phases_p95[name] >= cell.phases[name] for name in cell.phases)
        assert cell.slowest in (0, 1)
        assert {"begin", "pull", "call", "commit", "stamp", "rest"} <= cell.phases.keys()
        assert cell.phases["rest"] > 0
        assert "transfer" in cell.reader_phases
    assert [row.name for row in report.peers] == list(ALL_PEERS)
    assert all(row.bytes == report.bytes and len(row.seconds) == 1 for row in report.peers)
    assert [count for count, _ in seen] == list(range(11))
    assert seen[-1][1] == ""
    assert not list(Path("/dev/shm").glob("rdt-bench-*"))


def test_one_wrong_bit_is_noticed_in_every_cell_and_peer(ray_cluster) -> None:
    report = run(
        BenchOptions(
            model="tiny-mla", engine="sglang", ranks=1, kinds=("auto",), modes=("auto",), packs=("default", "packed"),
            peers=ALL_PEERS, rounds=1, peer_rounds=1,
        ),
        spoil=one_bit,
    )  # fmt: skip
    assert [row.error for row in report.rows] == [""] * 6
    assert not any(row.exact for row in report.rows)
    assert not report.exact
    assert {cell.used_mode for cell in report.cells} == {"live"}


def planned(one: BenchOptions) -> Counter[tuple[int, int]]:
    """Bytes of each link by the rooms of `rdt plan`, with everybody on one node."""
    assert one.megatron is not None
    seats = seat(Cluster(gpus=64), one.ranks, 1, one.readers, "beside")
    nodes = [gpu.meta() for gpu in seats.sources]
    routing = Routing(make_manifests(one.megatron, checkpoint_tensors(one.model), one.config, nodes))
    engine = EngineLayout(one.engine, one.tp, one.ep, one.pp)
    _, transfers, _ = plan_readers(routing, engine, one.config, seats.sources, seats.readers, device="cpu")
    links: Counter[tuple[int, int]] = Counter()
    for source, reader, nbytes in zip(transfers.source, transfers.reader, transfers.nbytes, strict=True):
        links[int(source), int(reader)] += int(nbytes)
    return links


@pytest.mark.parametrize(
    ("model", "layout", "tp", "kind", "modes"),
    [
        ("tiny", MegatronLayout(4, tp=2, pp=2), 2, "mapped", ("live", "snapshot", "bucket")),
        ("tiny-moe", MegatronLayout(4, tp=2, ep=2), 2, "prepared", ("live",)),
    ],
)
def test_megatrons_words_arrive_over_the_links_of_the_plan(
    model: str, layout: MegatronLayout, tp: int, kind: str, modes: tuple[str, ...], ray_cluster
) -> None:
    one = BenchOptions(
        model=model, ranks=layout.ranks, megatron=layout, tp=tp, kinds=(kind,), modes=modes, rounds=1, peers=("broadcast",)
    )  # fmt: skip
    report = run(one)
    assert [(cell.error, cell.exact, cell.used_mode) for cell in report.cells] == [("", True, mode) for mode in modes]
    assert report.trainer.startswith("megatron:ranks=4,tp=2")
    want = planned(one)
    for cell in report.cells:
        assert {(source, reader): nbytes for source, reader, nbytes in cell.links} == want
        assert sum(want.values()) == cell.bytes
    assert "other designs are measured with row shards" in report.peers[0].reason


class SwappedRank(LaidOutRank):
    """Hands out a query group's key for its value, and its value for its key."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shards = self.source._shards
        at = [next(n for n, one in enumerate(shards) if f".{part}_proj." in one.name) for part in "kv"]
        pair = [shards[number] for number in at]
        for number, mine, other in zip(at, pair, reversed(pair), strict=True):
            shards[number] = Shard(mine.name, mine.offset, other.tensor)


def test_a_swapped_stretch_of_a_fused_parameter_is_noticed(ray_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LaidOutRank", SwappedRank)
    one = BenchOptions(
        model="tiny", layers=1, ranks=1, megatron=MegatronLayout(1), kinds=("mapped",), modes=("live",), rounds=1, limit_s=0.5
    )  # fmt: skip
    cell = run(one).cells[0]
    assert (cell.error, cell.exact) == ("", False)


def test_collectives_of_the_trainers_go_on_and_an_error_hides_no_other_cell(ray_cluster) -> None:
    report = run(
        BenchOptions(
            model="tiny-mla", layers=2, ranks=2, kinds=("smoke", "mapped", "prepared"), modes=("live",), rounds=2,
            collectives=True,
        )
    )  # fmt: skip
    wrong, *right = report.cells
    assert "unknown link kind 'smoke'" in wrong.error
    assert [(cell.error, cell.exact, cell.collectives) for cell in right] == [("", True, True)] * 2
    assert report.exact
    assert not report.failed


def test_nothing_is_started_after_the_limit(ray_cluster) -> None:
    report = run(
        BenchOptions(
            model="tiny", kinds=("mapped",), modes=("live",), peers=("broadcast", "disk", "checkpoint-engine", "nobody"),
            left_out=(("disk", "too large"),), limit_s=1e-9,
        )
    )  # fmt: skip
    cell, broadcast, disk, engine, nobody = report.rows
    assert all("not started" in row.error for row in (cell, broadcast))
    assert disk.reason == "left out of all: too large"
    assert "CUDA IPC" in engine.reason
    assert "no installed package supplies it" in nobody.reason
    assert report.failed


def test_a_process_has_the_mask_that_was_made_for_it(ray_cluster) -> None:
    import ray

    def mask() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    task = ray.remote(mask).options(num_cpus=0, runtime_env={"env_vars": environment(1, 2, given={})})
    assert ray.get(task.remote()) == "1,0"


def test_the_command_writes_its_report_and_says_yes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    picture = tmp_path / "report.png"
    command = ["bench", "--model", "tiny", "--trainer", "fsdp:ranks=1", "--links", "mapped", "--modes", "live"]
    command += ["--peers", "checkpoint-engine", "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", *command, "--rounds", "1", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny: 21 tensors" in done.stdout
    assert "cannot run here: the package moves weights through CUDA IPC" in done.stdout
    assert json.loads(file.read_text())["cells"][0]["exact"] is True
    assert json.loads(file.read_text())["cells"][0]["floors"]["nixl"] > 0
    assert picture.stat().st_size > 10_000


def test_the_command_refuses_before_it_starts_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", "bench", "--engine", "vllm:tp=2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "tp=2 does not divide the 9 attention heads" in done.stderr
