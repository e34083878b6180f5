"""The bench on real GPUs with small shapes: exact by every kind, placement as asked for, the peers that can run there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def bench(folder: Path, *arguments: str) -> dict:
    file = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", "bench", "--device", "cuda", "--model", "tiny-moe", "--rounds", "2",
         "--json", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(file.read_text())


def test_one_gpu_shared_by_all(tmp_path: Path) -> None:
    report = bench(
        tmp_path, "--gpus", "shared", "--trainer", "fsdp:ranks=1", "--kinds", "mapped,prepared", "--modes",
        "live,snapshot", "--peers", "broadcast,gather",
    )  # fmt: skip
    assert [(cell["error"], cell["exact"]) for cell in report["cells"]] == [("", True)] * 4
    assert all(cell["floors"][name] > 0 for cell in report["cells"] for name in ("copy", "span", "nixl"))
    broadcast, gather = report["peers"]
    assert "NCCL takes one rank a GPU" in broadcast["reason"]
    assert (gather["error"], gather["exact"]) == ("", True)


def test_every_peer_has_a_row_on_one_gpu(tmp_path: Path) -> None:
    report = bench(
        tmp_path,
        "--gpus",
        "shared",
        "--trainer",
        "fsdp:ranks=1",
        "--kinds",
        "mapped",
        "--modes",
        "live",
        "--peers",
        "all",
    )
    rows = {row["name"]: row for row in report["peers"]}
    assert "NCCL takes one rank a GPU" in rows["broadcast"]["reason"]
    assert "left out of all" in rows["disk"]["reason"]
    for name in ("checkpoint-engine", "sharded_rdt"):
        module = {"checkpoint-engine": "checkpoint_engine", "sharded_rdt": "vllm"}[name]
        if importlib.util.find_spec(module) is None:
            assert "not installed" in rows[name]["reason"]
        else:
            assert (rows[name]["error"], rows[name]["reason"], rows[name]["exact"]) == ("", "", True)


def test_expandable_segments_are_said_and_auto_copes(tmp_path: Path) -> None:
    report = bench(
        tmp_path, "--gpus", "shared", "--trainer", "fsdp:ranks=1", "--kinds", "mapped", "--modes", "live,auto",
        "--expandable",
    )  # fmt: skip
    live, auto = report["cells"]
    assert "expandable" in live["error"]
    assert (auto["error"], auto["exact"], auto["expandable"], auto["used_mode"]) == ("", True, True, "snapshot")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("gpus", ["separate", "together"])
def test_two_gpus(tmp_path: Path, gpus: str) -> None:
    ranks = "1" if gpus == "separate" else "2"
    arguments = ["--gpus", gpus, "--trainer", f"fsdp:ranks={ranks}", "--engine", f"vllm:tp={ranks}"]
    arguments += ["--kinds", "prepared", "--modes", "live,snapshot", "--peers", "broadcast,gather", "--nccl-alive"]
    report = bench(tmp_path, *arguments)
    assert [(cell["error"], cell["exact"]) for cell in report["cells"]] == [("", True)] * 2
    assert report["placement"] == ([[0], [1]] if gpus == "separate" else [[0, 1], [0, 1]])
    broadcast, gather = report["peers"]
    assert (gather["error"], gather["exact"]) == ("", True)
    assert broadcast["exact"] if gpus == "separate" else "NCCL takes one rank a GPU" in broadcast["reason"]
