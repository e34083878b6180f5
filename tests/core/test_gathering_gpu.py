"""Every copy engine between CUDA memory: one device, two devices, and memory mapped from another process.

Cases with two devices are skipped where there is one. The owner of mapped memory is a process started from this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rdt_core import cudadriver, memory, transport, wire
from rdt_core.errors import TransportError
from rdt_core.transport import Copies, CopyProgram, Region, gathering
from rdt_core.transport.copying import Engine
from rdt_core.transport.mapped import MappedReader

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

NBYTES = 32 << 20
PATIENCE_S = 60.0
ENGINES: tuple[Engine, ...] = ("foreach", "gather")
VERSIONS = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")
OFFER = wire.LinkOffer(reader="r/0", incarnation="1", source=0, digest="")


def layout(seed: int, count: int = 300) -> Copies:
    """Disjoint 2-D copies of all alignments, one after the other on both sides."""
    generator = np.random.default_rng(seed)
    source = target = 0
    table = []
    while len(table) < count:
        unit = int(generator.choice([1, 2, 4, 8, 16, 16, 16]))
        size = unit * int(generator.integers(1, (1 << int(generator.integers(4, 18))) // unit + 2))
        rows = int(generator.choice([1, 1, 1, 2, 7, 40]))
        pitch, to_pitch = (size + unit * int(generator.integers(0, 9)) for _ in range(2))
        source += -source % unit + unit * int(generator.integers(0, 3))
        target += -target % unit + unit * int(generator.integers(0, 3))
        if max(source + rows * pitch, target + rows * to_pitch) > NBYTES:
            break
        table.append((0, source, pitch, 0, target, to_pitch, rows, size))
        source += rows * pitch
        target += rows * to_pitch
    return Copies(*np.array(table, dtype=np.int64).T.copy())


def contents(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


def expected(copies: Copies, data: np.ndarray) -> np.ndarray:
    result = np.full(NBYTES, 9, dtype=np.uint8)
    for i in range(len(copies)):
        for row in range(int(copies.rows[i])):
            start = int(copies.source_offset[i] + row * copies.source_pitch[i])
            to = int(copies.destination_offset[i] + row * copies.destination_pitch[i])
            result[to : to + int(copies.row_bytes[i])] = data[start : start + int(copies.row_bytes[i])]
    return result


def device_of_owner(name: str) -> int:
    if name == "peer" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return 1 if name == "peer" else 0


@pytest.mark.parametrize("own_stream", [True, False], ids=["stream", "default stream"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("devices", ["same", "peer"])
def test_engines_equal_row_by_row(devices: str, engine: Engine, own_stream: bool) -> None:
    owner = device_of_owner(devices)
    source = torch.zeros(NBYTES, dtype=torch.uint8, device=f"cuda:{owner}")
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    copies = layout(3)
    assert set(copies.rows.tolist()) > {1, 40}
    stream = torch.cuda.Stream(0) if own_stream else torch.cuda.default_stream(0)
    with torch.cuda.stream(stream):
        program = CopyProgram(copies, {0: source}, [target], engine=engine)
        for seed in (1, 2):
            source.copy_(torch.from_numpy(contents(seed)))
            torch.cuda.synchronize(owner)
            # the copies must wait for what was queued before them, and what is queued after must see them
            target.fill_(9)
            program.run()
            found = target.clone()
            assert np.array_equal(found.cpu().numpy(), expected(copies, contents(seed)))
    assert np.array_equal(source.cpu().numpy(), contents(2))


def test_places_beyond_two_gigabytes() -> None:
    far = 5 << 30
    source, target = (torch.zeros(far + 4096, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    source[far : far + 4096] = 7
    source[1024:2048] = 5
    rows = [(0, 1024, far - 1024, 0, 3 << 30, 1 << 30, 2, 1000), (0, far + 1000, 0, 0, far + 16, 0, 1, 3000)]
    CopyProgram(Copies(*np.array(rows, dtype=np.int64).T.copy()), {0: source}, [target], engine="gather").run()
    assert target[3 << 30 : (3 << 30) + 1000].unique().tolist() == [5]
    assert target[4 << 30 : (4 << 30) + 1000].unique().tolist() == [7]
    assert target[far + 16 : far + 3016].unique().tolist() == [7]
    assert int(target.count_nonzero()) == 5000


def test_one_long_span_beyond_four_gigabytes() -> None:
    nbytes = (4 << 30) + 48
    source = torch.full((nbytes,), 3, dtype=torch.uint8, device="cuda:0")
    source[-1] = 4
    target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    one = Copies(*np.array([[0, 0, 0, 0, 0, 0, 1, nbytes]], dtype=np.int64).T.copy())
    CopyProgram(one, {0: source}, [target], engine="gather").run()
    assert torch.equal(source, target)


def test_memory_that_the_device_cannot_reach_is_refused() -> None:
    pageable = torch.zeros(64, dtype=torch.uint8)
    spans = gathering.Spans(*np.array([[pageable.data_ptr(), 0, 0, 0, 1, 64]], dtype=np.int64).T.copy())
    with pytest.raises(TransportError, match="lie on cpu, expected memory of a CUDA device"):
        gathering.GatherProgram(spans, torch.device("cuda", 0), [pageable], [])
    assert not cudadriver.reachable(0x1000, 0)


class Owner:
    """The owner's process as seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.manifest = wire.decode(bytes.fromhex(self.line()), wire.SourceManifest)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def fill(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        assert self.line() == "filled"


@contextmanager
def owner_on(device: int) -> Iterator[Owner]:
    process = subprocess.Popen(
        [sys.executable, __file__, str(device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        yield Owner(process)
    finally:
        process.kill()
        process.wait()


def serve(device: int) -> None:
    """The owner's process: writes its manifest in hex, then fills on request."""
    torch.cuda.set_device(device)
    arena = memory.Arena(NBYTES, f"cuda:{device}")
    endpoint = transport.make_source_endpoint("mapped")
    regions = (endpoint.export(Region(0, arena.tensor)),)
    manifest = wire.SourceManifest(
        group="g", rank=0, world_size=1, versions=VERSIONS, node=transport.node(f"cuda:{device}"), mode="live",
        mode_reason="", tensors=(), shards=(), regions=regions, kinds=("mapped",),
    )  # fmt: skip
    sys.stdout.write(wire.encode(manifest).hex() + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        arena.tensor.copy_(torch.from_numpy(contents(int(line))))
        torch.cuda.synchronize()
        sys.stdout.write("filled\n")
        sys.stdout.flush()


@pytest.mark.parametrize("devices", ["same", "peer"])
def test_mapped_memory_of_another_process(devices: str) -> None:
    copies = layout(4)
    with owner_on(device_of_owner(devices)) as owner:
        for engine in ENGINES:
            reader = MappedReader(engine)
            target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
            reader.register(target)
            reader.connect(owner.manifest, OFFER, [])
            transfer = reader.prepare(0, copies, [target])
            for seed in (1, 2):
                owner.fill(seed)
                target.fill_(9)
                transfer.post()
                transfer.wait(time.monotonic() + PATIENCE_S)
                assert np.array_equal(target.cpu().numpy(), expected(copies, contents(seed))), engine
            transfer.release()
            reader.close()


def test_another_gpu_is_a_mapped_link() -> None:
    with owner_on(device_of_owner("peer")) as owner:
        assert transport.available("mapped", transport.node("cuda:0"), owner.manifest) is None
        assert "no GPU that could map it" in str(transport.available("mapped", transport.node("cpu"), owner.manifest))


def test_a_gpu_that_the_reader_does_not_see_can_be_mapped() -> None:
    """The reader's process sees its own GPU only, as Ray arranges it."""
    with owner_on(device_of_owner("peer")) as owner:
        owner.fill(1)
        code = (
            "import sys, time, numpy as np, torch, test_gathering_gpu as t\n"
            "from rdt_core import transport, wire\n"
            "manifest = wire.decode(bytes.fromhex(sys.argv[1]), wire.SourceManifest)\n"
            "assert torch.cuda.device_count() == 1\n"
            "assert transport.available('mapped', transport.node('cuda:0'), manifest) is None\n"
            "reader = t.MappedReader()\n"
            "target = torch.full((t.NBYTES,), 9, dtype=torch.uint8, device='cuda:0')\n"
            "reader.register(target)\n"
            "reader.connect(manifest, t.OFFER, [])\n"
            "transfer = reader.prepare(0, t.layout(4), [target])\n"
            "transfer.post(); transfer.wait(time.monotonic() + 60)\n"
            "assert np.array_equal(target.cpu().numpy(), t.expected(t.layout(4), t.contents(1)))\n"
        )
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
        environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code, wire.encode(owner.manifest).hex()],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    serve(int(sys.argv[1]))
