"""CUDA memory: arenas, what can be exported, and links of kinds `local` and `mapped` on one GPU.

The owner of mapped memory is another process, started from this file: CUDA cannot map memory into its own process.
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

from rdt_core import memory, transport, wire
from rdt_core.errors import TransportError
from rdt_core.transport import Copies, LocalExchange, Region

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

NBYTES = 64 << 20
PATIENCE_S = 60.0
VERSIONS = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")
OFFER = wire.LinkOffer(reader="r/0", incarnation="1", source=0, digest="")

CASES = {
    # region, offset, pitch, destination, offset, pitch, rows, row bytes
    "contiguous": [(0, 0, 0, 0, 0, 0, 1, NBYTES)],
    "strided": [(0, 64, 4096, 0, 0, 512, 9000, 512), (0, 3, 777, 0, 8_000_001, 333, 500, 101)],
    "few rows": [(0, 128, 1 << 20, 0, 64, 1 << 19, 7, 4096)],
    "many": [(0, 4096 * (8191 - i), 0, 0, 1000 * i, 0, 1, 1000) for i in range(8192)],
    "odd": [(0, 1000 * i + 1, 0, 0, 777 * i + 3, 0, 1, 501 + i % 7) for i in range(500)],
    "shared allocation": [(1, 5, 0, 0, 9, 0, 1, 1 << 20), (2, 0, 0, 0, 2 << 20, 0, 1, 1 << 20)],
}


def copies(name: str) -> Copies:
    return Copies(*np.array(CASES[name], dtype=np.int64).T.copy())


def contents(region: int, seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([region, seed]).integers(0, 256, nbytes, dtype=np.uint8)


def sizes() -> dict[int, int]:
    return {0: NBYTES, 1: (1 << 20) + 5, 2: 1 << 20}


def expected(name: str, seed: int) -> np.ndarray:
    regions = {region: contents(region, seed, nbytes) for region, nbytes in sizes().items()}
    result = np.full(NBYTES, 9, dtype=np.uint8)
    for region, offset, pitch, _, to, to_pitch, rows, size in CASES[name]:
        for row in range(rows):
            source, target = offset + row * pitch, to + row * to_pitch
            result[target : target + size] = regions[region][source : source + size]
    return result


class Owner:
    """An arena, and two tensors of torch's allocator that lie in one of its segments."""

    def __init__(self) -> None:
        self.arena = memory.Arena(NBYTES, "cuda")
        self.tensors = {0: self.arena.tensor}
        for region in (1, 2):
            self.tensors[region] = torch.zeros(sizes()[region], dtype=torch.uint8, device="cuda")

    def fill(self, seed: int) -> None:
        for region, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(contents(region, seed, tensor.numel())))
        torch.cuda.synchronize()

    def manifest(self, kind: str, exchange: LocalExchange | None = None) -> wire.SourceManifest:
        self.endpoint = transport.make_source_endpoint(kind, exchange=exchange)
        regions = tuple(self.endpoint.export(Region(region, tensor)) for region, tensor in self.tensors.items())
        return wire.SourceManifest(
            group="g", rank=0, world_size=1, versions=VERSIONS, node=transport.node("cuda"), mode="live",
            mode_reason="", tensors=(), shards=(), regions=regions, kinds=(kind,),
        )  # fmt: skip


def serve() -> None:
    """The owner's process: writes its manifest in hex, then fills on request."""
    owner = Owner()
    sys.stdout.write(wire.encode(owner.manifest("mapped")).hex() + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        owner.fill(int(line))
        sys.stdout.write("filled\n")
        sys.stdout.flush()


class Remote:
    """The owner's process as seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def fill(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        assert self.line() == "filled"


@contextmanager
def remote_owner() -> Iterator[tuple[Remote, wire.SourceManifest]]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        remote = Remote(process)
        yield remote, wire.decode(bytes.fromhex(remote.line()), wire.SourceManifest)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["local", "mapped"])
def link(request: pytest.FixtureRequest) -> Iterator[tuple[Owner | Remote, transport.ReaderEndpoint]]:
    if request.param == "local":
        exchange = LocalExchange()
        owner = Owner()
        manifest = owner.manifest("local", exchange)
        reader = transport.make_reader_endpoint("local", exchange=exchange)
        reader.connect(manifest, OFFER, [])
        yield owner, reader
        reader.close()
        return
    with remote_owner() as (remote, manifest):
        assert transport.available("mapped", transport.node("cuda"), manifest) is None
        reader = transport.make_reader_endpoint("mapped")
        reader.connect(manifest, OFFER, [])
        yield remote, reader
        reader.close()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", list(CASES))
def test_bytes_land_and_are_fresh_each_time(
    link: tuple[Owner | Remote, transport.ReaderEndpoint], name: str, device: str
) -> None:
    owner, reader = link
    target = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    transfer = reader.prepare(0, copies(name), [target])
    for seed in (1, 2):
        owner.fill(seed)
        target.fill_(9)
        transfer.post()
        transfer.wait(time.monotonic() + PATIENCE_S)
        assert np.array_equal(target.cpu().numpy(), expected(name, seed))
    transfer.release()


def test_owner_that_died_is_noticed() -> None:
    with remote_owner() as (remote, manifest):
        reader = transport.make_reader_endpoint("mapped")
        reader.connect(manifest, OFFER, [])
        target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        transfer = reader.prepare(0, copies("contiguous"), [target])
        remote.process.kill()
        remote.process.wait()
        with pytest.raises(TransportError, match="has ended"):
            transfer.post()
        reader.close()


def test_same_process_is_refused() -> None:
    manifest = Owner().manifest("mapped")
    reason = transport.available("mapped", transport.node("cuda"), manifest)
    assert reason is not None
    assert "same process" in reason
    with pytest.raises(TransportError, match="very process"):
        transport.make_reader_endpoint("mapped").connect(manifest, OFFER, [])


def test_expandable_segments_are_found_and_refused() -> None:
    """In a process of its own: the allocator's settings are read once."""
    program = (
        "import torch\n"
        "from rdt_core import memory, transport\n"
        "from rdt_core.errors import TransportError\n"
        "tensor = torch.zeros(32 << 20, dtype=torch.uint8, device='cuda')\n"
        "assert memory.is_expandable(tensor)\n"
        "assert not memory.is_expandable(memory.Arena(32 << 20, 'cuda').tensor)\n"
        "for kind in ('mapped', 'prepared'):\n"
        "    try:\n"
        "        transport.make_source_endpoint(kind).export(transport.Region(0, tensor))\n"
        "    except TransportError as error:\n"
        "        assert 'expandable segments' in str(error)\n"
        "    else:\n"
        "        raise SystemExit(kind + ' exported expandable memory')\n"
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not memory.is_expandable(torch.zeros(32 << 20, dtype=torch.uint8, device="cuda"))


def test_arena_gives_device_memory_back_and_refuses_too_much() -> None:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    arena = memory.Arena(1 << 30, "cuda")
    assert torch.cuda.mem_get_info()[0] <= free - (1 << 30)
    offset, span = arena.span(100)
    assert (offset, span.device.type) == (0, "cuda")
    del arena
    span.fill_(3)
    assert int(span.sum()) == 300
    del span
    assert torch.cuda.mem_get_info()[0] > free - (1 << 29)
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        memory.Arena(2 * total, "cuda")


if __name__ == "__main__":
    serve()
