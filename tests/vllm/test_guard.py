from __future__ import annotations

import pytest
import torch

from rdt_core.errors import TornReplicaError
from rdt_vllm.guard import TornGuard

pytestmark = pytest.mark.unit


class Model(torch.nn.Module):
    def forward(self, x, *, scale=1):
        return x * scale

    def compute_logits(self, hidden):
        return hidden + 1


def test_closed_refuses_and_open_leaves_nothing_behind():
    model = Model()
    own = dict(model.__dict__)
    guard = TornGuard(model)
    guard.close("a sync is running", "r/0")
    with pytest.raises(TornReplicaError, match="r/0 refuses to generate: a sync is running"):
        model(torch.ones(1), scale=2)
    # a captured graph runs no hooks, but its logits are computed outside
    with pytest.raises(TornReplicaError, match="a sync is running"):
        model.compute_logits(torch.ones(1))
    guard.close("the trainer died", "r/0")
    with pytest.raises(TornReplicaError, match="the trainer died"):
        model(torch.ones(1))
    guard.open()
    guard.open()
    assert model(torch.ones(1), scale=2).item() == 2
    assert model.compute_logits(torch.ones(1)).item() == 2
    assert model.__dict__.keys() == own.keys()
    assert not model._forward_pre_hooks


def test_two_closes_need_one_open():
    model = Model()
    guard = TornGuard(model)
    guard.close("one", "r/0")
    guard.close("two", "r/0")
    assert len(model._forward_pre_hooks) == 1
    guard.open()
    assert guard.reason is None
    model(torch.ones(1))


def test_models_without_logits_are_guarded_too():
    model = torch.nn.Linear(2, 2)
    guard = TornGuard(model)
    guard.close("half written", "r/1")
    with pytest.raises(TornReplicaError, match="half written"):
        model(torch.ones(2))
    guard.open()
    model(torch.ones(2))
