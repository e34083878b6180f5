"""Arenas, sharing of storages, and what finds moved memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rdt_core import cudadriver, memory
from rdt_core.errors import TransportError
from rdt_core.sources.watch import fingerprint

pytestmark = pytest.mark.unit


def through_descriptor(storage: torch.UntypedStorage) -> bytes:
    """What another process would read from the shared file of `storage`."""
    fd, nbytes = memory.share(storage)
    return os.pread(fd, nbytes, 0)


def test_arena_hands_out_aligned_spans_of_one_allocation() -> None:
    arena = memory.Arena(4096)
    first, a = arena.span(10)
    second, b = arena.span(100, align=64)
    assert (first, second) == (0, 64)
    assert (a.numel(), b.numel(), arena.used, arena.free) == (10, 100, 164, 4096 - 164)
    assert b.data_ptr() == arena.tensor.data_ptr() + 64
    b.fill_(7)
    assert int(arena.tensor.sum()) == 700
    assert arena.span(0)[1].numel() == 0


def test_full_arena_names_the_sizes() -> None:
    arena = memory.Arena(1000)
    arena.span(600)
    with pytest.raises(TransportError, match=r"arena of 1000 bytes .* 600 handed out has no room for 300 more"):
        arena.span(300)
    assert arena.used == 600
    assert arena.span(232)[0] == 768


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_arena_is_refused(nbytes: int) -> None:
    with pytest.raises(TransportError, match=str(nbytes)):
        memory.Arena(nbytes)


def test_arena_larger_than_memory_is_refused_before_anything_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real call would take all memory of the machine and get other processes killed, so it is out of reach here.
    reserved: list[int] = []
    monkeypatch.setattr(memory.os, "posix_fallocate", lambda fd, start, size: reserved.append(size))
    monkeypatch.setattr(memory, "_available", lambda: 5000)
    with pytest.raises(TransportError, match="of 5001 bytes can be made: 5000 bytes are available"):
        memory.Arena(5001)
    assert reserved == []


def test_available_memory_is_below_what_the_machine_has() -> None:
    assert 0 < memory._available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_unknown_device_is_refused() -> None:
    with pytest.raises(TransportError, match="meta"):
        memory.Arena(10, "meta")


def test_arena_is_shared_and_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = memory.Arena(1 << 20)
    storage = arena.tensor.untyped_storage()
    assert storage.is_shared()
    arena.tensor.fill_(3)
    assert through_descriptor(storage) == b"\x03" * (1 << 20)
    assert set(os.listdir("/dev/shm")) == before
    del arena, storage
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_share_keeps_tensors_views_and_values_and_moves_once() -> None:
    parameter = torch.nn.Parameter(torch.arange(1000, dtype=torch.float32))
    view = parameter.detach()[100:200].view(10, 10)
    storage = parameter.untyped_storage()
    before = storage.data_ptr()
    assert not storage.is_shared()
    fd, nbytes = memory.share(storage)
    assert nbytes == 4000
    assert storage.data_ptr() != before
    moved = storage.data_ptr()
    assert memory.share(storage) == (fd, nbytes)
    assert storage.data_ptr() == moved == parameter.data_ptr() == view.data_ptr() - 400
    view[3, 3] = -1.0
    assert float(parameter.detach()[133]) == -1.0
    assert np.frombuffer(through_descriptor(storage), dtype=np.float32)[133] == -1.0


def test_optimizer_step_after_share_changes_the_shared_bytes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    for parameter in model.parameters():
        memory.share(parameter.untyped_storage())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [through_descriptor(p.untyped_storage()) for p in model.parameters()]
    marks = fingerprint(model.parameters())
    model(torch.ones(4, 8)).square().sum().backward()
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        now = through_descriptor(parameter.untyped_storage())
        assert now != old
        assert now == parameter.detach().numpy().tobytes()
    assert fingerprint(model.parameters()) == marks


@pytest.mark.integration
def test_fsdp2_shards_stay_shared_across_steps(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        fully_shard(model, mesh=mesh)
        locals_ = [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
        for address, whole in memory.storages(locals_).items():
            memory.share(whole.untyped_storage())
            assert whole.data_ptr() != address
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            before = [through_descriptor(tensor.untyped_storage()) for tensor in locals_]
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for old, parameter in zip(before, model.parameters(), strict=True):
                local = parameter.to_local().detach()  # type: ignore[attr-defined]
                assert local.untyped_storage().is_shared()
                assert through_descriptor(local.untyped_storage()) != old
                start = local.storage_offset() * 4
                raw = through_descriptor(local.untyped_storage())[start : start + local.numel() * 4]
                assert raw == local.contiguous().numpy().tobytes()
    finally:
        torch.distributed.destroy_process_group()


def test_share_refuses_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="0 bytes"):
        memory.share(torch.empty(0).untyped_storage())
    with pytest.raises(TransportError, match="meta"):
        memory.share(torch.empty(4, device="meta").untyped_storage())
    path = tmp_path / "weights"
    path.write_bytes(b"\x01" * 64)
    mapped = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=64)
    with pytest.raises(TransportError, match="64 bytes is mapped from a file"):
        memory.share(mapped)


def test_share_refuses_before_shared_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 10, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(memory.os, "statvfs", lambda path: full)
    storage = torch.zeros(2000).untyped_storage()
    address = storage.data_ptr()
    with pytest.raises(TransportError, match=r"8000 bytes .* has 4096; .*--shm-size"):
        memory.share(storage)
    assert storage.data_ptr() == address
    assert not storage.is_shared()


def test_storages_are_found_once_each_and_whole() -> None:
    base = torch.zeros(100)
    other = torch.ones(10, dtype=torch.int16)
    found = memory.storages([base[50:], other, base[:10].view(2, 5), torch.empty(0), torch.empty(3, device="meta")])
    assert list(found) == [base.data_ptr(), other.data_ptr()]
    assert [tensor.numel() for tensor in found.values()] == [400, 20]
    found[other.data_ptr()].zero_()
    assert int(other.sum()) == 0


def test_of_two_storages_at_one_address_the_larger_counts() -> None:
    raw = np.zeros(64, dtype=np.uint8)
    large, small = torch.from_numpy(raw), torch.from_numpy(raw[:16])
    assert large.untyped_storage().nbytes() != small.untyped_storage().nbytes()
    for order in ([large, small], [small, large]):
        assert [tensor.numel() for tensor in memory.storages(order).values()] == [64]


def test_cpu_memory_is_never_expandable() -> None:
    assert not memory.is_expandable(torch.zeros(4))


def test_a_cpu_has_no_allocations_to_remember() -> None:
    assert memory.Allocations([torch.zeros(4), torch.zeros(0)]).ids() == ()


@pytest.mark.gpu
def test_memory_that_was_given_back_is_noticed() -> None:
    first = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    found = memory.Allocations([first[:100], first[100:], torch.zeros(4)])
    before = found.ids()
    assert found.ids() == before
    assert len(before) == 1
    del first
    torch.cuda.empty_cache()
    with pytest.raises(TransportError, match="cuPointerGetAttribute"):
        found.ids()


def test_what_the_count_of_the_allocator_does_not_show_is_found_when_it_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, numbers, asked = [0], [7], []
    monkeypatch.setattr(memory, "_given_back", lambda device: counts[0])
    monkeypatch.setattr(cudadriver, "allocation_ids", lambda bases, device: (asked.append(bases), (numbers[0],))[1])
    found = memory.Allocations([])
    found._bases, found._counted = {0: {4096: None}}, {0}
    assert found.ids() == (7,)
    assert found.is_confirmed
    assert found.ids() == (7,)
    assert (len(asked), found.is_confirmed) == (1, False)
    assert found.confirm()
    assert (len(asked), found.is_confirmed) == (2, True)
    counts[0], numbers[0] = 1, 8
    assert found.ids() == (8,)
    numbers[0] = 9  # and the count was set back to what it was
    assert found.ids() == (8,)
    assert not found.confirm()
    assert found.ids() == (9,)
    assert found.is_confirmed


@pytest.mark.gpu
def test_only_what_torch_gave_back_makes_it_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_COUNTED_FROM", 1)
    kept, gone = (torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    found = memory.Allocations([kept], counted=True)
    asked: list[int] = []
    ask = cudadriver.allocation_ids
    monkeypatch.setattr(cudadriver, "allocation_ids", lambda bases, device: (asked.append(1), ask(bases, device))[1])
    before = found.ids()
    assert found.ids() == before
    assert len(asked) == 1
    del gone
    torch.cuda.empty_cache()
    assert found.ids() == before
    assert found.ids() == before
    assert len(asked) == 2


@pytest.mark.gpu
def test_memory_that_torch_did_not_take_is_asked_about_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_COUNTED_FROM", 1)
    arena = memory.Arena(64 << 20, torch.device("cuda", 0))
    found = memory.Allocations([arena.tensor], counted=True)
    asked: list[int] = []
    ask = cudadriver.allocation_ids
    monkeypatch.setattr(cudadriver, "allocation_ids", lambda bases, device: (asked.append(1), ask(bases, device))[1])
    assert found.ids() == found.ids()
    assert len(asked) == 2


@pytest.mark.gpu
def test_another_allocation_at_the_same_address_has_another_number() -> None:
    first = cudadriver.allocate(64 << 20, 0)
    address, before = first.address, cudadriver.allocation_ids([first.address], 0)
    others = []
    for _ in range(20):
        del first
        first = cudadriver.allocate(64 << 20, 0)
        if first.address == address:
            break
        others.append(cudadriver.allocate(64 << 20, 0))
    else:
        pytest.skip("the driver never hands out the same address again")
    assert cudadriver.allocation_ids([address], 0) != before
