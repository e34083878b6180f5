"""The checkpoint tensors of the whole model, out of what each source rank declares.

A rank declares the tensors that it knows: the whole model (FSDP), or only those that it holds a part of (pipeline and
expert parallelism, where a list of everything on every rank would grow with the square of the ranks). The union is the
same wherever it is made. Refused: ranks that give one name another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from .errors import CoverageError, SourceError
from .layout import groups
from .wire import DTYPE_BYTES, SourceManifest, TensorMeta


class Declared:
    """Tensors by name as ranks declare them one after the other.

    Attributes:
        tensors: by name, in the order of their first declaration.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorMeta] = {}
        self._first: dict[str, int] = {}
        self._lists: dict[tuple[TensorMeta, ...], None] = {}

    def add(self, rank: int, tensors: tuple[TensorMeta, ...]) -> None:
        """Takes what a rank declares.

        Raises:
            CoverageError: an earlier rank gave a tensor another shape or dtype.
        """
        if tensors in self._lists:
            return
        for mine in tensors:
            theirs = self.tensors.get(mine.name)
            if theirs is not None and theirs != mine:
                raise CoverageError(
                    f"source rank {rank} declares checkpoint tensor {describe(mine)} and source rank "
                    f"{self._first[mine.name]} {describe(theirs)}; every rank must declare a tensor by its full shape "
                    f"and the dtype in which it travels"
                )
        for mine in tensors:
            if mine.name not in self.tensors:
                self.tensors[mine.name] = mine
                self._first[mine.name] = rank
        self._lists[tensors] = None

    def ordered(self) -> tuple[TensorMeta, ...]:
        """The tensors in the model's order: as every rank declares them if all do alike, else sorted by `layout.groups`."""
        if len(self._lists) == 1:
            return next(iter(self._lists))
        return tuple(self.tensors[name] for name in chain.from_iterable(groups(tuple(self.tensors))))


def check(tensors: Iterable[TensorMeta], who: str) -> None:
    """Checks what a source of anybody's own declares, before anything is done with it.

    Args:
        tensors: its `metadata()`.
        who: names it in the message.

    Raises:
        SourceError: what is declared is no `TensorMeta`, or has a shape or dtype that cannot travel.
    """
    for meta in tensors:
        if not isinstance(meta, TensorMeta):
            raise SourceError(f"{who}: metadata() gives a {type(meta).__name__} where a TensorMeta is expected")
        if not isinstance(meta.name, str):
            raise SourceError(f"{who} declares a tensor by the name {meta.name!r}; a name is a str")
        shape: object = meta.shape
        if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise SourceError(
                f"{who} declares {meta.name!r} with the shape {shape!r}, a {type(shape).__name__}; a shape is a tuple of plain "
                "integers: tuple(tensor.shape)"
            )
        if not isinstance(meta.dtype, str) or meta.dtype not in DTYPE_BYTES:
            word = str(meta.dtype).removeprefix("torch.")
            way_out = f"write {word!r}" if word in DTYPE_BYTES else f"they are {', '.join(sorted(DTYPE_BYTES))}"
            raise SourceError(f"{who} declares {meta.name!r} as {meta.dtype}; dtypes on the wire go by name: {way_out}")


def merge(manifests: Iterable[SourceManifest]) -> tuple[TensorMeta, ...]:
    """Returns the checkpoint tensors of the whole model in its order.

    Args:
        manifests: of all source ranks, in order of rank.

    Raises:
        CoverageError: two ranks disagree about a tensor.
    """
    declared = Declared()
    for manifest in manifests:
        declared.add(manifest.rank, manifest.tensors)
    return declared.ordered()


def ignored(manifests: Sequence[SourceManifest]) -> tuple[str, ...]:
    """Names that engines need not take: what any rank lists, each once."""
    return tuple(dict.fromkeys(name for manifest in manifests for name in manifest.ignore))


def describe(tensor: TensorMeta) -> str:
    """How messages call a tensor."""
    return f"{tensor.name!r} {list(tensor.shape)} {tensor.dtype}"
