"""Hypothesis strategies for shapes and view-op chains, and torch's own answer to a chain as the oracle."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rdt_core.geometry import Chain, Op

#: RDT_HYPOTHESIS=deep multiplies every property's number of cases
DEEP = 25 if os.environ.get("RDT_HYPOTHESIS") == "deep" else 1


def cases(number: int) -> settings:
    """Settings of a property that is tried on `number` cases by default."""
    return settings(
        max_examples=number * DEEP,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@st.composite
def shapes(draw: st.DrawFn, max_axes: int = 4, max_size: int = 6, empty: bool = True) -> tuple[int, ...]:
    """Small shapes; sizes with many divisors come often, so that views can split axes."""
    size = st.sampled_from([1, 2, 3, 4, 6, max_size, *([0] if empty and draw(st.integers(0, 9)) == 9 else [])])
    return tuple(draw(st.lists(size, max_size=max_axes)))


def _split(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    sizes = []
    for _ in range(3):
        if numel < 2:
            break
        divisor = draw(st.sampled_from([d for d in range(1, numel + 1) if numel % d == 0]))
        sizes.append(divisor)
        numel //= divisor
    return (*sizes, numel)


def _slice(draw: st.DrawFn, size: int, step: bool) -> tuple[Any, ...]:
    bound = st.one_of(st.none(), st.integers(-size - 1, size + 1))
    return ("slice", draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3])) if step else None)


@st.composite
def ops(draw: st.DrawFn, shape: tuple[int, ...], casts: bool = True) -> Op:
    """One op that fits `shape`."""
    rank = len(shape)
    kinds = ["reshape", "unsqueeze", "squeeze", "contiguous", "flatten", "getitem", "permute"]
    if casts:
        kinds.append("to")
    if rank:
        kinds += ["narrow"] * 4 + ["transpose"]
    if rank <= 2:
        kinds.append("t")
    wide = [dim for dim in range(rank) if shape[dim]]
    if wide:
        kinds += ["select", "narrow"]
    kind = draw(st.sampled_from(kinds))
    sign = draw(st.booleans())

    def dim(choices: list[int]) -> int:
        found = draw(st.sampled_from(choices))
        return found - rank if sign else found

    if kind == "narrow":
        axis = dim(list(range(rank)))
        start = draw(st.integers(0, shape[axis]))
        length = draw(
            st.integers(0 if draw(st.integers(0, 15)) == 15 else min(1, shape[axis] - start), shape[axis] - start)
        )
        return ("narrow", (axis, start - shape[axis] if sign and start < shape[axis] else start, length))
    if kind == "select":
        axis = dim(wide)
        return ("select", (axis, draw(st.integers(-shape[axis], shape[axis] - 1))))
    if kind == "reshape":
        numel = 1
        for size in shape:
            numel *= size
        wanted = draw(st.sampled_from([(numel,), _split(draw, numel)]) if numel else st.just((0, 3)))
        if numel and sign:
            hole = draw(st.integers(0, len(wanted) - 1))
            wanted = (*wanted[:hole], -1, *wanted[hole + 1 :])
        return ("reshape", wanted if draw(st.booleans()) else (wanted,))
    if kind == "unsqueeze":
        return ("unsqueeze", (draw(st.integers(-rank - 1, rank)),))
    if kind == "squeeze":
        return ("squeeze", (dim(list(range(rank))),) if rank and draw(st.booleans()) else ())
    if kind == "transpose":
        return ("transpose", (dim(list(range(rank))), dim(list(range(rank)))))
    if kind == "permute":
        order = tuple(draw(st.permutations(range(rank))))
        return ("permute", order if rank and draw(st.booleans()) else (order,))
    if kind == "flatten":
        if not rank or draw(st.booleans()):
            return ("flatten", ())
        first = draw(st.integers(0, rank - 1))
        return ("flatten", (first, draw(st.integers(first, rank - 1))))
    if kind == "getitem":
        step = draw(st.integers(0, 5)) == 5
        items: list[Any] = []
        for size in shape[: draw(st.integers(0, rank))]:
            items.append(
                draw(st.integers(-size, size - 1)) if size and draw(st.booleans()) else _slice(draw, size, step)
            )
        extra = draw(st.sampled_from(["", "ellipsis", "none"]))
        if extra == "ellipsis":
            items.append(Ellipsis)
        elif extra == "none":
            items.insert(draw(st.integers(0, len(items))), None)
        return ("__getitem__", (tuple(items),))
    if kind == "to":
        return ("to", (draw(st.sampled_from(["float32", "int32", "float64"])),))
    return (kind, ())


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...], max_ops: int = 6, casts: bool = True) -> Chain:
    """A chain of ops that fits `shape`. Shapes are followed with torch, never with the code under test."""
    chain: list[Op] = []
    probe = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, max_ops))):
        op = draw(ops(tuple(probe.shape), casts))
        chain.append(op)
        probe = apply(probe, op)
    return tuple(chain)


def apply(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """What torch itself gives for one op."""
    name, args = op
    if name == "to":
        return tensor.to(getattr(torch, args[0]))
    if name == "__getitem__":
        return tensor[tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in args[0])]
    result = getattr(tensor, name)(*args)
    assert isinstance(result, torch.Tensor)
    return result


def apply_all(tensor: torch.Tensor, chain: Chain) -> torch.Tensor:
    """What torch itself gives for a chain."""
    for op in chain:
        tensor = apply(tensor, op)
    return tensor
