"""Keys of storages: aliases, views, meta tensors, and what has no storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rdt_core.destinations import Destinations
from rdt_core.errors import TracingError

pytestmark = pytest.mark.unit


def test_shared_storages_keep_their_first_name() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(4, 3)
    model.head = nn.Linear(3, 4, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("window", model.embed.weight.data[1:])
    found = Destinations.of(model)
    assert list(found) == ["window"]  # buffers of the root come before the parameters of its children
    assert found.find(model.head.weight[2:].t()) == "window"


def test_views_are_found_by_storage() -> None:
    model = nn.Linear(3, 4)
    found = Destinations.of(model)
    assert list(found) == ["weight", "bias"]
    assert found.find(model.weight.data.t()[1:]) == "weight"
    assert found.find(model.weight.clone()) is None


def test_meta_tensors_are_told_apart() -> None:
    found = Destinations.of(nn.Linear(3, 4, device="meta"))
    assert found.find(found["bias"].data) == "bias"
    assert found.find(found["weight"][0]) == "weight"


def test_lazy_and_sparse_tensors_are_left_out() -> None:
    model = nn.LazyLinear(3)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert list(Destinations.of(model)) == []


def test_add() -> None:
    found = Destinations()
    tensor = torch.zeros(3)
    assert found.add("a", tensor) == "a"
    assert found.add("b", tensor[1:]) == "a"
    with pytest.raises(TracingError, match="two different storages"):
        found.add("a", torch.zeros(3))
    with pytest.raises(TracingError, match="no storage"):
        found.add("s", torch.eye(3).to_sparse())


def test_rebound_puts_back() -> None:
    model = nn.Linear(3, 4)
    found, weight = Destinations.of(model), model.weight
    assert found.rebound() == []
    model.weight = nn.Parameter(torch.zeros(4, 3))
    assert found.rebound() == ["weight"]
    assert model.weight is weight


def _replace(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.zeros(4, 4))


def _move(model: nn.Sequential) -> None:
    model[1].weight.data = torch.zeros(4, 4)


def _register(model: nn.Sequential) -> None:
    model[0].register_buffer("scale", torch.zeros(1))


def _drop(model: nn.Sequential) -> None:
    model[1].bias = None


def _append(model: nn.Sequential) -> None:
    model.append(nn.Linear(4, 4))


def _swap(model: nn.Sequential) -> None:
    model[1] = nn.Linear(4, 4)


@pytest.mark.parametrize("change", [_replace, _move, _register, _drop, _append, _swap])
def test_is_same(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LazyLinear(3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    found = Destinations.of(model)
    with torch.no_grad():
        model[1].weight.fill_(7)
    assert found.is_same()
    kept = [*model.modules()], [*model.parameters()], model[1].weight.data  # or a new one may take an old one's place
    change(model)
    assert not found.is_same(), kept
