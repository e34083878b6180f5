"""vLLM's own backends `ipc` and `sharded_rdt` on one GPU, fed by a source of rdt's: `interplay_program.py` on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_a_stock_worker_is_fed_by_our_source(tiny_model: Path, results: Callable[..., list[Any]]) -> None:
    rows = results("interplay_program.py", str(tiny_model))
    assert [row["backend"] for row in rows] == ["ipc", "sharded_rdt"]
    assert all(row["changed"] and row["equal"] for row in rows), rows
