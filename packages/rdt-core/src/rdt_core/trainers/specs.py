"""The layout that `--trainer` writes."""

from __future__ import annotations

from ..notation import Spec
from .fsdp import FsdpLayout
from .megatron import MegatronLayout


def layout_of(spec: Spec) -> FsdpLayout | MegatronLayout:
    """Returns the layout of a `Spec` that `notation.trainer_spec` has read; whether it fits a model says its `check`."""
    sizes = dict(spec.settings)
    if spec.name == "fsdp":
        return FsdpLayout(sizes["ranks"], sizes["replicas"], bool(sizes["apart"]))
    return MegatronLayout(
        ranks=sizes["ranks"], tp=sizes["tp"], pp=sizes["pp"], ep=sizes["ep"], etp=sizes["etp"], cp=sizes["cp"],
        vpp=sizes["vpp"], first=sizes["first"], last=sizes["last"],
    )  # fmt: skip
