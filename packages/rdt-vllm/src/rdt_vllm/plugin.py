"""Entry point of group `vllm.general_plugins`: registers the weight transfer backend `rdt`.

vLLM calls it in the driver, in EngineCore and in every worker, more than once in some: it is idempotent and imports
nothing heavy. The module path is taken from this package's own name, so that a vendored copy registers itself.
It refuses nothing: whoever registered the name first in this process keeps it.
"""

from __future__ import annotations

BACKEND = "rdt"
ENGINE_CLASS = "RdtWeightTransferEngine"

_ENGINE_MODULE = __name__.rpartition(".")[0] + ".engine"


def register() -> None:
    """Registers backend `rdt` with vLLM's factory, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, _ENGINE_MODULE, ENGINE_CLASS)
