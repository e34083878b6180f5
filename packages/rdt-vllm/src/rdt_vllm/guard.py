"""What keeps a replica from generating while its weights are being written or are of two versions.

A pre-forward hook and a replaced `compute_logits` on the model object, there only between the begin of a sync and its
complete end. `compute_logits` matters because a forward pass that was captured as a CUDA graph runs no hooks. It
refuses by raising: vLLM ends such an engine rather than let it serve a mixture.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from rdt_core.errors import TornReplicaError


class TornGuard:
    """Switches generation of one model off and on again.

    Args:
        model: the model whose forward pass is guarded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._who = ""
        self._hook: Any = None
        self.reason: str | None = None

    def close(self, reason: str, who: str) -> None:
        """From here on generating raises TornReplicaError.

        Args:
            reason: why; a later call replaces it.
            who: the engine rank.
        """
        self.reason = reason
        self._who = who
        if self._hook is not None:
            return
        self._hook = self._model.register_forward_pre_hook(self._refuse, with_kwargs=True)
        if hasattr(self._model, "compute_logits"):
            self._model.__dict__["compute_logits"] = self._refuse

    def open(self) -> None:
        """Generating works again. Idempotent."""
        self.reason = None
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self._model.__dict__.pop("compute_logits", None)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TornReplicaError(
            f"{self._who} refuses to generate: {self.reason}. Its weights may be of two versions; run a complete sync "
            "before resuming it, or restart it"
        )
