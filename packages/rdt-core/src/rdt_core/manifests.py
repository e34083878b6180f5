"""The manifests of all source ranks as one message, in which is said once what several of them say.

Replicas of data parallelism declare the same boxes, and all ranks name the same tensors. Every engine rank reads the manifests
of every source rank, so that what a rank says beyond the others is what a large group pays for. Refuses what was damaged, and
what would unpack to more than a message may have.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import cache

import msgspec

from . import wire
from .errors import WireError

_LEVEL = 1  # of zlib: higher ones cost more time than the bytes take on a network


class _Rank(wire.Struct, frozen=True):
    manifest: wire.SourceManifest  # without tensors and shards
    tensors: int  # which list
    shards: int  # which list


class _Joined(wire.Struct, frozen=True):
    tensors: tuple[wire.TensorMeta, ...]  # all that any rank knows
    lists: tuple[bytes, ...]  # of ranks' tensors: uint32, places in `tensors`
    shards: tuple[tuple[wire.ShardMeta, ...], ...]
    ranks: tuple[_Rank, ...]


def join(manifests: Sequence[wire.SourceManifest]) -> bytes:
    """Returns the message: zlib over sealed msgpack."""
    tensors: dict[wire.TensorMeta, int] = {}
    lists: dict[bytes, int] = {}
    boxes: dict[tuple[wire.ShardMeta, ...], int] = {}
    ranks = []
    for one in manifests:
        places = array("I", [tensors.setdefault(meta, len(tensors)) for meta in one.tensors]).tobytes()
        known, own = lists.setdefault(places, len(lists)), boxes.setdefault(one.shards, len(boxes))
        ranks.append(_Rank(msgspec.structs.replace(one, tensors=(), shards=()), known, own))
    return zlib.compress(wire.encode(_Joined(tuple(tensors), tuple(lists), tuple(boxes), tuple(ranks))), _LEVEL)


def split(data: bytes) -> list[wire.SourceManifest]:
    """Returns the manifests, in the order in which they were joined.

    Raises:
        WireError: the message was damaged, is too large, or says what no manifest can.
    """
    unpacker = zlib.decompressobj()
    try:
        packed = unpacker.decompress(data, wire.MAX_MESSAGE_BYTES)
    except zlib.error as error:
        raise WireError(f"the manifests of source ranks, {len(data)} bytes, were damaged on the way: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise WireError(f"the manifests of source ranks, {len(data)} bytes, were cut on the way, or are too many")
    found = wire.decode(packed, _Joined)

    @cache
    def known(number: int) -> tuple[wire.TensorMeta, ...]:
        places = array("I")
        places.frombytes(found.lists[number])
        return tuple(found.tensors[place] for place in places)

    made = []
    try:
        for one in found.ranks:
            if min(one.tensors, one.shards) < 0:
                raise IndexError(min(one.tensors, one.shards))
            whole = msgspec.structs.replace(one.manifest, tensors=known(one.tensors), shards=found.shards[one.shards])
            wire.validate(whole)
            made.append(whole)
    except (IndexError, ValueError) as error:
        raise WireError(f"the manifests of source ranks name a list or a tensor that is not there: {error}") from None
    return made
