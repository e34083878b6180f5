"""Digests of CUDA memory: the same numbers as on a CPU, by the kernel and by torch, near the rate of the memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rdt_core import digests
from rdt_core.blocks import BLOCK_BYTES, Blocks
from rdt_core.digestcuda import KernelPart
from rdt_core.digests import Digester

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

NBYTES = 24 << 20


def layout(seed: int, count: int = 400) -> Blocks:
    """Blocks of all alignments and shapes in two memories, some as large as can be."""
    generator = np.random.default_rng(seed)
    rows = [(0, 16, 0, 1, BLOCK_BYTES), (1, 3, 0, 1, BLOCK_BYTES), (0, 2, 10, 2_000_000, 2), (1, 64, 8192, 1024, 4096)]
    while len(rows) < count:
        unit = int(generator.choice([1, 2, 4, 8, 16, 16, 16]))
        width = unit * int(generator.integers(1, 1 << int(generator.integers(1, 17))))
        height = int(generator.choice([1, 1, 2, 7, 300]))
        pitch = width + unit * int(generator.integers(0, 9))
        room = NBYTES - (height - 1) * pitch - width
        if room >= 0 and height * width <= BLOCK_BYTES:
            rows.append((len(rows) % 2, unit * int(generator.integers(0, room // unit + 1)), pitch, height, width))
    return Blocks(*np.array(rows, np.int64).T.copy())


@pytest.fixture
def memories() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {number: torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator) for number in range(2)}


def on_cuda(memories: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {number: memory.cuda() for number, memory in memories.items()}


@pytest.mark.parametrize("seed", range(3))
def test_digests_are_those_of_a_cpu(memories: dict[int, torch.Tensor], seed: int) -> None:
    blocks = layout(seed)
    wanted = Digester(blocks, memories).queue()()
    there = on_cuda(memories)
    digester = Digester(blocks, there)
    assert isinstance(digester._parts[0][1], KernelPart)
    for _ in range(2):
        assert np.array_equal(digester.queue()(), wanted)
    chosen = np.flatnonzero(np.random.default_rng(seed).random(len(blocks)) < 0.1)
    assert np.array_equal(digester.queue(chosen)(), wanted[chosen])
    assert np.array_equal(digests._TorchPart(blocks, there).queue(None)(), wanted)


def test_memory_of_both_kinds_at_once(memories: dict[int, torch.Tensor]) -> None:
    blocks = layout(9)
    wanted = Digester(blocks, memories).queue()()
    assert np.array_equal(Digester(blocks, {0: memories[0], 1: memories[1].cuda()}).queue()(), wanted)


def test_digests_are_of_what_was_written_before_on_the_stream(memories: dict[int, torch.Tensor]) -> None:
    there = on_cuda(memories)
    blocks = layout(4)
    digester = Digester(blocks, there)
    other = {number: memory.flip(0).contiguous() for number, memory in memories.items()}
    device = {number: memory.cuda() for number, memory in other.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for number in range(2):
            there[number].copy_(device[number])
        found = digester.queue()
        for number in range(2):
            there[number].zero_()
    assert np.array_equal(found(), Digester(blocks, other).queue()())


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("shape", ["flat", "rows"])
def test_rate(shape: str, width: int) -> None:
    size = 2 << 30
    memory = {0: torch.randint(0, 256, (size + 64,), dtype=torch.uint8, device="cuda")}
    start = 0 if width == 16 else width
    if shape == "flat":
        rows = [(0, at + start, 0, 1, BLOCK_BYTES) for at in range(0, size, BLOCK_BYTES)]
    else:  # half of every row of 8 KiB
        rows = [(0, at + start, 8192, 512, 4096) for at in range(0, size - 8192, BLOCK_BYTES)]
    blocks = Blocks(*np.array(rows, np.int64).T.copy())
    digester = Digester(blocks, memory)
    digester.queue()()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    waits = [digester.queue() for _ in range(5)]
    end.record()
    for wait in waits:
        wait()
    rate = 5 * int(blocks.nbytes.sum()) / begin.elapsed_time(end) / 1e6
    copied = torch.empty(size, dtype=torch.uint8, device="cuda")
    begin.record()
    for _ in range(5):
        copied.copy_(memory[0][:size])
    end.record()
    torch.cuda.synchronize()
    copying = 5 * size / begin.elapsed_time(end) / 1e6
    print(f"{shape}, {width}-byte words: {rate:.0f} GB/s; a copy of the same memory: {copying:.0f} GB/s")
    assert rate > (0.5 if width == 16 else 0.05) * copying
