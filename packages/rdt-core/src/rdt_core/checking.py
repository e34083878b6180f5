"""A comparison without a sync, as source ranks run it: digests of what they hold, of what engines hold, and a table.

Nothing is moved and nothing is written; engines go on generating. Only what landed in place can be compared: what an engine
casts, repacks or quantises when it loads is told as such, and so is what nobody takes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import wire
from .checks import Landed
from .control import Control
from .driver import Driver
from .errors import SyncError, WireError, text_of
from .geometry import Box
from .naming import Names, describe
from .publisher import Publisher
from .verifying import link_blocks

#: differing blocks of one link whose elements are looked at one by one
LOOKED_AT = 256
CHANGED = "the engine keeps it in another form"
IN_PART = "the engine keeps the other {} bytes in another form"


def check(
    control: Control,
    publisher: Publisher,
    token: str,
    driver: Driver,
    *,
    version: int | None,
    timeout_s: float,
) -> wire.CheckReport:
    """Takes part in a comparison of every attached replica with what the source ranks hold now. Called by all of them.

    Args:
        control: of the group, which this rank has joined with its present manifest.
        publisher: of this rank.
        token: with which it joined.
        driver: of the replicas; only rank 0's counts.
        version: last committed one that this rank knows.
        timeout_s: deadline of each wait.

    Raises:
        SyncError: a rank or replica failed or did not answer in time; the same on every rank.
    """
    rank = publisher.rank
    began = time.perf_counter()
    number = control.check_begin(rank, token, timeout_s)
    try:
        if rank == 0:
            driver.connect_stale(control, timeout_s)
            control.check_open(number, sorted(driver.clients))
        # rank 0 may use up a deadline to connect its replicas, and another one while they digest
        requests = control.check_requests(rank, number, 2 * timeout_s)
        control.check_source(rank, number, publisher.present(requests))
        if rank != 0:
            return control.check_outcome(number, 4 * timeout_s)
        driver.check(number, timeout_s)
        held, landed = control.check_result(number, timeout_s)
        _, manifests = control.sources(timeout_s)
        readers = [one for name in sorted(driver.clients) for one in control.replica_ready(name, timeout_s)]
        tensors = compare(manifests, readers, held, landed)
        report = wire.CheckReport(
            group=control.group,
            version=version,
            replicas=tuple(sorted(driver.clients)),
            seconds=time.perf_counter() - began,
            bytes=sum(tensor.bytes for tensor in tensors),
            tensors=tuple(tensors),
        )
        control.check_end(number, report)
        return report
    except Exception as error:
        failure = control.check_fail(number, f"source rank {rank}", text_of(error))
        raise SyncError(failure) from error


@dataclass(slots=True)
class _Found:
    """What is known of one tensor in one replica."""

    compared: int = 0
    changed: int = 0  # bytes that the engine keeps in another form
    differing: int = 0  # bytes of blocks that differ
    boxes: list[Box] = field(default_factory=list)
    where: set[tuple[int, str]] = field(default_factory=set)  # source rank and reader


def compare(
    manifests: Sequence[wire.SourceManifest],
    readers: Sequence[wire.EngineManifest],
    held: Mapping[int, Mapping[str, bytes]],
    landed: Mapping[str, Mapping[int, Landed]],
) -> list[wire.TensorCheck]:
    """Compares digests block by block, and tells the outcome by replica and tensor.

    Args:
        manifests: of all source ranks.
        readers: of all engine ranks.
        held: digests of each source rank, by reader.
        landed: digests of each engine rank, by source rank.

    Raises:
        WireError: two ends did not digest the same number of blocks.
    """
    names = {manifest.rank: Names(manifest) for manifest in manifests}
    shapes = {meta.name: meta for manifest in manifests for meta in manifest.tensors}
    found: dict[str, dict[str, _Found]] = {reader.replica: {} for reader in readers}
    for reader in readers:
        for request in reader.requests:
            mine = held.get(request.source, {}).get(reader.reader, b"")
            theirs, comparable = landed.get(reader.reader, {}).get(request.source, (b"", b""))
            _link(reader, request, names[request.source], mine, theirs, comparable, found[reader.replica])
    result = []
    for replica, tensors in found.items():
        for name, meta in shapes.items():
            result.append(_tell(replica, meta, tensors.get(name)))
    return result


def _link(
    reader: wire.EngineManifest,
    request: wire.ReadRequest,
    names: Names,
    mine: bytes,
    theirs: bytes,
    comparable: bytes,
    found: dict[str, _Found],
) -> None:
    link = link_blocks(request, names.manifest)
    if not len(mine) == len(theirs) == 8 * len(link) == 8 * len(comparable):
        raise WireError(
            f"engine rank {reader.reader} digested {len(theirs) / 8:g} blocks and source rank {request.source} "
            f"{len(mine) / 8:g} of {len(link)}; both ends must run the same rdt version"
        )
    known = np.frombuffer(comparable, np.uint8) != 0
    differs = known & (np.frombuffer(mine, "<u8") != np.frombuffer(theirs, "<u8"))
    nbytes = link.blocks.nbytes
    looked = 0
    for index in range(len(link)):
        round = int(link.round[index])
        for tensor in names.tensors(link.blocks, round, index):
            one = found.setdefault(names.manifest.tensors[tensor].name, _Found())
            if not known[index]:
                one.changed += int(nbytes[index])
                continue
            one.compared += int(nbytes[index])
            if differs[index]:
                one.differing += int(nbytes[index])
                one.where.add((request.source, reader.reader))
        if differs[index] and looked < LOOKED_AT:
            looked += 1
            for part in names.parts(link.blocks, round, index):
                found[names.manifest.tensors[part.tensor].name].boxes.append(part.box)


def _tell(replica: str, meta: wire.TensorMeta, one: _Found | None) -> wire.TensorCheck:
    if one is None:
        return wire.TensorCheck(name=meta.name, replica=replica, state="not taken", bytes=0)
    state, detail = "equal", ""
    if one.differing:
        state = "differs"
        rows = describe(meta.name, meta.shape, one.boxes).removeprefix(repr(meta.name)).strip()
        where = ", ".join(f"source rank {source} and {reader}" for source, reader in sorted(one.where)[:4])
        more = f" and {len(one.where) - 4} more" if len(one.where) > 4 else ""
        detail = f"{rows or 'somewhere'} ({where}{more})"
    elif one.changed:
        state = "not comparable"
        detail = IN_PART.format(one.changed) if one.compared else CHANGED
    return wire.TensorCheck(name=meta.name, replica=replica, state=state, bytes=one.compared, detail=detail)
