"""Tensors without storage that weight loaders run against: shape, dtype and strides, and the views taken so far.

A `StandIn` stands for a checkpoint tensor. View ops of a closed list give another stand-in with a longer chain; a cast
is remembered; a concatenation of stand-ins keeps its parts. Copying a stand-in into a real tensor reaches the recorder
that made it (see `tracing`). Whatever would need the data is refused, with op, tensor, chain and loader line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import resolve_name

from .errors import TracingError
from .geometry import Chain, format_chain


class Recorder(Protocol):
    """What a stand-in reports to."""

    def refuse(self, op: str, tensor: StandIn, why: str) -> TracingError:
        """Returns the error to raise, and remembers it in case the loader swallows it."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a stand-in comes from.

    Attributes:
        name: the checkpoint tensor.
        dtype: the checkpoint tensor's dtype.
        views: the view ops applied so far, canonical: no negative numbers, views and flattenings as `reshape`.
        casts: dtype names cast to, in order. A cast works element by element, so it may follow all views.
    """

    name: str
    dtype: str
    views: Chain = ()
    casts: tuple[str, ...] = ()

    @property
    def chain(self) -> Chain:
        """Views, then casts."""
        return self.views + tuple(("to", (dtype,)) for dtype in self.casts)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of `dtype` without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


#: reads that shape, strides, dtype and device answer
_READS: frozenset[Any] = frozenset(
    _getters(
        "shape", "dtype", "device", "ndim", "itemsize", "nbytes", "layout", "requires_grad", "is_leaf", "grad",
        "grad_fn", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu",
    )
    | {
        getattr(torch.Tensor, name)
        for name in (
            "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device",
            "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg",
            "__len__", "__hash__",
        )
    }
    | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_inference}
)  # fmt: skip


#: what to do for torch functions and methods on stand-ins; filled by `viewops`
HANDLERS: dict[Any, Callable[..., Any]] = {}


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler for the methods of `torch.Tensor` and the functions of `torch` of these names."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            method = getattr(torch.Tensor, name, None) or getattr(torch, name)
            HANDLERS[method if callable(method) else method.__get__] = handler
            if callable(function := getattr(torch, name, None)):
                HANDLERS[function] = handler
        return handler

    return register


class StandIn(torch.Tensor):
    """A view of one checkpoint tensor, or of several side by side, without any data.

    Attributes:
        origin: the checkpoint tensor and the chain that leads here. Of a concatenation: of its first part.
        twin: a meta tensor of the same geometry; torch itself computes shapes and strides on it.
        recorder: who is told about refusals and copies.
        parts: the stand-ins that a concatenation holds, in order along `axis`; empty otherwise.
    """

    origin: Origin
    twin: torch.Tensor
    recorder: Recorder
    parts: tuple[StandIn, ...]
    axis: int

    @staticmethod
    def make(
        recorder: Recorder,
        origin: Origin,
        twin: torch.Tensor,
        device: torch.device,
        parts: tuple[StandIn, ...] = (),
        axis: int = 0,
    ) -> StandIn:
        """Makes a stand-in that says it lives on `device` with the shape, strides and dtype of `twin`."""
        self: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=device, requires_grad=False
        )
        self.origin, self.twin, self.recorder, self.parts, self.axis = origin, twin, recorder, parts, axis
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        inside = " | ".join(f"{part.origin.name}{format_chain(part.origin.chain)}" for part in self.parts or (self,))
        return f"StandIn({inside}, shape={tuple(self.twin.shape)}, dtype={dtype_name(self.twin.dtype)})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise self.recorder.refuse("torch.nn.Parameter", self, "would put the stand-in itself into the model")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is None and func not in _READS:
            raise _refusal(func, args, kwargs, "needs its data")
        try:
            if handler is not None:
                return handler(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except TracingError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError) as error:
            raise _refusal(func, args, kwargs, f"does not work: {error}") from error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        why = "needs its data, or comes from a thread that the trace does not watch, or after the trace"
        raise _refusal(func, args, kwargs or {}, why)


def standins(values: Any) -> Iterable[StandIn]:
    """Yields the stand-ins among call arguments, at any depth of lists, tuples and dicts."""
    if isinstance(values, StandIn):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from standins(value)
    elif isinstance(values, dict):
        yield from standins(list(values.values()))


def _refusal(func: Any, args: Any, kwargs: Any, why: str) -> TracingError:
    name = resolve_name(func) or str(func)
    tensor = next(iter(standins((args, kwargs))))
    return tensor.recorder.refuse(name.removesuffix(".__get__"), tensor, why)
