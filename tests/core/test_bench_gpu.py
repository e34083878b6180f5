"""Megatron's ranks of the bench on a GPU: processes make equal replicas there, and every word arrives."""

from __future__ import annotations

import pytest

from rdt_core.bench import BenchOptions, run
from rdt_core.trainers import MegatronLayout

pytestmark = [pytest.mark.gpu, pytest.mark.integration]


def test_megatrons_words_arrive_on_a_gpu(ray_cluster) -> None:
    layout = MegatronLayout(4, tp=2, cp=2, ep=2)
    report = run(
        BenchOptions(
            model="tiny-moe", ranks=4, megatron=layout, tp=2, device="cuda", gpus="shared", modes=("live", "snapshot", "bucket"),
            kinds=("mapped", "prepared"), rounds=2,
        ),
        gpus=1,
    )  # fmt: skip
    assert [(cell.error, cell.exact) for cell in report.cells] == [("", True)] * 6
