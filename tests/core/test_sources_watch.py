"""ParameterWatch and TreeWatch: a source looks with care once, and again when anything that matters differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rdt_core.sources.watch import ParameterWatch, TreeWatch, fingerprint

pytestmark = pytest.mark.unit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.register_buffer("steps", torch.zeros(3))


class Looks:
    """A source's careful look, counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def watch(model: nn.Module, look: Callable[[], object], sharded: bool = False) -> ParameterWatch:
    named = [("first", "weight"), ("first", "bias"), ("second", "weight"), ("", "steps")]
    owners = [model.get_submodule(path) for path, _ in named]
    return ParameterWatch(
        owners, [key for _, key in named], [key == "steps" for _, key in named], [sharded] + [False] * 3, look
    )


def test_it_looks_once_while_nothing_moves() -> None:
    model, looks = Model(), Looks()
    watched = watch(model, looks)
    before = watched.mark()
    with torch.no_grad():
        for tensor in (model.first.weight, model.first.bias, model.second.weight, model.steps):
            tensor.add_(1)
    assert watched.mark() == before
    assert looks.count == 1


def replaced(model: Model) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach())


def moved(model: Model) -> None:
    model.second.weight.data = model.second.weight.data.clone()


def turned(model: Model) -> None:
    model.second.weight.data = model.second.weight.data.t()


def cut(model: Model) -> None:
    model.first.bias.data = model.first.bias.data[:2]


def reinterpreted(model: Model) -> None:
    model.second.weight.data = model.second.weight.data.view(torch.int32).view(torch.bfloat16).view(torch.float16)


def reshaped(model: Model) -> None:
    model.second.weight.data = model.second.weight.data.view(2, 8)


def emptied(model: Model) -> None:
    model.first.weight.untyped_storage().resize_(0)


def another_table(model: Model) -> None:
    model.second._parameters = {"weight": nn.Parameter(torch.zeros(4, 4))}


def another_buffer(model: Model) -> None:
    model.steps = model.steps.clone()


def gone(model: Model) -> None:
    model.first.bias = None


def deleted(model: Model) -> None:
    del model.first.bias


CHANGES = [replaced, moved, turned, cut, reinterpreted, reshaped, emptied, another_table, another_buffer, gone, deleted]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_looks_again_when(change: Callable[[Model], None]) -> None:
    model, looks = Model(), Looks()
    watched = watch(model, looks)
    before = watched.mark()
    change(model)
    assert watched.mark() != before
    assert looks.count == 2


def test_strides_of_what_is_not_contiguous_count() -> None:
    model, looks = Model(), Looks()
    memory = torch.zeros(64)
    model.second.weight.data = memory.as_strided((4, 4), (8, 1))
    watched = watch(model, looks)
    watched.mark()
    model.second.weight.data = memory.as_strided((4, 4), (12, 1))
    watched.mark()
    assert looks.count == 2


def test_a_look_that_raises_is_made_again() -> None:
    model = Model()
    answers = iter([ValueError("first"), "second"])

    def look() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watched = watch(model, look)
    with pytest.raises(ValueError, match="first"):
        watched.mark()
    assert watched.mark() == "second"


def test_the_local_part_of_a_dtensor_and_its_placement() -> None:
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, looks = Model(), Looks()
        model.first.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
        watched = watch(model, looks, sharded=True)
        watched.mark()
        watched.mark()
        assert looks.count == 1
        local = model.first.weight._local_tensor
        local.data = local.data.clone()
        watched.mark()
        assert looks.count == 2
        model.first.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]))
        watched.mark()
        model.first.weight = nn.Parameter(torch.zeros(4, 4))
        watched.mark()
        assert looks.count == 4
    finally:
        distributed.destroy_process_group()


def test_a_tree_is_the_same_until_a_module_or_a_parameter_comes_or_goes() -> None:
    model = nn.Sequential(Model(), Model())
    tree = TreeWatch([model])
    model[0].first.weight = nn.Parameter(torch.zeros(4, 4))
    assert tree.is_same()
    kept = model[1].second
    model[1].second = nn.Linear(4, 4, bias=False)
    assert not tree.is_same()
    model[1].second = kept
    assert tree.is_same()
    model[0].first.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert not tree.is_same()
    del model[0].first.extra
    model.append(nn.Linear(2, 2))
    assert not tree.is_same()


def test_fingerprint_notices_moved_and_resized_memory() -> None:
    tensors = [torch.zeros(8), torch.zeros(8)]
    before = fingerprint(tensors)
    assert fingerprint(tensors) == before
    keep = tensors[1]
    tensors[1] = keep.clone()
    assert fingerprint(tensors) != before
    tensors[1] = keep[:4]
    assert fingerprint(tensors) != before
