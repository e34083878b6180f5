"""The modules of a Megatron model on one rank: model chunks without their wrappers, and what they hold.

Parameters are found with names that count layers over the whole model, whatever the pipeline split. Refused: models
whose parameters Megatron gathers lazily, because what readers would get are the weights of an earlier step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rdt_core.errors import SourceError

# the layer inside a multi-token-prediction block, by its name in different releases
_INNER = ("transformer_layer.", "mtp_model_layer.")
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Where this rank stands in the groups that cut tensors.

    Attributes:
        tp_size, tp_rank: tensor parallelism of everything but experts.
        etp_size, etp_rank: tensor parallelism of experts.
        ep_size, ep_rank: expert parallelism.
    """

    tp_size: int = 1
    tp_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @classmethod
    def here(cls) -> Parallel:
        """Returns what `megatron.core.parallel_state` says in this process.

        Raises:
            SourceError: it was not initialised.
        """
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise SourceError(
                "Megatron's parallel_state is not initialised in this process; call initialize_model_parallel first, or "
                "pass `parallel=` where the model was built with process groups of its own"
            )
        return cls(
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            ep_size=parallel_state.get_expert_model_parallel_world_size(),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A parameter, or a buffer that checkpoints hold.

    Attributes:
        name: with layers counted over the whole model; the layer inside a prediction block is called a decoder layer.
        owner: the module that has it.
        key: its name there.
        is_buffer: whether it is a buffer.
    """

    name: str
    owner: nn.Module
    key: str
    is_buffer: bool

    def tensor(self) -> torch.Tensor:
        """Returns it as the module has it now.

        Raises:
            SourceError: it is gone.
        """
        tensor = (self.owner._buffers if self.is_buffer else self.owner._parameters).get(self.key)
        if tensor is None:
            raise SourceError(
                f"{self.name!r} was declared, but its module no longer has it; make a new source and join again"
            )
        return tensor


def chunks_of(model: Any) -> tuple[list[nn.Module], list[Any]]:
    """Returns the model chunks without wrappers, and the distributed-data-parallel wrappers among those taken off.

    Args:
        model: a model, or the list of its chunks (interleaved pipelines), wrapped or not.

    Raises:
        SourceError: something in it is no model of Megatron's.
    """
    chunks, wrappers = [], []
    for chunk in model if isinstance(model, Sequence | nn.ModuleList) else [model]:
        while not hasattr(chunk, "decoder") and isinstance(getattr(chunk, "module", None), nn.Module):
            if hasattr(chunk, "ddp_config"):
                wrappers.append(chunk)
            chunk = chunk.module
        if not isinstance(chunk, nn.Module) or not hasattr(chunk, "decoder") or not hasattr(chunk, "config"):
            inner = getattr(chunk, "language_model", None)
            hint = "; pass its `language_model`, whose tensors are declared alone" if hasattr(inner, "decoder") else ""
            raise SourceError(
                f"found a {type(chunk).__name__} where a model chunk was expected: Megatron's GPTModel (or one that has "
                f"`decoder` and `config` like it), wrapped or not{hint}"
            )
        chunks.append(chunk)
    if not chunks:
        raise SourceError("the model has no chunks; every rank holds at least one")
    return chunks, wrappers


def check_gathered(chunks: Sequence[nn.Module], wrappers: Sequence[Any]) -> None:
    """Refuses parameters that Megatron would only gather with the next forward pass, and wrappers that cut them otherwise.

    Args:
        chunks: without their wrappers. A model may be given without its wrapper, which has hooks on every module of it.
        wrappers: as `chunks_of` returns them.

    Raises:
        SourceError: the distributed optimiser overlaps the gathering of parameters, and its hooks are in place; or the
            wrapper is another than Megatron's DistributedDataParallel.
    """
    for wrapper in wrappers:
        if not hasattr(wrapper, "remove_forward_pre_hook_handles"):
            raise SourceError(
                f"the model is wrapped by {type(wrapper).__name__}, which spreads parameters over data parallel ranks in a "
                "way of its own; wrap it by Megatron's DistributedDataParallel, with or without the distributed optimiser"
            )
    lazy = any(wrapper.remove_forward_pre_hook_handles for wrapper in wrappers)
    if lazy or any(map(_gathers, (hook for chunk in chunks for hook in chunk._forward_pre_hooks.values()))):
        raise SourceError(
            "Megatron gathers parameters lazily here (overlap_param_gather): after an optimiser's step most ranks "
            "still hold those of the step before. Call disable_forward_pre_hook() on every model chunk before join "
            "and publish (it gathers them), and enable_forward_pre_hook() afterwards"
        )


def _gathers(hook: Any) -> bool:
    """Whether this is a hook in which Megatron's DistributedDataParallel waits for parameters."""
    return "DistributedDataParallel._make_forward_pre_hook" in getattr(hook, "__qualname__", "")


def owners(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules that have parameters, in their order: others in their place make another model."""
    return [module for chunk in chunks for module in chunk.modules() if module._parameters]


def find(chunks: Sequence[nn.Module], *, tied: bool) -> Iterator[Found]:
    """Yields every parameter and every persistent buffer of the chunks, each once.

    Left out are the copies that Megatron keeps of the embedding: on a last stage whose output layer is tied to it, and
    on the stage of the prediction layers.

    Args:
        chunks: as `chunks_of` returns them.
        tied: whether the output layer is tied to the embedding.
    """
    seen: set[int] = set()
    for chunk in chunks:
        copies = ["output_layer.weight"] if tied else []
        if not getattr(chunk, "pre_process", True):
            copies.append("embedding.word_embeddings.weight")
        for path, owner in chunk.named_modules(remove_duplicate=False):
            for table, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
                for key, tensor in table.items():
                    if tensor is None or id(tensor) in seen or (is_buffer and key in owner._non_persistent_buffers_set):
                        continue
                    seen.add(id(tensor))
                    name = f"{path}.{key}" if path else key
                    if name not in copies:
                        yield Found(_global_name(chunk, name), owner, key, is_buffer)


def _global_name(chunk: nn.Module, name: str) -> str:
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    stack, index, rest = found.groups()
    layer: Any = chunk.get_submodule(f"{stack}.layers.{index}")
    number = int(layer.layer_number) - 1
    if stack == "mtp":
        config: Any = chunk.config
        number += int(config.num_layers)
        for inner in _INNER:
            if rest.startswith(inner):
                return f"decoder.layers.{number}.{rest.removeprefix(inner)}"
    return f"{stack}.layers.{number}.{rest}"
