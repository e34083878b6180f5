"""IterableSource: fresh passes in the declared order, and refusal of passes that stray from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rdt_core.errors import SourceError
from rdt_core.sources import IterableSource, IterableWeightSource, WeightSource
from rdt_core.wire import TensorMeta

pytestmark = pytest.mark.unit

METADATA = [
    TensorMeta(name="a", shape=(2, 3), dtype="bfloat16"),
    TensorMeta(name="b", shape=(), dtype="float32"),
]
PASS = [("a", torch.ones(2, 3)), ("b", torch.tensor(1.0))]


def test_every_iteration_is_a_fresh_pass() -> None:
    passes = 0

    def iterate() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        yield from [(name, tensor * passes) for name, tensor in PASS]

    source = IterableSource(METADATA, iterate, ignored=["b"])
    assert isinstance(source, IterableWeightSource)
    assert not isinstance(source, WeightSource)
    assert passes == 0
    assert [(name, tensor.sum().item()) for name, tensor in source] == [("a", 6), ("b", 1)]
    assert [(name, tensor.sum().item()) for name, tensor in source] == [("a", 12), ("b", 2)]
    assert source.metadata() == tuple(METADATA)
    assert source.ignored() == ("b",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PASS[:1], "ends before 'b'"),
        ([], "ends before 'a'"),
        (PASS[::-1], r"yields 'b' of shape \(\) at position 0, where 'a' of shape \(2, 3\)"),
        ([("a", torch.ones(3, 2))], r"yields 'a' of shape \(3, 2\) at position 0"),
        ([*PASS, ("c", torch.ones(1))], "yields 'c' after all 2 declared tensors"),
    ],
)
def test_refuses_a_pass_that_strays(given: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        list(IterableSource(METADATA, lambda: given))


def test_refuses_a_name_declared_twice() -> None:
    with pytest.raises(SourceError, match="'a' is declared twice"):
        IterableSource([*METADATA, METADATA[0]], lambda: PASS)
