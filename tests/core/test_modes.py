"""choose_mode: what `auto` takes, and why the first choice does not work."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rdt_core import modes
from rdt_core.modes import choose_mode
from rdt_core.sources import CheckpointSource
from rdt_core.sources.base import Shard
from rdt_core.wire import TensorMeta

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


def test_more_tensors_than_a_process_may_have_open_files_are_not_shared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.zeros(2) for _ in range(600)]
    shards = [Shard(f"w{number}", (0,), tensor) for number, tensor in enumerate(tensors)]
    metadata = [TensorMeta(name=shard.name, shape=(2,), dtype="float32") for shard in shards]
    source = SimpleNamespace(metadata=lambda: metadata, shards=lambda: shards, ignored=tuple)

    def choose() -> tuple[str, str]:
        return choose_mode("auto", source, shards, lambda _: torch.float32, torch.device("cpu"), 0, mapped=True)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    mode, why = choose()
    assert mode == "snapshot"
    assert "sharing 600 tensors of their own memory takes as many open files, and this process may have 1024" in why
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert choose()[0] == "live"


def test_parameters_that_do_not_fit_into_shared_memory_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(1000)
    source = SimpleNamespace(metadata=tuple, shards=tuple, ignored=tuple)

    def choose() -> tuple[str, str]:
        shards = [Shard("w", (0,), tensor)]
        return choose_mode("auto", source, shards, lambda _: torch.float32, torch.device("cpu"), 0, mapped=True)

    assert choose()[0] == "live"
    monkeypatch.setattr(modes, "_shared_memory", lambda: 3999)
    mode, why = choose()
    assert mode == "snapshot"
    assert "needs 4000 bytes of shared memory, and /dev/shm has 3999" in why
