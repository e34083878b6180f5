"""Who runs where: the bundles of a placement group in order, and trainer and engine ranks assigned to them. Pure, no Ray.

A seat is one bundle with the GPU found in it. Trainers take the first seats of the order, so that they fill nodes; an engine
that fits on one node never straddles two, and a larger one takes whole nodes. One rank a GPU: anything else is refused with
the reason, unless it is asked for as shared.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import PlacementError

SHARING_COSTS = (
    "each process on a shared GPU holds its own CUDA context and its own memory registered with NIXL, which cannot be "
    "offloaded while it is registered, and training and serving take turns on the same cores"
)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How many ranks an engine has, and how many replicas of it there are.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        replicas: engines of this shape.

    Raises:
        PlacementError: a size below 1.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.replicas) < 1:
            raise PlacementError(f"{self}: tp, pp and replicas are at least 1")

    @property
    def ranks(self) -> int:
        """Engine ranks of one replica, one GPU each."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Seat:
    """A bundle of the placement group and what was found in it.

    Attributes:
        bundle: its index in the placement group.
        node_id: Ray's node id.
        address: of the node, as Ray knows it.
        gpu: the GPU as Ray names it: an index on the node, or a UUID.
        uuid: of the GPU; empty where it is only a logical one.
        cpus: CPUs in the bundle.
    """

    bundle: int
    node_id: str
    address: str
    gpu: str
    uuid: str = ""
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class Ranks(Sequence[Seat]):
    """The seats of some ranks: rank i has seat i.

    Attributes:
        name: "trainer", "engine 0", …
        seats: in the order of ranks.
    """

    name: str
    seats: tuple[Seat, ...] = ()

    def __getitem__(self, rank: Any) -> Any:
        return self.seats[rank]

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def bundles(self) -> tuple[int, ...]:
        """Bundle index of each rank."""
        return tuple(seat.bundle for seat in self.seats)

    @property
    def bundle_list(self) -> str:
        """The bundle indices as engines read them from their environment: "6,7"."""
        return ",".join(str(bundle) for bundle in self.bundles)

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU of each rank, as Ray names it on its node."""
        return tuple(seat.gpu for seat in self.seats)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Node id of each rank."""
        return tuple(seat.node_id for seat in self.seats)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The distinct nodes, in the order of ranks."""
        return tuple(dict.fromkeys(self.node_ids))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every rank runs. Printed, it is a table.

    Attributes:
        trainers: source ranks.
        engines: one entry a replica, in the order in which they were asked for.
        others: further roles by name, such as a critic.
        spare: seats that nobody has.
        shared: whether roles share bundles.
        notes: what a reader should know about the result.
        group: Ray's placement group; None for a placement that was only computed.
        created: whether the group was made for this placement (and is removed with it).
    """

    trainers: Ranks
    engines: tuple[Ranks, ...] = ()
    others: Mapping[str, Ranks] = field(default_factory=dict)
    spare: tuple[Seat, ...] = ()
    shared: bool = False
    notes: tuple[str, ...] = ()
    group: Any = field(default=None, repr=False, compare=False)
    created: bool = False

    @property
    def roles(self) -> tuple[Ranks, ...]:
        """All roles: trainers, others, engines."""
        return (self.trainers, *self.others.values(), *self.engines)

    def share(self, bundle: int) -> float:
        """The part of a bundle's GPU and CPUs that each rank on it may ask for: 1 unless it is shared.

        The parts on a bundle never add up to more than the bundle, so that no rank waits for another to end.
        """
        ranks = sum(role.bundles.count(bundle) for role in self.roles)
        return math.floor(10_000 / max(1, ranks)) / 10_000  # Ray counts in ten-thousandths

    def __str__(self) -> str:
        rows = [("role", "rank", "bundle", "node", "address", "GPU", "UUID")]
        for role in (*self.roles, Ranks("spare", self.spare)):
            rows += [
                (
                    role.name,
                    str(rank),
                    str(seat.bundle),
                    seat.node_id[:12],
                    seat.address,
                    seat.gpu,
                    seat.uuid or "logical",
                )
                for rank, seat in enumerate(role)
            ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def order(seats: Sequence[Seat]) -> list[Seat]:
    """Sorts seats so that ranks taken from the front fill nodes: node density, then node, then GPU.

    The density of a node is the number of these seats on it; the densest come first. Nodes of equal density are sorted by
    address as numbers, GPUs as numbers too, so that node 10 does not come before node 9.
    """
    density = Counter(seat.node_id for seat in seats)
    return sorted(
        seats,
        key=lambda seat: (-density[seat.node_id], _address(seat.address), seat.node_id, _gpu(seat.gpu), seat.bundle),
    )


def demand(
    trainers: int, engines: Sequence[EngineShape], others: Mapping[str, int] | None = None, *, shared: bool = False
) -> int:
    """How many bundles of one GPU are needed.

    Raises:
        PlacementError: a negative number of ranks, a role's name taken twice, or nothing asked for.
    """
    wanted = {"trainer": trainers, **(others or {})}
    if "trainer" in (others or {}) or any(name.startswith("engine") for name in others or {}):
        raise PlacementError(f"other roles are named {sorted(others or {})}; 'trainer' and 'engine …' are taken")
    if min(wanted.values()) < 0:
        raise PlacementError(f"a number of ranks is negative: {wanted}")
    wanted["engines"] = sum(shape.ranks * shape.replicas for shape in engines)
    if not any(wanted.values()):
        raise PlacementError("nothing to place: neither trainers nor engines were asked for")
    return max(wanted.values()) if shared else sum(wanted.values())


def assign(
    seats: Sequence[Seat],
    *,
    trainers: int,
    engines: Sequence[EngineShape] = (),
    others: Mapping[str, int] | None = None,
    shared: bool = False,
) -> Placement:
    """Gives every rank a seat.

    Trainer rank i takes the i-th seat of `order`, other roles the next ones, engines what is left: an engine that fits on
    one node gets seats of one node, the larger ones first; one that does not takes as many whole nodes of equal size as it
    needs. Where engines do not fit behind trainers on the densest nodes, trainers start on the least dense one, which a
    note says.

    Args:
        seats: one for each bundle.
        trainers: source ranks.
        engines: shapes, in the order in which replicas are numbered.
        others: ranks of further roles by name.
        shared: let the roles share bundles: each starts at the first seat.

    Raises:
        PlacementError: too few bundles, a GPU in two bundles, or an engine that would straddle nodes.
    """
    others = dict(others or {})
    needed = demand(trainers, engines, others, shared=shared)
    _check_distinct(seats)
    if needed > len(seats):
        asked = ", ".join(
            [f"trainers {trainers}", *(f"{name} {count}" for name, count in others.items())]
            + [f"{shape.replicas} engines of {shape.ranks}" for shape in engines]
        )
        raise PlacementError(
            f"{needed} bundles of one GPU are needed ({asked}), and the placement group has {len(seats)}: ranks would "
            "share a GPU, and a rank that waits for the other's part never starts. Use a group of "
            f"{needed} bundles" + ("" if shared else f", or shared=True, where {SHARING_COSTS}")
        )
    dense_first = order(seats)
    try:
        return _assign(dense_first, trainers, engines, others, shared)
    except PlacementError as error:
        density = Counter(seat.node_id for seat in seats)
        try:
            placement = _assign(
                sorted(dense_first, key=lambda seat: density[seat.node_id]), trainers, engines, others, shared
            )
        except PlacementError:
            raise error from None
    note = "trainers start on the least dense node: on the densest, an engine that fits on one node would straddle two"
    return Placement(
        placement.trainers, placement.engines, placement.others, placement.spare, shared, (*placement.notes, note)
    )


def _assign(
    ordered: list[Seat], trainers: int, engines: Sequence[EngineShape], others: Mapping[str, int], shared: bool
) -> Placement:
    taken = 0
    roles = {}
    for name, count in {"trainer": trainers, **others}.items():
        start = 0 if shared else taken
        roles[name] = Ranks(name, tuple(ordered[start : start + count]))
        taken += count
    free = list(ordered if shared else ordered[taken:])
    shapes = [shape for shape in engines for _ in range(shape.replicas)]
    density = Counter(seat.node_id for seat in ordered)
    placed: dict[int, Ranks] = {}
    # the largest first: small ones fill what is left, and never cut a node that a large one needs whole
    for number in sorted(range(len(shapes)), key=lambda number: -shapes[number].ranks):
        seats = _engine(shapes[number], number, free, density)
        free = [seat for seat in free if seat not in seats]
        placed[number] = Ranks(f"engine {number}", seats)
    used = {seat.bundle for role in (*roles.values(), *placed.values()) for seat in role}
    return Placement(
        trainers=roles.pop("trainer"),
        engines=tuple(placed[number] for number in range(len(shapes))),
        others=roles,
        spare=tuple(seat for seat in ordered if seat.bundle not in used),
        shared=shared,
        notes=(SHARING_COSTS,) if shared else (),
    )


def _engine(shape: EngineShape, number: int, free: Sequence[Seat], density: Mapping[str, int]) -> tuple[Seat, ...]:
    nodes: dict[str, list[Seat]] = {}
    for seat in free:
        nodes.setdefault(seat.node_id, []).append(seat)
    found = ", ".join(f"{len(seats)} of {density[node]} free on {seats[0].address}" for node, seats in nodes.items())
    what = f"engine {number} of {shape.ranks} ranks (tp {shape.tp}, pp {shape.pp})"
    if shape.ranks <= max(density.values()):
        # the tightest node that has room, so that larger gaps stay for others
        roomy = [seats for seats in nodes.values() if len(seats) >= shape.ranks]
        if not roomy:
            raise PlacementError(
                f"{what} fits on one node and would straddle two: seats are {found or 'all taken'}. Ask for trainers and "
                "engines whose sizes fill nodes, for a smaller tp, or pass a placement group with room on one node"
            )
        return tuple(min(roomy, key=len)[: shape.ranks])
    whole = [seats for node, seats in nodes.items() if len(seats) == density[node]]
    for size in sorted({len(seats) for seats in whole}, reverse=True):
        equal = [seats for seats in whole if len(seats) == size]
        if shape.ranks % size == 0 and len(equal) >= shape.ranks // size:
            return tuple(seat for seats in equal[: shape.ranks // size] for seat in seats)
    raise PlacementError(
        f"{what} is larger than a node and takes whole nodes of equal size: seats are {found or 'all taken'}. Ask for a "
        "size that is a multiple of a node's GPUs, and for enough nodes beside the trainers'"
    )


def _check_distinct(seats: Sequence[Seat]) -> None:
    for what, names in (
        ("bundle", [str(seat.bundle) for seat in seats]),
        ("GPU", [f"{seat.uuid or seat.gpu} of node {seat.node_id}" for seat in seats]),
    ):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise PlacementError(
                f"{what} {twice[0]} appears twice: more than one rank would run on a GPU. Use bundles of one whole GPU, "
                "and start Ray with as many GPUs as a node has"
            )


def _address(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 7, 0, address  # names after numbers
    return parsed.version, int(parsed), ""


def _gpu(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 30, name)
