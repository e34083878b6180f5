"""The tensors of the whole model, out of what each rank declares."""

from __future__ import annotations

import msgspec
import pytest

from rdt_core.declared import ignored, merge
from rdt_core.errors import CoverageError
from rdt_core.wire import TensorMeta
from rdt_testbed.reference import manifest

pytestmark = pytest.mark.unit


def meta(name: str, *shape: int) -> TensorMeta:
    return TensorMeta(name=name, shape=shape or (4,), dtype="float32")


def ranks(*lists: list[TensorMeta]) -> list:
    return [manifest(rank, len(lists), tensors, [], {}) for rank, tensors in enumerate(lists)]


def test_equal_lists_keep_their_order() -> None:
    tensors = [meta("norm"), meta("model.layers.1.a"), meta("model.layers.0.a")]
    assert merge(ranks(tensors, tensors)) == tuple(tensors)


def test_pipeline_stages_are_merged_in_the_order_of_the_model() -> None:
    first = [meta("embed"), meta("model.layers.0.a"), meta("model.layers.2.a")]
    experts = [meta("embed"), meta("model.layers.0.a"), meta("model.layers.0.experts.1"), meta("model.layers.2.a")]
    last = [meta("model.layers.3.a"), meta("model.layers.1.a"), meta("norm"), meta("head")]
    names = [tensor.name for tensor in merge(ranks(first, experts, last))]
    assert names == [
        "embed", "model.layers.0.a", "model.layers.0.experts.1", "model.layers.1.a", "model.layers.2.a",
        "model.layers.3.a", "norm", "head",
    ]  # fmt: skip


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    with pytest.raises(CoverageError, match=r"source rank 2 declares .*'b' \[5\] float32 and source rank 1 'b' \[4\]"):
        merge(ranks([meta("a")], [meta("a"), meta("b")], [meta("b", 5)]))


def test_a_name_that_any_rank_ignores_is_ignored() -> None:
    one, two = ranks([meta("a")], [meta("b")])
    assert ignored([msgspec.structs.replace(one, ignore=("x", "y")), msgspec.structs.replace(two, ignore=("y",))]) == (
        "x",
        "y",
    )
