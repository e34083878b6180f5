"""Digests: one value for the same bytes whatever their layout and device, another for any fault that moving can make.

The kernel runs in Triton's interpreter, in a process of its own started from this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_core import digests
from rdt_core.blocks import BLOCK_BYTES, PAGE_BYTES, PAGE_KEYS, WORD_KEYS, Blocks, cut, lengths
from rdt_core.digestcuda import launches
from rdt_core.digests import Digester
from rdt_core.errors import TransportError

pytestmark = pytest.mark.unit

WHOLE = 1 << 64


def build(rows: list[tuple[int, ...]]) -> Blocks:
    """Blocks from tuples in the order of their columns."""
    return Blocks(*np.array(rows, np.int64).reshape(-1, 5).T.copy())


def line(data: bytes, start: int, size: int) -> int:
    """The digest of a stretch of `data`."""
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return int(Digester(build([(0, start, 0, 1, size)]), {0: memory}).queue()()[0])


def reference(data: bytes) -> int:
    """The definition, number by number."""
    total = len(data) * 0x9E3779B97F4A7C15
    for page in range(-(-len(data) // PAGE_BYTES)):
        words = np.frombuffer(data[page * PAGE_BYTES :][:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"), "<u4").tolist()
        keyed = [(word + key) % 2**32 for word, key in zip(words, WORD_KEYS.ravel().tolist(), strict=True)]
        digest = sum(keyed[i] * keyed[i + 512] for i in range(512)) % WHOLE
        low, high = PAGE_KEYS[page].tolist()
        total += ((digest % 2**32 + low) % 2**32) * (((digest >> 32) + high) % 2**32)
    return total % WHOLE


def random_blocks(generator: np.random.Generator, size: int, count: int) -> Blocks:
    """Blocks of all alignments and shapes inside `size` bytes."""
    rows = []
    while len(rows) < count:
        unit = int(generator.choice([1, 2, 4, 8, 16, 16]))
        width = unit * int(generator.integers(1, 1 << int(generator.integers(1, 12))))
        height = int(generator.choice([1, 1, 2, 5, 300]))
        pitch = width + unit * int(generator.integers(0, 4))
        room = size - (height - 1) * pitch - width
        if room >= 0 and height * width <= BLOCK_BYTES:
            rows.append((0, unit * int(generator.integers(0, room // unit + 1)), pitch, height, width))
    return build(rows)


def streams(blocks: Blocks, data: bytes) -> list[bytes]:
    """The bytes of each block, one row after the other."""
    columns = zip(*(getattr(blocks, name).tolist() for name in Blocks.__slots__), strict=True)
    return [
        b"".join(data[offset + row * pitch :][:width] for row in range(height))
        for _, offset, pitch, height, width in columns
    ]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_digests_are_those_of_the_definition_whatever_the_layout(seed: int) -> None:
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, 1 << 17, dtype=np.uint8)
    blocks = random_blocks(generator, len(data), 12)
    memory = {0: torch.from_numpy(data)}
    found = Digester(blocks, memory).queue()()
    small = [(i, stream) for i, stream in enumerate(streams(blocks, data.tobytes())) if len(stream) < 20_000][:4]
    assert [int(found[i]) for i, _ in small] == [reference(stream) for _, stream in small]
    dense = b"".join(streams(blocks, data.tobytes()))
    ends = np.cumsum(blocks.nbytes)
    lines = build([(0, int(end - size), 0, 1, int(size)) for end, size in zip(ends, blocks.nbytes, strict=True)])
    packed = {0: torch.frombuffer(bytearray(dense), dtype=torch.uint8)}
    assert np.array_equal(Digester(lines, packed).queue()(), found)
    # torch's operations, which stand in where a GPU has no Triton
    assert np.array_equal(digests._TorchPart(blocks, memory).queue(None)(), found)


def test_large_blocks_rows_longer_than_what_is_gathered_and_many_memories() -> None:
    generator = np.random.default_rng(5)
    data = torch.from_numpy(generator.integers(0, 256, 9 << 20, dtype=np.uint8))
    rows = [
        (0, 0, 0, 1, BLOCK_BYTES),
        (0, 3, 0, 1, BLOCK_BYTES),
        (7, 1, 1_000_003, 4, 1_000_001),
        (7, 8, 12, 300_000, 4),
        (0, 5, 7, 1_000_000, 2),
        (7, 0, 0, 1, 1),
    ]
    memories = {0: data, 7: data.flip(0).contiguous()}
    found = Digester(build(rows), memories).queue()()
    assert np.array_equal(digests._TorchPart(build(rows), memories).queue(None)(), found)
    some = np.array([1, 2, 5])
    assert np.array_equal(Digester(build(rows), memories).queue(some)(), found[some])
    assert Digester(build([]), {}).queue()().tolist() == []


def test_the_same_bytes_have_the_same_digest_for_ever() -> None:
    # a number that both ends of a link must agree on, whatever they run
    data = bytes(range(256)) * 33
    assert line(data, 0, len(data)) == reference(data) == 5250831783759263100


def faults() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((96, 512)).astype(np.float32)
    changed = {}
    flipped = values.copy()
    flipped.view(np.uint8)[40, 17] ^= 1
    changed["a bit"] = values, flipped
    rows = values.copy()
    rows[[11, 50]] = rows[[50, 11]]
    changed["two rows that changed places"] = values, rows
    pages = values.reshape(-1, PAGE_BYTES // 4).copy()
    pages[[0, 9]] = pages[[9, 0]]
    changed["two pages that changed places"] = values, pages
    words = values.copy()
    words[0, [0, 1]] = words[0, [1, 0]]
    changed["two words that changed places"] = values, words
    signs = values.copy()
    signs[5, 6] *= -1
    signs[70, 6] *= -1
    changed["two signs"] = values, signs
    near = values.copy()
    near[5, 6] *= -1
    near[5, 7] *= -1
    changed["two signs side by side"] = values, near
    halves = values.astype(np.float16)
    shifted = np.roll(halves, 1, axis=1)
    changed["columns that moved by one"] = halves, shifted
    stale = values.copy()
    stale[:, 256:] = 0
    changed["half of every row that never came"] = values, stale
    return changed


@pytest.mark.parametrize("fault", faults())
def test_faults_change_the_digest(fault: str) -> None:
    good, bad = (array.tobytes() for array in faults()[fault])
    assert line(good, 0, len(good)) != line(bad, 0, len(bad))


def test_two_flipped_signs_escape_sums_and_xors_of_words() -> None:
    good, bad = (array.view(np.uint32).ravel() for array in faults()["two signs"])
    assert not np.array_equal(good, bad)
    assert good.sum(dtype=np.uint32) == bad.sum(dtype=np.uint32)
    assert np.bitwise_xor.reduce(good) == np.bitwise_xor.reduce(bad)
    assert line(good.tobytes(), 0, good.nbytes) != line(bad.tobytes(), 0, bad.nbytes)


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_any_changed_byte_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    other = draw.draw(st.integers(1, 255))
    changed = bytearray(data)
    changed[place] ^= other
    assert line(data, 0, len(data)) != line(bytes(changed), 0, len(data))
    assert line(data, 0, len(data)) != line(data + b"\0", 0, len(data) + 1)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), max_size=6),
    st.integers(1, 64),
)
def test_cuts_are_the_copies_in_order(copies: list[tuple[int, int]], limit: int) -> None:
    rows, widths = (np.array([copy[axis] for copy in copies], np.int64) for axis in range(2))
    found = cut(rows, widths, limit)
    assert (found.rows * found.row_bytes <= limit).all()
    pitch = widths + 3
    expected = [
        (number, row * (width + 3) + byte)
        for number, (height, width) in enumerate(copies)
        for row in range(height)
        for byte in range(width)
    ]
    shift = found.shift(pitch)
    covered = [
        (int(found.parent[i]), int(shift[i] + row * pitch[found.parent[i]] + byte))
        for i in range(len(found))
        for row in range(int(found.rows[i]))
        for byte in range(int(found.row_bytes[i]))
    ]
    assert covered == expected


def test_copies_that_no_model_has_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(TransportError, match=r"2 copies make up 2\.2e\+12 blocks to be verified"):
        cut(np.array([1, 1]), np.array([2**62, 2**62]))
    with pytest.raises(TransportError, match="blocks to be verified"):
        cut(np.array([2**62]), np.array([2**62]))


@pytest.mark.parametrize(
    "row",
    [
        (0, 0, 0, 1, 101),
        (0, 90, 5, 3, 1),
        (0, -1, 0, 1, 1),
        (0, 0, 2**62, 5, 1),
        (0, 0, -8, 2, 8),
        (0, 0, 0, 0, 8),
        (0, 0, 0, BLOCK_BYTES, 2),
    ],
)
def test_blocks_outside_their_memory_are_refused(row: tuple[int, ...]) -> None:
    with pytest.raises(TransportError, match=r"here: block 1 of 2 is .* lie inside their memory"):
        Digester(build([(0, 0, 0, 1, 100), row]), {0: torch.zeros(100, dtype=torch.uint8)}, "here")
    with pytest.raises(TransportError, match=r"here: blocks lie in memory \[1\]; known: \[0\]"):
        Digester(build([(1, 0, 0, 1, 1)]), {0: torch.zeros(100, dtype=torch.uint8)}, "here")


def test_without_triton_torch_makes_the_digests_of_cuda_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digests._has_kernel.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not digests._has_kernel()
    assert "Triton is not installed" in caplog.text
    digests._has_kernel.cache_clear()


def test_the_kernel_makes_the_same_digests() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


def interpret() -> None:
    """The other process: runs the kernel on CPU tensors, whose addresses the interpreter takes as they are."""
    from rdt_core import digestkernel

    words, pages = (torch.from_numpy(key.view(np.int32).copy()) for key in (WORD_KEYS, PAGE_KEYS))
    kinds = set()
    for seed in range(2):
        generator = np.random.default_rng(seed)
        memory = torch.from_numpy(generator.integers(0, 256, 1 << 18, dtype=np.uint8))
        blocks = random_blocks(generator, len(memory), 60)
        wanted = Digester(blocks, {0: memory}).queue()()
        result = torch.zeros(len(blocks), dtype=torch.int64)
        for launch in launches(memory.data_ptr() + blocks.offset, blocks, digestkernel.TILE_PAGES):
            table, owners = torch.from_numpy(launch.table), torch.from_numpy(launch.owners)
            digestkernel.launch(table, owners, words, pages, result, launch.width, launch.flat)
            kinds.add((launch.width, launch.flat))
        found = result.numpy().view(np.uint64) + lengths(blocks.nbytes)
        assert np.array_equal(found, wanted), f"seed {seed}"
    assert kinds == {(width, flat) for width in (16, 4, 2, 1) for flat in (True, False)}, kinds
    print("equal")


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
def test_aligned_blocks_are_read_sixteen_bytes_at_a_time(flat: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rdt_core import digestkernel

    kernel, constants = digestkernel.digest_tiles, digestkernel.constants(16, flat)
    pointers = {"table": "*i64", "owners": "*i32", "word_keys": "*i32", "page_keys": "*i32", "result": "*i64"}
    source = ASTSource(
        fn=kernel,
        signature={**pointers, **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": digestkernel.WARPS})
    loads = Counter(re.findall(r"\bld\.global\.([.\w]+)", compiled.asm["ptx"]))
    bytes_of_a_thread = digestkernel.TILE_PAGES * PAGE_BYTES // (32 * digestkernel.WARPS)
    assert loads["v4.b32"] == bytes_of_a_thread // 16


def test_a_cpu_digests_at_the_rate_of_memory_not_of_an_interpreter() -> None:
    memory = {0: torch.randint(0, 256, (64 << 20,), dtype=torch.uint8)}
    blocks = build([(0, start, 0, 1, BLOCK_BYTES) for start in range(0, 64 << 20, BLOCK_BYTES)])
    digester = Digester(blocks, memory)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        digester.queue()()
        seconds.append(time.perf_counter() - started)
    rate = (64 << 20) / min(seconds) / 1e9
    print(f"{rate:.1f} GB/s")
    assert rate > 0.2  # 5 where nothing else runs; a loop over words in Python has 0.01


if __name__ == "__main__":
    interpret()
