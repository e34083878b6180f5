"""Gathered copies without a GPU: how spans are cut, what the kernel does in Triton's interpreter, what it compiles to.

The interpreter runs in a process of its own, started from this file: Triton decides when a kernel is defined.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_core import wire
from rdt_core.errors import TransportError
from rdt_core.transport import Copies, CopyProgram, can_map, copying, gathering
from rdt_core.transport.gathering import Launch, Spans, split
from rdt_core.transport.mapped import MappedReader

pytestmark = pytest.mark.unit


def build(rows: list[tuple[int, ...]]) -> Spans:
    """Spans from tuples in the order of their columns."""
    return Spans(*np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy())


def reference(spans: Spans, source: np.ndarray, destination: np.ndarray) -> None:
    """Copies one row after the other; addresses are places in the two arrays."""
    for i in range(len(spans)):
        for row in range(int(spans.rows[i])):
            start = int(spans.source[i] + row * spans.source_pitch[i])
            to = int(spans.destination[i] + row * spans.destination_pitch[i])
            destination[to : to + int(spans.row_bytes[i])] = source[start : start + int(spans.row_bytes[i])]


def pieces(launch: Launch, block: int) -> list[tuple[int, int, int, int]]:
    """What the blocks of a launch copy, by the words of `Launch`: (block, source, destination, bytes)."""
    result = []
    for number, owner in enumerate(launch.owners.tolist()):
        source, destination, source_pitch, destination_pitch, rows, size, first, height = launch.table[owner].tolist()
        part = number - first
        assert part >= 0
        if launch.flat:
            assert rows == 1
            start = part * block
            result.append((number, source + start, destination + start, min(size - start, block)))
            continue
        for row in range(part * height, min(rows, (part + 1) * height)):
            result.append((number, source + row * source_pitch, destination + row * destination_pitch, size))
    return result


def random_spans(generator: np.random.Generator, count: int, largest: int) -> tuple[Spans, int, int]:
    """Disjoint spans, empty ones too, one after the other on both sides, with the sizes that both sides need."""
    source, target, rows = 0, 0, []
    for _ in range(count):
        unit = int(generator.choice([1, 2, 4, 8, 16, 16, 16]))
        size = unit * int(generator.integers(0, largest // unit + 1))
        height = int(generator.choice([0, 1, 1, 1, 2, 3, 17]))
        pitch, to_pitch = (size + unit * int(generator.integers(0, 4)) for _ in range(2))
        source += -source % unit + unit * int(generator.integers(0, 3))
        target += -target % unit + unit * int(generator.integers(0, 3))
        rows.append((source, target, pitch, to_pitch, height, size))
        source += max(height, 1) * pitch
        target += max(height, 1) * to_pitch
    return build(rows), source + 1, target + 1


@given(seed=st.integers(0, 2**32), count=st.integers(0, 12), block=st.sampled_from([16, 48, 64, 256]))
def test_blocks_copy_what_the_spans_say_and_each_byte_once(seed: int, count: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    spans, source_bytes, target_bytes = random_spans(generator, count, 200)
    data = generator.integers(0, 256, source_bytes, dtype=np.uint8)
    wanted, found = (np.full(target_bytes, 9, dtype=np.uint8) for _ in range(2))
    times = np.zeros(target_bytes, dtype=np.int64)
    reference(spans, data, wanted)
    for launch in split(spans, block):
        assert launch.table.dtype == np.int64
        assert launch.owners.dtype == np.int32
        moved: Counter[int] = Counter()
        for number, start, to, size in pieces(launch, block):
            assert size > 0
            assert start % launch.width == to % launch.width == size % launch.width == 0
            found[to : to + size] = data[start : start + size]
            times[to : to + size] += 1
            moved[number] += size
        assert len(moved) == len(launch.owners)
        assert max(moved.values()) <= block
    assert np.array_equal(found, wanted)
    assert times.max() <= 1
    assert times.sum() == spans.nbytes


def test_addresses_and_lengths_beyond_four_gigabytes() -> None:
    block, base = 64 << 10, 0x7F12_3400_0000
    spans = build(
        [
            (base, base + (1 << 40), 0, 0, 1, (5 << 30) + 48),
            (base + (6 << 30), base + (2 << 40), 3 << 30, 2 << 30, 4, 256),
        ]
    )
    flat, strided = split(spans, block)
    assert (flat.width, flat.flat, strided.width, strided.flat) == (16, True, 16, False)
    assert len(flat.owners) == (5 << 30) // block + 1
    *_, last = pieces(Launch(16, True, flat.table, flat.owners), block)
    assert last[1:] == (base + (5 << 30), base + (1 << 40) + (5 << 30), 48)
    assert [piece[1:] for piece in pieces(strided, block)] == [
        (base + (6 << 30) + row * (3 << 30), base + (2 << 40) + row * (2 << 30), 256) for row in range(4)
    ]


def test_pitches_without_a_second_row_do_not_narrow_the_words() -> None:
    (launch,) = split(build([(0, 64, 1, 3, 1, 32)]), 64)
    assert (launch.width, launch.flat) == (16, True)


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, 16 << 10), (1 << 20, 16 << 10), (40 << 20, 32 << 10), (1 << 30, 64 << 10)]
)
def test_blocks_shrink_until_there_are_enough(nbytes: int, expected: int) -> None:
    assert gathering.block_bytes(nbytes) == expected


def test_the_kernel_equals_row_by_row_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


def interpret() -> None:
    """The other process: runs the kernel on CPU tensors, whose addresses the interpreter takes as they are."""
    from rdt_core.transport import gatherkernel

    def run(spans: Spans, block: int, words: int) -> None:
        for launch in split(spans, block):
            table, owners = torch.from_numpy(launch.table), torch.from_numpy(launch.owners)
            gatherkernel.launch(table, owners, block, launch.width, launch.flat, words=words)

    widths = set()
    for seed in range(25):
        generator = np.random.default_rng(seed)
        spans, source_bytes, target_bytes = random_spans(generator, 8, 400)
        data = generator.integers(0, 256, source_bytes, dtype=np.uint8)
        wanted = np.full(target_bytes, 9, dtype=np.uint8)
        reference(spans, data, wanted)
        source, target = torch.from_numpy(data.copy()), torch.full((target_bytes,), 9, dtype=torch.uint8)
        moved = Spans(
            spans.source + source.data_ptr(),
            spans.destination + target.data_ptr(),
            *(getattr(spans, name) for name in ("source_pitch", "destination_pitch", "rows", "row_bytes")),
        )
        block, words = int(generator.choice([64, 256, 1024])), int(generator.choice([4, 16, 64]))
        widths |= {(launch.width, launch.flat) for launch in split(moved, block)}
        run(moved, block, words)
        assert np.array_equal(target.numpy(), wanted), f"seed {seed}"
        assert np.array_equal(source.numpy(), data), f"seed {seed}: the source was written"
    assert widths == {(width, flat) for width in (16, 8, 4, 2, 1) for flat in (True, False)}, widths
    # pages that nobody touches cost nothing
    source, target = (torch.empty(5 << 30, dtype=torch.uint8) for _ in range(2))
    far = build([(source.data_ptr() + 160, target.data_ptr() + 320, 2_200_000_000, 2_300_000_000, 3, 1600)])
    starts = [(160 + row * 2_200_000_000, 320 + row * 2_300_000_000) for row in range(3)]
    for row, (start, to) in enumerate(starts):
        source[start : start + 1600] = row + 1
        target[to : to + 1616] = 9
    run(far, 2048, 64)
    run(build([(source.data_ptr() + starts[2][0], target.data_ptr() + (3 << 30), 0, 0, 1, 1600)]), 512, 16)
    for row, (_, to) in enumerate(starts):
        assert target[to : to + 1600].tolist() == [row + 1] * 1600
        assert target[to + 1600 : to + 1616].tolist() == [9] * 16
    assert target[3 << 30 : (3 << 30) + 1600].tolist() == [3] * 1600
    # the last block alone of one long row: its number is counted from a first block before this launch
    target[starts[2][0] : starts[2][0] + 1616] = 9
    length, block = starts[2][0] + 1600, 1 << 20
    last = length // block
    table = torch.tensor([[source.data_ptr(), target.data_ptr(), 0, 0, 1, length, -last, 0]], dtype=torch.int64)
    gatherkernel.launch(table, torch.zeros(1, dtype=torch.int32), block, 8, True, words=1 << 14)
    assert target[starts[2][0] : starts[2][0] + 1616].tolist() == [3] * 1600 + [9] * 16
    print("equal")


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
@pytest.mark.parametrize("width", [16, 8, 2])
def test_aligned_spans_move_sixteen_bytes_at_a_time(width: int, flat: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rdt_core.transport import gatherkernel

    constants = gatherkernel.constants(width, flat)
    kernel = gatherkernel.copy_blocks
    source = ASTSource(
        fn=kernel,
        signature={
            "table": "*i64",
            "owners": "*i32",
            "blocks": "i32",
            "block": "i32",
            **dict.fromkeys(constants, "constexpr"),
        },
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": gatherkernel.WARPS})
    words = {16: "v2.b64", 8: "b64", 2: "b16"}[width]
    moves = re.findall(r"\b(ld|st)\.global\.([.\w]+)", compiled.asm["ptx"])
    stores = {kind for move, kind in moves if move == "st"}
    assert stores == {words}
    each = gatherkernel.WORDS // (32 * gatherkernel.WARPS) // (2 if width == 16 else 1)
    # the flat kernel has a whole and a partial tile
    assert moves.count(("st", words)) == each * (2 if flat else 1)
    if width != 8:  # the table is read in words of 8 bytes
        assert moves.count(("ld", words)) == moves.count(("st", words))


def test_an_engine_that_does_not_exist_is_refused() -> None:
    one = Copies(*np.array([[0, 0, 0, 0, 0, 0, 1, 8]], dtype=np.int64).T.copy())
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"no copy engine is named 'dma'; known: foreach, gather"):
        CopyProgram(one, {0: source}, [target], engine="dma")
    # on a CPU the choice has no effect
    CopyProgram(one, {0: source}, [target], engine="gather").run()
    assert torch.equal(source, target)


def test_gathering_into_a_cpu_is_refused() -> None:
    with pytest.raises(TransportError, match="here: expected a CUDA device with an index, found cpu"):
        gathering.GatherProgram(build([]), torch.device("cpu"), [], [], "here")


def test_missing_means_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in str(gathering.unavailable())


def test_without_triton_torch_copies_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copying.default_engine.cache_clear()
    assert copying.default_engine() == "gather"
    copying.default_engine.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert copying.default_engine() == "foreach"
    assert "Triton is not installed" in caplog.text
    copying.default_engine.cache_clear()


def test_a_reader_without_a_gpu_maps_no_gpu_memory() -> None:
    def node(device: str, uuid: str) -> wire.NodeMeta:
        return wire.NodeMeta(node_id="", boot_id="b", hostname="h", pid=len(uuid), device=device, device_uuid=uuid)

    region = wire.RegionMeta(id=0, address=0, nbytes=8, device="cuda", device_index=0, mapped=b"x")
    assert "no GPU that could map it" in str(can_map(node("cpu", ""), node("cuda", "GPU-a"), region))
    assert "no GPU that could map it" in str(can_map(node("cuda", "GPU-bb"), node("cuda", "GPU-a"), region))


def test_a_reader_keeps_the_engine_that_it_was_given() -> None:
    assert MappedReader("gather")._engine == "gather"
    assert MappedReader()._engine is None


if __name__ == "__main__":
    interpret()
