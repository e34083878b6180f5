"""What Megatron ranks declare is the checkpoint: every family, every way of spreading a model, on stock megatron-core.

The boxes of all ranks are put together to a checkpoint, which must have the names and shapes that transformers saves, and
which transformers must load to a model that computes what Megatron computed. Values differ by rank, so that a part in the
wrong place is noticed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rdt_testbed import models
from rdt_testbed.megatron import Layout
from rdt_testbed.megatron.ranks import Ranks
from rdt_testbed.megatron.shim import has_grouped

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("layout_ranks.py")
#: bytes of the largest tensor that declaring may make: less than any checkpoint tensor but the routers' biases
SMALL = 64
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """A model, and how it is spread. The vocabulary is no multiple of anything, so that there is padding."""

    kind: models.Kind
    layout: Layout
    layers: int = 2
    vocabulary: int = 250

    @property
    def changes(self) -> dict[str, Any]:
        return {"num_hidden_layers": self.layers, "vocab_size": self.vocabulary}

    @property
    def tokens(self) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, (2, 16), generator=torch.Generator().manual_seed(5))

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout.name}"


CELLS = [
    Cell("llama", Layout()),
    Cell("llama", Layout(tp=2)),
    Cell("llama", Layout(dp=2)),
    Cell("llama", Layout(cp=2)),
    Cell("llama", Layout(pp=2, first=1), layers=4),
    Cell("llama", Layout(tp=4), vocabulary=20),  # the last rank holds nothing but padding of the vocabulary
    Cell("llama-tied", Layout(tp=2)),
    Cell("llama-tied", Layout(tp=2, pp=2)),
    Cell("llama-tied", Layout(pp=4), layers=4),
    Cell("llama-tied", Layout(pp=2, vpp=2), layers=4),
    Cell("qwen2", Layout(tp=2, sp=True)),
    Cell("qwen2", Layout(tp=4)),  # 2 query groups
    Cell("qwen2", Layout(pp=2, vpp=2), layers=4),
    Cell("qwen3", Layout(tp=2, pp=2)),
    Cell("qwen3", Layout(tp=4)),
    Cell("qwen3", Layout(tp=2, dp=2, distopt=True)),
    Cell("qwen3", Layout(tp=2, dp=2, distopt=True, bf16=True)),
    Cell("qwen3-moe", Layout(dp=2, ep=2)),
    Cell("qwen3-moe", Layout(tp=2, dp=2, ep=4, etp=1)),
    Cell("qwen3-moe", Layout(tp=2, dp=2, ep=2, etp=2)),
    Cell("qwen3-moe", Layout(dp=4, ep=2, distopt=True)),
    Cell("qwen3-moe", Layout(pp=2, vpp=2, dp=2, ep=2), layers=4),
    Cell("qwen3-moe", Layout(dp=2, ep=2, grouped=True)),
    Cell("qwen3-moe", Layout(tp=2, grouped=True)),
    Cell("mixtral", Layout(tp=2)),
    Cell("mixtral", Layout(tp=2, dp=2, ep=4, etp=1)),
    Cell("mixtral", Layout(tp=2, pp=2, ep=2, etp=1)),
    Cell("mixtral", Layout(dp=2, ep=2, grouped=True)),
    Cell("deepseek-v2", Layout(tp=2)),
    Cell("deepseek-v2", Layout(tp=2, pp=2)),
    Cell("deepseek-v2", Layout(tp=2, dp=2, ep=2, etp=2)),
    Cell("deepseek-v3", Layout(tp=4)),
    Cell("deepseek-v3", Layout(tp=2, cp=2)),
    Cell("deepseek-v3", Layout(pp=2, last=1), layers=4),
    Cell("deepseek-v3", Layout(tp=2, dp=2, ep=4, etp=1, distopt=True)),
    Cell("deepseek-v3", Layout(tp=2, pp=2, ep=2, etp=1, mtp=1)),
    Cell("glm4-moe", Layout(tp=4, ep=2, etp=2)),
    Cell("glm4-moe", Layout(tp=2, pp=2, ep=2, etp=1)),
    Cell("glm4-moe", Layout(pp=2, vpp=2), layers=4),
    Cell("glm4-moe", Layout(tp=2, ep=2, etp=1, mtp=1)),
]
CELLS = [cell for cell in CELLS if not cell.layout.grouped or has_grouped()]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(PROGRAM) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def observed(ranks: Ranks) -> Callable[[Cell], list[dict[str, Any]]]:
    """What each rank of a cell found; ranks run once for all tests."""

    @functools.cache
    def observe(cell: Cell) -> list[dict[str, Any]]:
        return ranks.run("observe", cell.layout, cell.kind, cell.changes, cell.tokens, timeout_s=120)

    return observe


@functools.cache
def saved(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that transformers writes, and of the layers that it does not know."""
    model = models.build(cell.kind, **cell.changes)
    with tempfile.TemporaryDirectory() as folder:
        models.save(model, Path(folder))
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    hidden, rows = model.config.hidden_size, (cell.vocabulary, model.config.hidden_size)
    for layer in range(cell.layers, cell.layers + cell.layout.mtp):
        # as in the published checkpoints: one more layer like the last, and what joins it to the model
        last, new = f"model.layers.{cell.layers - 1}.", f"model.layers.{layer}."
        shapes |= {name.replace(last, new): shape for name, shape in shapes.items() if name.startswith(last)}
        shapes |= {new + name: (hidden,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        shapes |= {new + "eh_proj.weight": (hidden, 2 * hidden)}
        shapes |= {new + name: rows for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return shapes


def assemble(found: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Puts the boxes of all ranks together; returns the tensors, and how many ranks hold each element.

    Ranks that hold the same elements must hold the same bits.
    """
    shapes = {name: shape for one in found for name, shape, _ in one["metadata"]}
    tensors: dict[str, torch.Tensor] = {}
    owners = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for rank, one in enumerate(found):
        for name, offset, value in one["shards"]:
            box = tuple(slice(start, start + size) for start, size in zip(offset, value.shape, strict=True))
            whole = tensors.setdefault(name, torch.zeros(shapes[name], dtype=value.dtype))
            held = owners[name][box] > 0
            assert whole[box].shape == value.shape, f"{name}: a box of rank {rank} leaves the tensor"
            assert torch.equal(whole[box][held], value[held]), f"{name}: rank {rank} differs from an earlier one"
            whole[box] = value
            owners[name][box] += 1
    return tensors, owners


@each_cell
def test_boxes_cover_the_checkpoint(cell: Cell, observed: Callable[[Cell], list[dict[str, Any]]]) -> None:
    found = observed(cell)
    tensors, owners = assemble(found)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == saved(cell)
    assert [name for name, count in owners.items() if (count == 0).any()] == []
    everywhere: dict[str, Any] = {}
    for one in found:
        declared = {name: (shape, dtype) for name, shape, dtype in one["metadata"]}
        assert {name for name, *_ in one["shards"]} == declared.keys(), "a rank declares what it holds a part of"
        assert all(everywhere.setdefault(name, what) == what for name, what in declared.items())
    biases = {name for name in tensors if name.endswith("correction_bias")}
    usual = "bfloat16" if cell.layout.bf16 else "float32"
    assert {name: dtype for name, (_, dtype) in everywhere.items()} == {
        name: "float32" if name in biases else usual for name in tensors
    }
    predicted = tuple(f"model.layers.{cell.layers + layer}." for layer in range(cell.layout.mtp))
    assert {name for one in found for name in one["ignored"]} == {n for n in tensors if n.startswith(predicted or "-")}


@each_cell
def test_shards_are_views_that_cost_nothing(cell: Cell, observed: Callable[[Cell], list[dict[str, Any]]]) -> None:
    for one in observed(cell):
        assert one["views"], "a shard shares no memory with a parameter or buffer"
        assert one["same"], "shards or their fingerprint changed though nothing moved"
        assert one["collectives"] == []
        assert one["largest"] <= SMALL
        if cell.layout.distopt:
            assert one["trained"] == len(one["shards"]) - sum("correction_bias" in name for name, *_ in one["shards"])
            assert one["storages"] <= 4, "the parameter buffers are the regions, not each parameter"


@each_cell
def test_transformers_computes_the_same(cell: Cell, observed: Callable[[Cell], list[dict[str, Any]]]) -> None:
    found = observed(cell)
    want = computed(cell, assemble(found)[0])
    outputs = [one["logits"] for one in found if one["logits"] is not None]
    assert len(outputs) == cell.layout.world // cell.layout.pp
    for logits in outputs:
        assert len(logits) == len(want) == 1 + cell.layout.mtp
        assert max(map(difference, logits, want)) < (0.1 if cell.layout.bf16 else TOLERANCE)


def swaps(cell: Cell) -> list[tuple[str, str]]:
    """Tensors of equal shapes that lie side by side in one parameter of Megatron's."""
    halves = ("w1", "w3") if cell.kind == "mixtral" else ("gate_proj", "up_proj")
    return [halves] if cell.kind.startswith("deepseek") else [halves, ("k_proj", "v_proj")]


@pytest.mark.parametrize(
    ("cell", "pair"),
    [
        pytest.param(cell, pair, id=f"{cell}-{'-'.join(pair)}")
        for cell in CELLS
        if cell.layout.tp > 1 and not cell.layout.distopt
        for pair in swaps(cell)
    ],
)
def test_swapped_tensors_are_noticed(
    cell: Cell, pair: tuple[str, str], observed: Callable[[Cell], list[dict[str, Any]]]
) -> None:
    found = observed(cell)
    tensors, _ = assemble(found)
    one, other = (f".{name}." for name in pair)
    swapped = {name.replace(one, other) if one in name else name.replace(other, one): t for name, t in tensors.items()}
    logits = next(one["logits"] for one in found if one["logits"] is not None)
    assert difference(logits[0], computed(cell, tensors)[0]) < TOLERANCE
    assert difference(logits[0], computed(cell, swapped)[0]) > 1000 * TOLERANCE


def test_what_costs_something_is_noticed(ranks: Ranks) -> None:
    for collectives, largest in ranks.run("notice", Layout(dp=2)):
        assert collectives == ["c10d.allreduce_.default"]
        assert largest == 4000


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@torch.no_grad()
def computed(cell: Cell, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logits of the checkpoint as transformers loads it, then those of the layers for multi-token prediction."""
    model = load(cell.kind, cell.changes, {n: t for n, t in tensors.items() if not _beyond(n, cell.layers)})
    logits = [model(cell.tokens).logits]
    if not cell.layout.mtp:
        return logits
    # transformers' own class of layer, as the last layer of a model that has one more
    longer = cell.changes | {"num_hidden_layers": cell.layers + 1}
    joints = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    own = f"model.layers.{cell.layers}."
    layers = {n: t for n, t in tensors.items() if not n.startswith(tuple(own + joint for joint in joints))}
    layer, rotary = (more := load(cell.kind, longer, layers).model).layers[-1], more.rotary_emb
    hidden = model.model(cell.tokens).last_hidden_state
    following = cell.tokens.roll(-1, dims=1)
    following[:, -1] = 0
    embedded = torch.nn.functional.embedding(following, tensors[own + "embed_tokens.weight"])

    def norm(value: torch.Tensor, name: str) -> torch.Tensor:
        weight = tensors[own + name]
        return torch.nn.functional.rms_norm(value, weight.shape, weight, eps=model.config.rms_norm_eps)

    both = torch.cat([norm(embedded, "enorm.weight"), norm(hidden, "hnorm.weight")], -1)
    given = both @ tensors[own + "eh_proj.weight"].T
    positions = torch.arange(given.shape[1])[None]
    mask = torch.full((given.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    rope = rotary(given, position_ids=positions)
    output = layer(given, attention_mask=mask, position_ids=positions, position_embeddings=rope)
    output = norm(output, "shared_head.norm.weight")
    return [*logits, output @ tensors[own + "shared_head.head.weight"].T]


def _beyond(name: str, layers: int) -> bool:
    parts = name.split(".")
    return parts[1] == "layers" and int(parts[2]) >= layers


def load(kind: models.Kind, changes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Returns transformers' model of these checkpoint tensors, with nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        models.config(kind, **changes).save_pretrained(folder)
        save_file({n: t.contiguous() for n, t in tensors.items()}, f"{folder}/model.safetensors", {"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert {key: list(value) for key, value in report.items() if value} == {}
    return model.eval()
