"""A tiny checkpoint with a tokenizer that knows words, so that the demo can reward what it generates."""

from __future__ import annotations

from pathlib import Path

import pytest

PREFIXES = "samtpb"
ENDINGS = ("ea", "un", "ky", "on", "at", "it", "ing", "ow", "ar", "et")
SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = (*SPECIAL, *(first + end for first in PREFIXES for end in ENDINGS))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama of tied embeddings, float32, and a word-level tokenizer without chat template."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from rdt_testbed import models

    folder = tmp_path_factory.mktemp("demo") / "tiny"
    models.save(models.build("llama-tied", vocab_size=64, max_position_embeddings=256), folder)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder
