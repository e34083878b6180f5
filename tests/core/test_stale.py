"""What could stay stale beside the weights: replaced parameters, aliases, buffers, what a module computed, registered memory.

One source rank and one plain module in one process. What a plain module cannot know is a limit, shown here as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from rdt_core import memory, wire
from rdt_core.control import LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.errors import CoverageError, EngineError, SyncError, TornReplicaError
from rdt_core.landing import ModuleLanding
from rdt_core.memory import Arena
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources import ModuleSource
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange

pytestmark = pytest.mark.unit


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(6, 4))
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))


class Pair:
    """A trainer and a replica."""

    def __init__(
        self,
        served: torch.nn.Module,
        trained: torch.nn.Module | None = None,
        kept: tuple[str, ...] = (),
        **source: object,
    ) -> None:
        self.control = LocalControl(Coordinator("test", 1, 30.0))
        exchange = LocalExchange()
        self.trained = Model() if trained is None else trained
        self.sync = WeightSync(
            self.control, ModuleSource(self.trained, **source), group="test", rank=0, world_size=1, kinds=("local",),
            timeout_s=10.0, exchange=exchange,
        )  # fmt: skip
        self.worker = ModuleWorker(lambda: served, control=self.control, exchange=exchange, kept=kept)
        self.sync.attach(ModuleReplica([self.worker]))

    def publish(self, version: int) -> None:
        with torch.no_grad():
            for tensor in self.trained.state_dict().values():
                tensor.fill_(version)
        self.sync.publish(version)

    def holds(self) -> dict[str, set[float]]:
        return {name: set(value.flatten().tolist()) for name, value in self.worker.state().items()}

    def close(self) -> None:
        self.sync.leave()
        self.control.close()


@pytest.fixture
def pair() -> Iterator[type[Pair]]:
    made: list[Pair] = []

    def make(*args: object, **options: object) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _replace(module: Model) -> None:
    module.norm = torch.nn.Parameter(torch.zeros(4))


def _move(module: Model) -> None:
    module.norm.data = module.norm.data.clone()


def _add(module: Model) -> None:
    module.register_parameter("more", torch.nn.Parameter(torch.zeros(4)))
    _move(module)


class Megatronlike(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Linear(4, 6, bias=False)
        self.norm = torch.nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("trained", "told"),
    [
        (
            Megatronlike(),
            (
                r"kept=\. Of 2 tensors that are offered its loaders take 1, and not 'word_embeddings\.weight': these are "
                "Megatron's own names; rdt_megatron.MegatronSource declares such a model as its checkpoint$"
            ),
        ),
        (
            torch.nn.Linear(4, 6),
            r"take 0, and not 'weight', 'bias': they are no names of its checkpoint; rename= of the source maps them$",
        ),
    ],
    ids=["megatron", "other"],
)
def test_names_that_are_no_checkpoints_are_said(pair, trained, told):
    with pytest.raises(CoverageError, match=told):
        pair(torch.nn.ParameterDict({"embed": torch.zeros(6, 4), "norm": torch.zeros(4)}), trained)


@pytest.mark.parametrize("change", [_replace, _move, _add])
def test_served_parameters_that_were_replaced_are_never_taken_for_updated(pair, change):
    made = pair(Model(), kept=("more",))
    made.publish(1)
    change(made.worker.module)
    with pytest.raises(SyncError, match="not where they were when it was connected: 'norm'"):
        made.publish(2)
    assert made.worker.version() is None
    with pytest.raises(TornReplicaError):
        made.worker.state()
    made.publish(3)  # connects again
    assert made.worker.version() == 3
    assert made.holds()["norm"] == made.holds()["embed"] == {3.0}


def test_a_parameter_replaced_while_it_is_written_is_no_finished_sync():
    landing = ModuleLanding(Model())
    landing.begin()
    _replace(landing.module)
    with pytest.raises(EngineError, match="'norm'"):
        landing.finish()
    assert landing.torn


def test_an_alias_follows_what_it_is_an_alias_of(pair):
    served = Model()
    served.head = served.embed  # two names, one memory
    served.register_buffer("view", served.norm.data[1:], persistent=False)
    made = pair(served)
    made.publish(1)
    made.publish(2)
    assert made.holds() == {name: {2.0} for name in ("embed", "norm", "bias", "head")}
    assert set(served.view.tolist()) == {2.0}
    assert served.head.data_ptr() == served.embed.data_ptr()


def test_two_tensors_for_one_memory_are_refused(pair):
    served, trained = Model(), Model()
    served.head = served.embed
    trained.head = torch.nn.Parameter(torch.zeros(6, 4))  # no longer tied
    with pytest.raises(CoverageError, match="'embed' and 'head' write the same bytes"):
        pair(served, trained)


def test_buffers_are_synced_where_the_source_offers_them_and_kept_else(pair):
    made = pair(Model())
    made.publish(1)
    assert made.holds()["bias"] == {1.0}
    alone = pair(Model(), include_buffers=False)
    alone.publish(1)
    assert alone.holds()["bias"] == {0.0}


def test_what_a_plain_module_computed_from_its_weights_stays_until_it_computes_it_again(pair):
    served = Model()
    served.twice = 2 * served.norm.detach()  # neither parameter nor buffer nor view: nobody can know of it
    made = pair(served)
    made.publish(1)
    assert set(served.twice.tolist()) == {0.0}
    made.worker.call(lambda module: module.twice.copy_(2 * module.norm.detach()))
    assert set(served.twice.tolist()) == {2.0}


def test_what_the_source_does_not_offer_is_refused_unless_it_is_kept(pair):
    served = Model()
    served.score = torch.nn.Parameter(torch.full((4,), 7.0))
    with pytest.raises(CoverageError, match=r"1 parameters .* would keep their values: 'score'"):
        pair(served)
    made = pair(served, kept=("sco*",))
    made.publish(1)
    assert made.holds() == {"embed": {1.0}, "norm": {1.0}, "bias": {1.0}, "score": {7.0}}


def test_a_version_that_was_not_pulled_is_not_finished(pair):
    made = pair(Model())
    made.publish(1)
    with pytest.raises(SyncError, match="cannot finish version 2"):
        made.worker.finish(2)
    assert made.worker.version() == 1
    assert made.holds()["norm"] == {1.0}


def test_registered_memory_that_nobody_uses_serves_the_next_of_its_size():
    nbytes = 12345
    first = Arena(nbytes)
    memory.retain(first.tensor)
    first.tensor.fill_(7)
    memory.give_back(first.tensor)
    memory.give_back(first.tensor)
    second, third, other = Arena(nbytes), Arena(nbytes), Arena(nbytes + 1)
    assert second.tensor.data_ptr() == first.tensor.data_ptr()
    assert len({second.tensor.data_ptr(), third.tensor.data_ptr(), other.tensor.data_ptr()}) == 3
    assert not second.tensor.any(), "nothing of its former life is left"


def test_memory_that_is_not_registered_goes_away_with_its_last_user():
    arena = Arena(54321)
    memory.give_back(arena.tensor)
    assert Arena(54321).tensor.data_ptr() != arena.tensor.data_ptr()


class Fused(torch.nn.Module):
    """Two checkpoint tensors in one parameter, and a padded vocabulary whose padding the loader sets."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.zeros(40)
        self.fused = torch.nn.Parameter(self.flat[:24].view(6, 4), requires_grad=False)
        self.vocabulary = torch.nn.Parameter(self.flat[24:].view(4, 4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.vocabulary.data[3:].fill_(0)
                self.vocabulary.data[:3].copy_(tensor)
            else:
                at = {"gate": 0, "up": 3}[name]
                self.fused.data[at : at + 3].copy_(tensor)


def test_a_parameter_of_which_only_a_part_is_offered_is_refused():
    served = Fused()
    offered = [wire.TensorMeta(name=name, shape=(3, 4), dtype="float32") for name in ("embed", "gate", "up")]
    landing = ModuleLanding(served, served.load_weights)
    landing.trace(offered)
    with pytest.raises(CoverageError, match=r"1 parameters .* not all of them.*: 'fused' \(48 of 96 bytes\)\. Let"):
        ModuleLanding(served, served.load_weights).trace(offered[:2])
    with torch.no_grad():
        served.flat.fill_(5.0)
    landing.begin()
    assert served.vocabulary.tolist() == [[5.0] * 4] * 3 + [[0.0] * 4], "the padding is the loader's in every sync"
    assert served.fused.eq(5.0).all()


@pytest.mark.parametrize("zeroed", [slice(0, 3), slice(0, 6)], ids=["the part that is loaded", "all of it"])
def test_what_a_loader_sets_to_a_number_first_counts_once(zeroed: slice):
    served = Fused()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            served.fused.data[zeroed].zero_()
            served.fused.data[:3].copy_(tensor)

    landing = ModuleLanding(served, load, kept=("vocabulary",))
    offered = [wire.TensorMeta(name="gate", shape=(3, 4), dtype="float32")]
    if zeroed.stop == 6:  # the rest is the loader's own number, in every sync
        landing.trace(offered)
    else:
        with pytest.raises(CoverageError, match=r"'fused' \(48 of 96 bytes\)"):
            landing.trace(offered)
