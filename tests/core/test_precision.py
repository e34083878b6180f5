"""The wire's dtype against the engine's: what is lost is told, and float8 that would land as something else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rdt_core.errors import RdtError
from rdt_core.landing import ModuleLanding
from rdt_core.sources import ModuleSource
from rdt_core.testing import LocalGroup

pytestmark = pytest.mark.unit


def served(wire: torch.dtype | None, own: torch.dtype, trainer: torch.dtype = torch.float32) -> nn.Module:
    """Attaches an engine whose parameters are `own` to a trainer that publishes in `wire`, and returns its model after a sync."""
    model = nn.Linear(3, 2, dtype=own)
    with LocalGroup([ModuleSource(nn.Linear(3, 2, dtype=trainer), dtype=wire)]) as group:
        group.serve([ModuleLanding(model)])
        group.publish(1)
    return model


def test_a_wire_that_is_narrower_than_both_ends_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    served(torch.bfloat16, torch.float32)
    (line,) = [line for line in caplog.messages if "travel as" in line]
    assert line.startswith(
        "served/0: 2 tensors travel as bfloat16 and land in parameters of float32 ('weight', 'bias'): whatever the trainer's "
        "parameters hold beyond bfloat16 is lost on the wire."
    )


@pytest.mark.parametrize(
    ("wire", "own", "trainer"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),  # the engine would round them itself
        (None, torch.float32, torch.float32),
        (None, torch.float32, torch.bfloat16),  # mode live: the trainer holds no more
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_nothing_is_told_where_nothing_is_lost(
    caplog: pytest.LogCaptureFixture, wire: torch.dtype | None, own: torch.dtype, trainer: torch.dtype
) -> None:
    served(wire, own, trainer)
    assert not [line for line in caplog.messages if "travel as" in line]


def test_float8_lands_in_float8_of_its_kind_alone() -> None:
    own = torch.float8_e4m3fn
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 3, dtype=own), requires_grad=False)
    trainer = nn.Linear(3, 2, bias=False)
    with LocalGroup([ModuleSource(trainer, dtype=own)]) as group:
        group.serve([ModuleLanding(model)])
        group.publish(1)
        assert torch.equal(model.weight.float(), trainer.weight.to(own).float())
        other = nn.Linear(3, 2, bias=False)
        with pytest.raises(
            RdtError,
            match=r"other/0: 1 tensors travel in float8 .*: 'weight' \(float8_e4m3fn into 'weight' of float32\)\. Leave float8",
        ):
            group.serve([ModuleLanding(other)], "other")
