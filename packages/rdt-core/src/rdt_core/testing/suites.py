"""The checks as test classes: subclass one, say how yours is made, and pytest runs every check as a test of its own.

    class TestMySource(SourceSuite):
        world_size = 2

        def make_source(self, rank, world_size):
            return MySource(self.model(rank, world_size))

Nothing here imports pytest; any runner that calls `test_` methods does. The functions behind (`check_source` and so on) take the
same things as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..landing import Landing
from ..sources.base import WeightSource
from .landings import LandingCase, check_landed, check_missing, check_trace
from .sources import Source, check_coverage, check_passes, check_replicas, check_shards, check_syncs, holdings


class SourceSuite:
    """Checks of a weight source; see `check_source` for what each hook means.

    Attributes:
        world_size: source ranks, all in one process.
        modes: publish modes that must work; None: those of the source's kind.
    """

    world_size: int = 1
    modes: tuple[str, ...] | None = None

    def make_source(self, rank: int, world_size: int) -> Source:
        """Returns the source of a rank; called once for each rank in each test."""
        raise NotImplementedError

    def expected(self) -> Mapping[str, torch.Tensor] | None:
        """Returns the trainer's full tensors as they are now, or None."""
        return None

    def change(self) -> None:
        """Changes weights where they lie. Without an override shards are written to."""

    def move(self) -> None:
        """Puts parameters into other memory. Without an override that is not checked."""

    def _sources(self) -> list[Source]:
        return [self.make_source(rank, self.world_size) for rank in range(self.world_size)]

    def _hooks(self) -> dict[str, Any]:
        kind = type(self)
        return {
            "expected": self.expected if kind.expected is not SourceSuite.expected else None,
            "change": self.change if kind.change is not SourceSuite.change else None,
            "move": self.move if kind.move is not SourceSuite.move else None,
        }

    def test_every_tensor_is_held_as_a_whole(self) -> None:
        """See `check_coverage`."""
        sources = self._sources()
        held = [holdings(source, rank) for rank, source in enumerate(sources)]
        if all(isinstance(source, WeightSource) for source in sources):
            check_coverage(held)

    def test_shards_are_views_that_stay(self) -> None:
        """See `check_shards`, `check_replicas` and `check_passes`."""
        sources = self._sources()
        if all(isinstance(source, WeightSource) for source in sources):
            check_shards(sources)
            check_replicas(sources)
        else:
            check_passes(sources)

    def test_syncs_in_every_mode(self) -> None:
        """See `check_syncs`."""
        modes = self.modes
        if modes is None:
            is_sharded = isinstance(self.make_source(0, self.world_size), WeightSource)
            modes = ("auto", "snapshot", "bucket") if is_sharded else ("bucket",)
        for mode in modes:
            check_syncs(self._sources(), mode=mode, **self._hooks())


class LandingSuite:
    """Checks of a landing; see `LandingCase` for what each hook means.

    Attributes:
        world_size: engine ranks, all in one process.
        device: of the model.
        needed: a checkpoint tensor that the model cannot do without; "": the first.
    """

    world_size: int = 1
    device: str = "cpu"
    needed: str = ""

    def make_landing(self, rank: int, world_size: int) -> Landing:
        """Returns the landing of a rank over a new model."""
        raise NotImplementedError

    def weights(self, number: int) -> Mapping[str, torch.Tensor]:
        """Returns full checkpoint tensors, other values for each number."""
        raise NotImplementedError

    def state(self, landing: Any) -> Mapping[str, torch.Tensor]:
        """Returns what the landing's model serves."""
        raise NotImplementedError

    def load(self, landing: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fills the landing's model by the engine's own way of loading."""
        raise NotImplementedError

    def refuses(self, landing: Any) -> bool:
        """Whether the landing's engine would refuse to generate now. Without an override that is not checked."""
        raise NotImplementedError

    def _case(self) -> LandingCase:
        return LandingCase(
            self.make_landing, self.weights, state=self.state, load=self.load, world_size=self.world_size, device=self.device,
            refuses=self.refuses if type(self).refuses is not LandingSuite.refuses else None, needed=self.needed or None,
        )  # fmt: skip

    def test_a_trace_writes_nothing_and_is_complete(self) -> None:
        """See `check_trace`."""
        case = self._case()
        for landing in case.landings():
            check_trace(landing, case.tensors(), case.state)

    def test_a_sync_leaves_what_the_engines_own_load_leaves(self) -> None:
        """See `check_landed`."""
        check_landed(self._case())

    def test_a_tensor_that_nobody_offers_is_refused_by_name(self) -> None:
        """See `check_missing`."""
        check_missing(self._case())
