"""Chains of view ops on stand-ins against torch: same shapes, same strides, same refusals, same elements."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from rdt_core.errors import TracingError
from rdt_core.geometry import OPS, chain_shape, replay
from rdt_core.standins import HANDLERS, StandIn
from rdt_core.tracing import Destinations, trace
from rdt_core.wire import TensorMeta

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*T.*deprecated")]

EXAMPLES = 20_000 if os.environ.get("RDT_HYPOTHESIS") == "deep" else 1_500


NAMES = [
    "narrow", "select", "unsqueeze", "squeeze", "transpose", "t", "permute", "flatten", "reshape", "view", "contiguous",
    "chunk", "split", "unbind", "getitem", "to", "T", "mT", "swapaxes", "tensor_split", "clone", "view_as", "unflatten",
]  # fmt: skip


@st.composite
def step(draw, shape: tuple[int, ...]) -> tuple[str, tuple[Any, ...]]:
    """A call that a loader could make on a tensor of this shape; now and then one that torch refuses."""
    rank = len(shape)
    dim = draw(st.integers(-rank - draw(st.sampled_from([0, 0, 0, 1])), max(rank - 1, 0)))
    size = shape[dim] if -rank <= dim < rank else 1
    name = draw(st.sampled_from(NAMES))
    match name:
        case "narrow":
            start = draw(st.integers(-size, size))
            return name, (dim, start, draw(st.integers(0, max(size - start % max(size, 1), 0))))
        case "select":
            return name, (dim, draw(st.integers(-size, max(size - 1, 0))))
        case "unsqueeze":
            return name, (draw(st.integers(-rank - 1, rank)),)
        case "squeeze":
            return name, draw(st.sampled_from([(), (dim,), ((0, -1),)]))
        case "transpose" | "swapaxes":
            return name, (dim, draw(st.integers(-rank, max(rank - 1, 0))))
        case "permute":
            return name, tuple(draw(st.permutations(range(rank))))
        case "flatten":
            return name, draw(st.sampled_from([(), (dim,), (0, dim)]))
        case "reshape" | "view" | "view_as":
            numel = 1
            for extent in shape:
                numel *= extent
            factors = [f for f in range(1, numel + 1) if numel % f == 0] or [1]
            first = draw(st.sampled_from(factors))
            return name, draw(st.sampled_from([(first, -1), (-1, first), ((-1,),), tuple(shape), (first, 1, -1)]))
        case "unflatten":
            return name, (dim, (draw(st.integers(1, 3)), -1))
        case "chunk" | "tensor_split":
            return name, (draw(st.integers(1, 3)), dim)
        case "split":
            return name, (draw(st.integers(1, 3)), dim)
        case "unbind":
            return name, (dim,)
        case "getitem":
            item = st.one_of(
                st.integers(-size, max(size - 1, 0)),
                st.none(),
                st.just(Ellipsis),
                st.slices(size),
                st.builds(lambda a, b: slice(a, b, 2), st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 3)),
            )
            return name, (draw(st.one_of(item, st.lists(item, max_size=rank + 1).map(tuple))),)
        case "to":
            return name, (draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32])),)
    return name, ()


def call(tensor: torch.Tensor, name: str, args: tuple[Any, ...]) -> Any:
    if name == "getitem":
        return tensor[args[0]]
    if name in ("T", "mT"):
        return getattr(tensor, name)
    if name == "view_as":
        shape = args[0] if args and isinstance(args[0], tuple) else args
        return tensor.view_as(torch.empty(torch.empty(tensor.shape, device="meta").reshape(shape).shape, device="meta"))
    return getattr(tensor, name)(*args)


def agree(real: torch.Tensor, fake: torch.Tensor) -> None:
    assert isinstance(fake, StandIn)
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype
    if real.numel() > 1:
        own = [stride for stride, size in zip(real.stride(), real.shape, strict=True) if size > 1]
        assert [stride for stride, size in zip(fake.stride(), fake.shape, strict=True) if size > 1] == own


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.data())
def test_any_chain_gives_what_torch_gives(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    joined = data.draw(st.booleans()) and bool(shape)
    axis = data.draw(st.integers(0, len(shape) - 1)) if joined else 0
    numel = torch.Size(shape).numel()
    weights = {name: (torch.arange(numel) % 251 + 1000 * i).float().view(shape) for i, name in enumerate("ab")}
    model = nn.Module()
    steps: list[Any] = []
    outcome: dict[str, Any] = {}

    def load(pairs: Any) -> None:
        fakes = dict(pairs)
        if joined:
            real, fake = torch.cat(list(weights.values()), axis), torch.cat([fakes["a"], fakes["b"]], axis)
        else:
            real, fake = weights["a"], fakes["a"]
        agree(real, fake)
        for _ in range(data.draw(st.integers(0, 5))):
            name, args = data.draw(step(tuple(real.shape)))
            steps.append((name, args))
            try:
                after = call(real, name, args)
            except (RuntimeError, IndexError, ValueError, TypeError):
                with pytest.raises((TracingError, TypeError)):
                    call(fake, name, args)
                outcome["refused"] = True
                return
            try:
                faked = call(fake, name, args)
            except TracingError as error:
                # torch has a meaning for two ellipses, and for reshaping a concatenation; these are refused on purpose
                if not any(reason in str(error) for reason in ("concatenation", "more than one ellipsis")):
                    raise
                outcome["refused"] = True
                return
            if isinstance(after, tuple | list):
                assert len(after) == len(faked)
                if not after:
                    return
                which = data.draw(st.integers(0, len(after) - 1))
                after, faked = after[which], faked[which]
            agree(after, faked)
            real, fake = after, faked
        outcome["real"] = real
        model.target = nn.Parameter(torch.zeros(real.shape, dtype=real.dtype), requires_grad=False)
        destinations.add("target", model.target)
        model.target.data.copy_(fake)

    destinations = Destinations()
    metas = [TensorMeta(name=name, shape=shape, dtype="float32") for name in "ab"]
    try:
        found = trace(load, metas, destinations)
    except TracingError:
        assert outcome.get("refused")
        return
    assume("real" in outcome)
    landed = torch.zeros(outcome["real"].shape, dtype=outcome["real"].dtype)
    for item in found.slices:
        assert all(name in OPS for name, _ in item.chain)
        value = replay(weights[item.name], item.chain)
        assert tuple(value.shape) == chain_shape(shape, item.chain)
        landed.as_strided(item.shape, item.strides, item.offset).copy_(value)
    assert torch.equal(landed, outcome["real"]), steps


def test_every_handler_is_reached_by_method_and_function() -> None:
    assert HANDLERS[torch.Tensor.narrow] is HANDLERS[torch.narrow]
    assert HANDLERS[torch.split] is HANDLERS[torch.Tensor.split]
    assert HANDLERS[torch.Tensor.t] is HANDLERS[torch.t]
    assert torch.Tensor.T.__get__ in HANDLERS


def chain_of(load: Any, shape: tuple[int, ...] = (4, 6)) -> list[tuple[str, Any]]:
    found = []
    trace(
        lambda pairs: [found.append(load(weight).origin.chain) for _, weight in pairs],
        [TensorMeta(name="w", shape=shape, dtype="float32")],
        Destinations(),
    )
    return list(found[0])


@pytest.mark.parametrize(
    ("load", "chain"),
    [
        (lambda w: w[-1], [("select", (0, 3))]),
        (lambda w: w[..., 1:3], [("narrow", (1, 1, 2))]),
        (lambda w: w[None, 1, :, None], [("unsqueeze", (0,)), ("select", (1, 1)), ("unsqueeze", (2,))]),
        (lambda w: w[:, ::2], [("__getitem__", ((("slice", 0, 4, 1), ("slice", 0, 6, 2)),))]),
        (lambda w: w.narrow(-1, -2, 2), [("narrow", (1, 4, 2))]),
        (lambda w: torch.narrow(w, dim=1, start=0, length=6), []),
        (lambda w: w.flatten(), [("reshape", (24,))]),
        (lambda w: w.view(2, -1, 6), [("reshape", (2, 2, 6))]),
        (lambda w: w.chunk(2, -1)[1], [("narrow", (1, 3, 3))]),
        (lambda w: w.split([1, 3])[1], [("narrow", (0, 1, 3))]),
        (lambda w: w.unbind(1)[2], [("select", (1, 2))]),
        (lambda w: list(w)[1], [("select", (0, 1))]),
        (lambda w: w.t().contiguous().view(24), [("permute", (1, 0)), ("reshape", (24,))]),
        (lambda w: w.detach().clone().requires_grad_(False), []),
        (lambda w: w.to(dtype=torch.float16)[:1], [("narrow", (0, 0, 1)), ("to", ("float16",))]),
        (lambda w: torch.stack([w[0], w[1]]).narrow(0, 1, 1), [("select", (0, 1)), ("unsqueeze", (0,))]),
    ],
)
def test_canonical_chains(load: Any, chain: list[tuple[str, Any]]) -> None:
    found = chain_of(load)
    if found and found[0][0] == "__getitem__":  # a full slice may be written with its bounds or without
        value = torch.arange(24.0).view(4, 6)
        assert torch.equal(replay(value, tuple(found)), load(value))
        return
    assert found == chain


def test_cat_of_cat_and_narrow_across_parts() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(5, 3), requires_grad=False)

    def load(pairs: Any) -> None:
        a, b, c = (weight for _, weight in pairs)
        inner = torch.cat([a, b])
        model.weight.data.copy_(torch.cat([inner, c]).narrow(0, 1, 5).half().float())

    metas = [TensorMeta(name=name, shape=(2, 3), dtype="float32") for name in "abc"]
    found = trace(load, metas, Destinations.of(model))
    assert [(item.name, item.chain[0], item.offset, item.shape) for item in found.slices] == [
        ("a", ("narrow", (0, 1, 1)), 0, (1, 3)),
        ("b", ("to", ("float16",)), 3, (2, 3)),
        ("c", ("to", ("float16",)), 9, (2, 3)),
    ]


@pytest.mark.parametrize(
    "name", ["expand", "repeat_interleave", "index_select", "roll", "gather", "where", "sum", "bmm"]
)
def test_the_list_is_closed(name: str) -> None:
    assert getattr(torch.Tensor, name) not in HANDLERS
