"""choose_mode: what `auto` takes, and why the first choice does not work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rdt_core.modes import choose_mode
from rdt_core.sources import CheckpointSource

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("mapped", "expected"), [(True, "snapshot"), (False, "live")])
def test_weights_mapped_from_a_file_are_not_published_live_where_readers_map_memory(
    tmp_path: Path, mapped: bool, expected: str
) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.arange(8.0)}, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    shards = source.shards()
    chosen, why = choose_mode("auto", source, shards, lambda _: torch.float32, torch.device("cpu"), 0, mapped=mapped)
    assert chosen == expected
    assert ("'a' is mapped from a file that is closed" in why) == mapped
