"""How a model is spread over Megatron ranks, as one small value with a readable name."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes and what else decides where a parameter lies.

    Attributes:
        tp: tensor parallel ranks.
        pp: pipeline stages.
        vpp: model chunks of each stage; 1 is no virtual pipeline.
        cp: context parallel ranks.
        dp: data parallel ranks; expert parallel ranks are among these and the context and tensor parallel ones.
        ep: expert parallel ranks.
        etp: tensor parallel ranks of the experts; 0 is as many as `tp`.
        first: layers of the first stage; 0 is an even share.
        last: layers of the last stage; 0 is an even share.
        sp: sequence parallel; Megatron wants it wherever experts meet tensor parallelism, and there it is on anyway.
        mtp: layers for multi-token prediction.
        distopt: parameters in the buffers of Megatron's DDP, for its distributed optimizer.
        bf16: parameters in bfloat16, below a Float16Module.
        grouped: experts in one tensor for all of a rank, as Megatron's own grouped GEMM holds them.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    first: int = 0
    last: int = 0
    sp: bool = False
    mtp: int = 0
    distopt: bool = False
    bf16: bool = False
    grouped: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def name(self) -> str:
        """What differs from a single rank, as in "tp2-pp2-distopt"."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}{value}")
        return "-".join(parts) or "one"
