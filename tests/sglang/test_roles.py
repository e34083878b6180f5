"""`SglangLanding` over several models of one scheduler: a target and draft models that share tensors with it.

The models are plain modules with loaders like SGLang's, so that layouts can be had that no CPU engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rdt_core.errors import CoverageError, EngineError
from rdt_core.wire import TensorMeta

pytestmark = pytest.mark.engine

METAS = [
    TensorMeta(name="embed.weight", shape=(6, 4), dtype="float32"),
    TensorMeta(name="layer.weight", shape=(4, 4), dtype="float32"),
    TensorMeta(name="draft.weight", shape=(2, 4), dtype="float32"),
]


class Model(torch.nn.Module):
    """Takes `embed.weight`, padded to 8 rows, and the matrix of its own name."""

    def __init__(self, own: str, rows: int, embed: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.own = own
        self.embed = torch.nn.Module()
        self.embed.weight = embed if embed is not None else torch.nn.Parameter(torch.ones(8, 4), requires_grad=False)
        self.body = torch.nn.Module()
        self.body.weight = torch.nn.Parameter(torch.zeros(rows, 4), requires_grad=False)
        self.twice: torch.Tensor = torch.zeros(rows, 4)
        self.calls: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.weight[:6].data.copy_(tensor)
                self.embed.weight[6:].data.fill_(0)
            elif name == self.own:
                self.body.weight.data.copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.calls.append("post_load")
        self.twice.copy_(2 * self.body.weight)


def runner(model: Model) -> Any:
    updater = SimpleNamespace(
        begin_weight_update=lambda: model.calls.append("begin"),
        end_weight_update=lambda run_post_load: model.post_load_weights() if run_post_load else None,
    )
    return SimpleNamespace(model=model, weight_updater=updater)


@pytest.fixture
def models() -> tuple[Model, Model]:
    target = Model("layer.weight", 4)
    return target, Model("draft.weight", 2, embed=target.embed.weight)


def land(runners: list[tuple[str, Any]]) -> Any:
    from rdt_sglang import SglangLanding

    return SglangLanding(runners, "cpu", who="r/0")


def test_keys_begin_with_the_role_where_there_are_several(models):
    target, draft = models
    assert set(land([("target", runner(target))]).trace(METAS[:2]).taken) == {"embed.weight", "layer.weight"}
    landing = land([("target", runner(target)), ("draft", runner(draft))])
    trace = landing.trace(METAS)
    assert trace.taken == ("embed.weight", "layer.weight", "draft.weight")
    assert set(landing.destinations()) == {"target.embed.weight", "target.body.weight", "draft.body.weight"}
    assert {one.module for one in landing.destinations().values()} == {"target.embed", "target.body", "draft.body"}
    assert landing.slices == 3  # what the draft shares is taken once


def test_draft_runners_of_one_name_are_told_apart(models):
    _, draft = models
    other = Model("layer.weight", 4)
    landing = land([("draft", runner(draft)), ("draft", runner(other))])
    landing.trace(METAS)
    assert {"draft.body.weight", "draft_1.body.weight"} <= set(landing.destinations())


def test_a_whole_sync_of_both(models):
    target, draft = models
    landing = land([("target", runner(target)), ("draft", runner(draft))])
    trace = landing.trace(METAS)
    assert target.calls == draft.calls == [], "no post-load step while loaders are traced"
    landing.prepare_models()
    assert target.calls == draft.calls == ["begin"]
    landing.begin()
    for piece in trace.slices:
        whole = landing.storage(piece.destination).view(torch.float32)
        whole.as_strided(piece.shape, piece.strides, piece.offset).fill_(len(piece.name))
    landing.finish()
    assert target.embed.weight[:6].eq(len("embed.weight")).all()
    assert target.embed.weight[6:].eq(0).all(), "padding is zero again"
    assert draft.body.weight.eq(len("draft.weight")).all()
    assert draft.twice.eq(2 * len("draft.weight")).all()


def test_a_draft_that_the_trainer_does_not_offer_is_an_error_with_its_name(models):
    target, draft = models
    with pytest.raises(CoverageError, match=r"draft\.body\.weight \(0 of 8 elements\)"):
        land([("target", runner(target)), ("draft", runner(draft))]).trace(METAS[:2])


def test_a_derived_tensor_that_moves_is_an_error(models):
    target, _ = models
    landing = land([("target", runner(target))])
    landing.trace(METAS[:2])
    landing.begin()
    target.post_load_weights = lambda: setattr(target, "twice", torch.ones(4, 4))  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="r/0: the address of twice changed while its post-load step ran"):
        landing.finish()


def test_base_weights_behind_adapters_are_reached(models):
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    class Repacking:  # the method of the wrapped layer is what counts, and the wrapper only forwards it
        pass

    target, _ = models
    weight = target.body.weight
    target.body = BaseLayerWithLoRA(target.body, None)
    target.body.quant_method = Repacking()
    landing = land([("target", runner(target))])
    trace = landing.trace(METAS[:2])
    assert trace.taken == ("embed.weight", "layer.weight")
    (key,) = [piece.destination for piece in trace.slices if piece.name == "layer.weight"]
    assert landing.storage(key).data_ptr() == weight.data_ptr()


def test_no_model_is_an_error():
    with pytest.raises(EngineError, match="r/0: there is no model to update"):
        land([])
