"""What must be known of a model besides its parameters: its family, its vocabulary, whether its embeddings are tied.

Taken from the model's Hugging Face configuration, which every trainer of a checkpoint has, and compared with Megatron's
own configuration: a model that was built with other sizes is refused before anything is declared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rdt_core.errors import SourceError

from .families import Family, family_of

#: names in a Hugging Face configuration, and in Megatron's
_ALIKE = (
    (("num_hidden_layers",), "num_layers"),
    (("hidden_size",), "hidden_size"),
    (("num_attention_heads",), "num_attention_heads"),
    (("num_experts", "num_local_experts", "n_routed_experts"), "num_moe_experts"),
)
#: and those that mean something else where attention is latent
_ALIKE_UNLESS_LATENT = ((("num_key_value_heads",), "num_query_groups"), (("head_dim",), "kv_channels"))
#: what makes Megatron hold other numbers, or rows in another order, than checkpoints of the families here: a view would be wrong
_CONVERTED = {
    "layernorm_zero_centered_gamma": "Megatron's norms hold their weights less one",
    "rotary_interleaved": "Megatron's query and key hold the rows of a head in another order",
    "moe_mlp_glu_interleave_size": "Megatron's experts hold gate and up in alternating blocks of rows",
    "moe_shared_expert_glu_interleave_size": "Megatron's shared experts hold gate and up in alternating blocks of rows",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a source must know of the checkpoint.

    Attributes:
        family: the table of rules.
        vocab_size: rows of the vocabulary, without padding.
        tied: whether the output layer is the embedding, so that the checkpoint has no `lm_head`.
    """

    family: Family
    vocab_size: int
    tied: bool


def is_transformer_config(config: Any) -> bool:
    """Whether this is Megatron's `TransformerConfig`."""
    return hasattr(config, "num_query_groups") and hasattr(config, "tensor_model_parallel_size")


def facts(
    config: Any,
    transformer: Any,
    *,
    shares: bool,
    family: str | Family | None = None,
    vocab_size: int | None = None,
    tied: bool | None = None,
) -> ModelFacts:
    """Finds what a source must know.

    Args:
        config: the Hugging Face configuration: an object of transformers, a mapping, or the folder or file it is in; or
            Megatron's `TransformerConfig`, which says none of the following three.
        transformer: Megatron's `TransformerConfig` of the model.
        shares: whether the model was built with `share_embeddings_and_output_weights`.
        family: instead of the configuration's `model_type`.
        vocab_size: instead of the configuration's.
        tied: instead of the configuration's `tie_word_embeddings`.

    Raises:
        SourceError: something is not said, the two configurations contradict each other, or Megatron's holds parameters in a
            form that no checkpoint has.
    """
    if not isinstance(family, Family):  # a table of one's own may be of checkpoints that hold them as Megatron does
        _refuse_converted(transformer)
    if is_transformer_config(config):
        theirs: Mapping[str, Any] = {}
        tied = shares if tied is None else tied
        missing = [name for name, value in (("family", family), ("vocab_size", vocab_size)) if value is None]
        if missing:
            raise SourceError(
                f"Megatron's configuration does not say what the checkpoint is called like; pass the model's Hugging "
                f"Face configuration (or its folder) as `config`, or {' and '.join(f'`{name}=`' for name in missing)} too"
            )
    else:
        theirs = read(config)
        _compare(theirs, transformer)
    if vocab_size is None:
        vocab_size = theirs.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise SourceError(f"the configuration has no vocab_size (found {vocab_size!r}); pass `vocab_size=`")
    if tied is None:
        tied = bool(theirs.get("tie_word_embeddings", shares))
    if tied != shares:
        raise SourceError(
            f"the checkpoint {'ties' if tied else 'does not tie'} its output layer to the embedding "
            f"(tie_word_embeddings={tied}), and the Megatron model was built with share_embeddings_and_output_weights="
            f"{shares}; make them equal, or pass `tied=` if the configuration is wrong"
        )
    table = family if isinstance(family, Family) else family_of(family or theirs.get("model_type"))
    return ModelFacts(table, vocab_size, tied)


def read(config: Any) -> Mapping[str, Any]:
    """Returns a Hugging Face configuration as a mapping; of a model with several parts, that of its language model.

    Raises:
        SourceError: no configuration is there.
    """
    if isinstance(config, str | PathLike):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SourceError(
                f"no Hugging Face configuration can be read from {str(path)!r}: {error}. Expected a folder with config.json on "
                "this node, that file, a mapping, or a configuration of transformers; names on the hub are not looked up "
                "(AutoConfig.from_pretrained does it)"
            ) from error
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise SourceError(
            f"`config` is a {type(config).__name__}; expected the model's Hugging Face configuration (an object of "
            f"transformers, a mapping, or the checkpoint's folder), or Megatron's TransformerConfig"
        )
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "num_hidden_layers" not in config:
        return {**config, **inner}
    return config


def _refuse_converted(transformer: Any) -> None:
    found = {name: getattr(transformer, name, None) for name in _CONVERTED}
    wrong = [f"{name}={value} ({_CONVERTED[name]})" for name, value in found.items() if value]
    if wrong:
        raise SourceError(
            f"Megatron's configuration says {'; '.join(wrong)}, unlike the checkpoints of any family known here: views of these "
            f"parameters would be other weights. Train without, or, where the checkpoint holds them alike, pass a Family of "
            f"your own as `family=`"
        )


def _compare(theirs: Mapping[str, Any], transformer: Any) -> None:
    latent = bool(getattr(transformer, "multi_latent_attention", False))
    wrong = []
    for names, own in (*_ALIKE, *(() if latent else _ALIKE_UNLESS_LATENT)):
        name = next((one for one in names if theirs.get(one) is not None), None)
        value = getattr(transformer, own, None)
        if name is not None and value is not None and int(theirs[name]) != int(value):
            wrong.append(f"{name}={theirs[name]} there and {own}={value} in Megatron")
    if wrong:
        raise SourceError(f"the model was not built after its Hugging Face configuration: {'; '.join(wrong)}")
