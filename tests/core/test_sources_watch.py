"""ParameterWatch, TreeWatch, AddressWatch: looked at with care once, and again when anything that matters differs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rdt_core.sources.watch import AddressWatch, ParameterWatch, TreeWatch, attribute_tensors, fingerprint, place

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


def test_a_tree_of_which_modules_swapped_their_names_is_another() -> None:
    model = Model()
    tree = TreeWatch([model])
    first, second = model._modules.values()
    model._modules = {"second": first, "first": second}
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


class Strange(nn.Parameter):
    """As engines' parameters, which see every function that is called with them."""

    calls = 0

    @classmethod
    def __torch_function__(cls, *arguments: Any, **others: Any) -> Any:
        cls.calls += 1
        return super().__torch_function__(*arguments, **others)


class Served(nn.Module):
    """Two layers, of which the second ties a parameter and shares a module of the first; a tensor that a step derived."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Model(), Model()])
        self.layers[1].second.weight = self.layers[0].second.weight
        self.layers[0].first.register_buffer("scale", torch.zeros(2))
        self.layers[1].shared = self.layers[0].first
        self.layers[0].strange = Strange(torch.zeros(6))
        self.layers[0].absent = None
        self.layers[0].register_buffer("late", None)
        self.derived = torch.zeros(5)
        self.number = 5


def slowly(root: nn.Module) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Places of parameters and of all tensors, by torch's own walks."""
    parameters = dict(root.named_parameters(remove_duplicate=False))
    others = dict(root.named_buffers(remove_duplicate=False)) | attribute_tensors(root)
    return {name: place(one) for name, one in parameters.items()}, {
        name: place(one) for name, one in (parameters | others).items()
    }


def test_every_tensor_has_its_place_under_each_of_its_names() -> None:
    model = Served()
    now = AddressWatch(model, attributes=True).now()
    assert (now.parameters, now.tensors) == slowly(model)
    assert now.tensors["layers.1.second.weight"] == now.tensors["layers.0.second.weight"]
    assert now.tensors["layers.1.shared.bias"] == (model.layers[0].first.bias.data_ptr(), 16)
    assert now.tensors["derived"] == (model.derived.data_ptr(), 20)
    assert now.tensors.keys() - now.parameters.keys() == {
        *("derived", "layers.0.steps", "layers.1.steps", "layers.0.first.scale", "layers.1.shared.scale")
    }


def test_plain_attributes_are_watched_where_that_is_asked_for() -> None:
    model = Served()
    watched = AddressWatch(model)
    before = watched.now()
    assert "derived" not in before.tensors
    model.derived = torch.zeros(7)
    assert watched.now() is before


def test_while_nothing_moves_its_answer_is_the_same_object_and_nobody_walks_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Served()
    watched = AddressWatch(model, attributes=True)
    before = watched.now()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), model.derived):
            tensor.add_(1)
    model.layers[0].first.training = False
    model.layers[0].first.weight = nn.Parameter(
        model.layers[0].first.weight.detach()
    )  # another object, the same memory
    for walk in ("named_parameters", "named_buffers", "named_modules", "modules"):
        monkeypatch.setattr(nn.Module, walk, lambda *_, **__: pytest.fail("walked"))
    Strange.calls = 0
    assert watched.now() is before
    assert Strange.calls == 0


def step_moves_a_parameter(model: Served) -> None:
    model.layers[0].first.weight.data = model.layers[0].first.weight.data.clone()


def step_replaces_a_parameter(model: Served) -> None:
    model.layers[0].first.weight = nn.Parameter(torch.zeros(4, 4))


def step_moves_a_strange_parameter(model: Served) -> None:
    model.layers[0].strange = Strange(torch.ones(6))


def step_resizes_a_parameter(model: Served) -> None:
    model.layers[0].first.bias.data = model.layers[0].first.bias.data[:2]


def step_empties_a_parameter(model: Served) -> None:
    model.layers[0].first.bias.untyped_storage().resize_(0)


def step_removes_a_parameter(model: Served) -> None:
    del model.layers[0].first.bias


def step_drops_a_parameter(model: Served) -> None:
    model.layers[0].first.bias = None


def step_renames_a_parameter(model: Served) -> None:
    table = model.layers[1].first._parameters
    table["other"] = table.pop("bias")


def step_unties_a_parameter(model: Served) -> None:
    model.layers[1].second.weight = nn.Parameter(torch.zeros(4, 4))


def step_replaces_a_table(model: Served) -> None:
    model.layers[1].first._parameters = {"weight": nn.Parameter(torch.zeros(4, 4)), "bias": None}


def step_moves_a_buffer(model: Served) -> None:
    model.layers[1].steps.data = model.layers[1].steps.data.clone()


def step_replaces_a_buffer(model: Served) -> None:
    model.layers[1].steps = torch.zeros(3)


def step_moves_what_is_derived(model: Served) -> None:
    model.derived = model.derived.clone()


def step_replaces_a_module(model: Served) -> None:
    model.layers[1] = Model()


def step_swaps_modules(model: Served) -> None:
    first, second = model.layers
    model.layers._modules = {"1": first, "0": second}


def step_unshares_a_module(model: Served) -> None:
    model.layers[1].shared = nn.Linear(4, 4)


def step_moves_a_shared_buffer(model: Served) -> None:
    model.layers[0].first.scale = torch.ones(2)


def step_hands_a_buffer_on(model: Served) -> None:
    model.layers[0].first.register_buffer("steps", model.layers[0].steps)
    model.layers[0].steps = None


def step_hands_what_is_derived_on(model: Served) -> None:
    vars(model.layers)["derived"] = vars(model).pop("derived")


def step_renames_what_is_derived(model: Served) -> None:
    own = vars(model)
    tensor, number = own.pop("derived"), own.pop("number")
    own |= {"number": tensor, "derived": number}


MOVES = {
    step_renames_what_is_derived: {"derived"},
    step_moves_a_parameter: {"layers.0.first.weight", "layers.1.shared.weight"},
    step_replaces_a_parameter: {"layers.0.first.weight", "layers.1.shared.weight"},
    step_moves_a_strange_parameter: {"layers.0.strange"},
    step_resizes_a_parameter: {"layers.0.first.bias", "layers.1.shared.bias"},
    step_empties_a_parameter: {"layers.0.first.bias", "layers.1.shared.bias"},
    step_removes_a_parameter: {"layers.0.first.bias", "layers.1.shared.bias"},
    step_drops_a_parameter: {"layers.0.first.bias", "layers.1.shared.bias"},
    step_renames_a_parameter: {"layers.1.first.bias"},
    step_unties_a_parameter: {"layers.1.second.weight"},
    step_replaces_a_table: {"layers.1.first.weight", "layers.1.first.bias"},
    step_moves_a_buffer: {"layers.1.steps"},
    step_replaces_a_buffer: {"layers.1.steps"},
    step_moves_what_is_derived: {"derived"},
    step_replaces_a_module: {
        *(f"layers.1.{name}" for name in ("first.weight", "first.bias", "second.weight", "steps")),
        *("layers.1.shared.weight", "layers.1.shared.bias", "layers.1.shared.scale"),
    },
    step_unshares_a_module: {"layers.1.shared.weight", "layers.1.shared.bias", "layers.1.shared.scale"},
    step_moves_a_shared_buffer: {"layers.0.first.scale", "layers.1.shared.scale"},
    step_hands_a_buffer_on: {"layers.0.steps"},
    step_hands_what_is_derived_on: {"derived"},
}


@pytest.mark.parametrize("step", MOVES, ids=lambda step: step.__name__)
def test_what_moved_is_named(step: Callable[[Served], None]) -> None:
    model = Served()
    watched = AddressWatch(model, attributes=True)
    before = watched.now()
    alive = [*model.parameters(), *model.buffers(), model.derived]  # nothing new comes to lie where one of them lay
    step(model)
    Strange.calls = 0
    now = watched.now()
    del alive
    assert Strange.calls == 0
    assert {name for name, where in before.tensors.items() if now.tensors.get(name) != where} == MOVES[step]
    assert (now.parameters, now.tensors) == slowly(model)
    assert watched.now() is now


def test_modules_that_swapped_their_names_are_seen() -> None:
    model = Served()
    watched = AddressWatch(model)
    step_swaps_modules(model)
    assert watched.now().parameters == slowly(model)[0]
    assert watched.now().parameters["layers.1.first.weight"] == place(model.layers._modules["1"].first.weight)


def two_buffers(first: dict[str, torch.Tensor | None], second: dict[str, torch.Tensor | None]) -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0]._buffers, model[1]._buffers = first, second
    return model


def test_a_tensor_that_another_module_has_under_the_same_name_is_seen() -> None:
    tensor = torch.zeros(2)
    for before, after in (
        (({"x": tensor}, {}), ({}, {"x": tensor})),
        (({"x": tensor}, {"x": None}), ({"x": None}, {"x": tensor})),
    ):
        model = two_buffers(*before)
        watched = AddressWatch(model)
        assert watched.now().tensors == {"0.x": place(tensor)}
        model[0]._buffers, model[1]._buffers = after
        assert watched.now().tensors == {"1.x": place(tensor)}


def test_parameters_are_the_same_object_where_only_other_tensors_differ() -> None:
    model = Served()
    watched = AddressWatch(model, attributes=True)
    before = watched.now()
    model.derived = torch.zeros(7)
    model.layers[0].late = torch.zeros(2)
    now = watched.now()
    assert now.parameters is before.parameters
    assert now.tensors != before.tensors
    model.layers.append(nn.Identity())  # another tree with the same tensors
    assert watched.now().tensors is now.tensors


@pytest.mark.parametrize("late", ["buffer", "attribute", "module"])
def test_tensors_that_came_later_are_watched_from_then_on(late: str) -> None:
    model = Served()
    watched = AddressWatch(model, attributes=True)
    watched.now()

    def make() -> None:
        if late == "buffer":
            model.layers[0].late = torch.zeros(2)
        elif late == "attribute":
            model.layers[0].made = nn.Parameter(torch.zeros(2)).data
        else:
            model.late = nn.Linear(2, 2)

    make()
    made = watched.now()
    assert made.tensors == slowly(model)[1]
    tensor = {"buffer": "layers.0.late", "attribute": "layers.0.made", "module": "late.weight"}[late]
    assert tensor in made.tensors
    alive = [model.layers[0].late, getattr(model.layers[0], "made", None), getattr(model, "late", None)]
    make()
    assert watched.now().tensors[tensor] != made.tensors[tensor]
    del alive


def test_a_replaced_tensor_may_be_freed() -> None:
    model = Served()
    watched = AddressWatch(model, attributes=True)
    before = weakref.ref(model.derived)
    model.derived = None
    watched.now()
    assert before() is None
