"""What a bench can be told, and the checks that come before anything is started.

Everything that can be known to be wrong is refused here with what would be right: an unknown model, a tensor-parallel
size that does not divide the model, GPUs that are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..connector import DEFAULT_KINDS
from ..errors import SourceError
from ..notation import ENGINES, TRAINERS, OptionError, Spec, engine_spec, only, trainer_spec
from ..publisher import DEFAULT_BUCKET_BYTES, MODES
from ..report import size
from ..shapes import Config, checkpoint_tensors, config_of
from ..trainers import Catalogue, MegatronLayout, layout_of
from .tensorfile import nbytes

KINDS = (*DEFAULT_KINDS, "auto")
PEERS = ("broadcast", "disk", "gather", "objects", "checkpoint-engine", "sharded_rdt")
GPUS = ("auto", "separate", "shared", "together")
PACKS = ("default", "direct", "packed")
PLOTS = ("png", "svg", "pdf")
#: what `--peers all` leaves out above: a copy on tmpfs of this many bytes, an object for each of this many tensors
DISK_BYTES = 4 << 30
OBJECT_TENSORS = 2_000
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One run of the bench.

    Attributes:
        model: a name of `shapes.MODELS`.
        layers: keep only so many decoder layers; 0 keeps all.
        ranks: source ranks.
        megatron: how Megatron spreads the model over them; None: FSDP2, which shards by rows.
        engine: whose parameter layout the readers have: "vllm" or "sglang".
        tp, ep, pp: of the one replica (see `layouts.EngineRank`).
        device: "cpu" or "cuda".
        gpus: "separate" (trainers on the first half of the GPUs, engine ranks on the others), "together" (each GPU holds
            one of both), "shared" (all on one GPU), "auto" (separate where there are two, else shared).
        modes, kinds, packs: what is combined; a pack is "default" (the kind's own threshold), "direct" (nothing is
            packed), "packed" (everything that can be) or a number of bytes.
        verifies: how much of each sync is compared by digests; combined as well: "off", "sample", "full".
        peers: names out of `PEERS`, or of plug-ins.
        left_out: peers that `--peers all` has a row for and does not run here, each with the reason.
        rounds, peer_rounds: syncs after the first, for each combination and for each peer.
        expandable: whether trainers allocate with expandable segments.
        collectives: whether the trainers' own collectives run while syncs run.
        bucket_bytes: of mode bucket and of the gathering peer.
        timeout_s: deadline of every wait.
        limit_s: nothing new is started after so many seconds; 0 for no limit.
    """

    model: str = "smollm2-135m"
    layers: int = 0
    ranks: int = 2
    megatron: MegatronLayout | None = None
    engine: str = "vllm"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    device: str = "cpu"
    gpus: str = "auto"
    modes: tuple[str, ...] = MODES[1:]
    kinds: tuple[str, ...] = DEFAULT_KINDS
    packs: tuple[str, ...] = ("default",)
    verifies: tuple[str, ...] = ("off",)
    peers: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    rounds: int = 5
    peer_rounds: int = 3
    expandable: bool = False
    collectives: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = 120.0
    limit_s: float = 0.0

    @property
    def config(self) -> Config:
        """Of the model, with the layers that are kept."""
        return config_of(self.model, self.layers)

    @property
    def readers(self) -> int:
        """Engine ranks."""
        return self.tp * self.pp

    @property
    def trainer(self) -> str:
        """The trainer and the sizes that are not their defaults, as `--trainer` takes them."""
        if self.megatron is None:
            return f"fsdp:ranks={self.ranks}"
        sizes = {key: getattr(self.megatron, key) for key in TRAINERS["megatron"]}
        known = {**TRAINERS["megatron"], "ranks": 0}
        return "megatron:" + ",".join(f"{key}={size}" for key, size in sizes.items() if size != known[key])

    @property
    def layout(self) -> str:
        """The engine and the sizes that are not 1, as `--engine` takes them."""
        sizes = {"tp": self.tp, "ep": self.ep, "pp": self.pp}
        return f"{self.engine}:" + ",".join(f"{key}={size}" for key, size in sizes.items() if size > 1 or key == "tp")

    def check(self, gpus: int = 0) -> BenchOptions:
        """Returns the options with "auto" placement decided.

        Args:
            gpus: that this process sees.

        Raises:
            OptionError: something that cannot work.
        """
        try:
            config = self.config
        except SourceError as error:
            raise OptionError(f"--model, --layers: {error}") from error
        for option, text, known in (
            ("--device", self.device, ("cpu", "cuda")),
            ("--gpus", self.gpus, GPUS),
            ("--engine", self.engine, tuple(ENGINES)),
        ):
            if text not in known:
                raise OptionError(f"{option} {text!r} is unknown; known: {', '.join(known)}")
        for option, least, value in (
            ("--trainer ranks", 1, self.ranks),
            ("--engine tp", 1, self.tp),
            ("--engine ep", 1, self.ep),
            ("--engine pp", 1, self.pp),
            ("--rounds", 1, self.rounds),
            ("--peer-rounds", 1, self.peer_rounds),
            ("--bucket-bytes", 1, self.bucket_bytes),
        ):
            if value < least:
                raise OptionError(f"{option} {value} is too little; expected at least {least}")
        for pack in self.packs:
            pack_bytes(pack)
        self._divides(config)
        self._trains(config)
        if self.device == "cpu":
            if self.expandable:
                raise OptionError("--expandable is about CUDA memory; it needs --device cuda")
            return replace(self, gpus="shared")
        if not gpus:
            raise OptionError("--device cuda needs a GPU, and torch sees none here")
        if self.gpus in ("separate", "together") and gpus < 2:
            raise OptionError(f"--gpus {self.gpus} needs two GPUs, and torch sees {gpus} here; --gpus shared needs one")
        return replace(self, gpus=("separate" if gpus > 1 else "shared") if self.gpus == "auto" else self.gpus)

    def with_peers(self, text: str, plugins: Sequence[str] = ()) -> BenchOptions:
        """Reads `--peers`: "none", "all" (those that make no sense here are left out, with the reason), or names.

        Args:
            text: of the option.
            plugins: names of peers that other packages supply.

        Raises:
            OptionError: an unknown name or model.
        """
        known = tuple(dict.fromkeys((*PEERS, *plugins)))
        if text == "none":
            return replace(self, peers=(), left_out=())
        if text != "all":
            return replace(self, peers=names(text, known, "--peers"), left_out=())
        try:
            tensors = checkpoint_tensors(self.model, layers=self.layers)
        except SourceError as error:
            raise OptionError(f"--model, --layers: {error}") from error
        held = sum(map(nbytes, tensors))
        left_out: list[tuple[str, str]] = []
        if self.device != "cpu" or held > DISK_BYTES:
            left_out.append(("disk", f"{size(held)} through a file on tmpfs; --peers disk measures it"))
        if len(tensors) > OBJECT_TENSORS:
            left_out.append(("objects", f"an object for each of {len(tensors)} tensors; --peers objects measures it"))
        return replace(self, peers=known, left_out=tuple(left_out))

    def _trains(self, config: Config) -> None:
        layout = self.megatron
        if layout is None:
            return
        if layout.ranks != self.ranks:
            raise OptionError(
                f"--trainer {self.trainer}: a layout of {layout.ranks} ranks for {self.ranks} source ranks"
            )
        try:
            layout.check(config)
            catalogue = Catalogue(checkpoint_tensors(self.model, layers=self.layers), config)
            for rank in range(0, layout.ranks, layout.stage_ranks):
                # what does not divide is said where it is laid out; the ranks of a stage have equal sizes
                for _ in layout.parameters(rank, catalogue):
                    pass
        except SourceError as error:
            raise OptionError(f"--trainer {self.trainer}: Megatron holds no {self.model} like this: {error}") from error

    def _divides(self, config: Config) -> None:
        if self.tp % self.ep:
            raise OptionError(f"--engine ep={self.ep} does not divide tp={self.tp}")
        if self.ep > 1 and (not config.experts or config.experts % self.ep):
            raise OptionError(f"--engine ep={self.ep} does not divide the {config.experts} experts of {self.model}")
        if self.pp > config.layers:
            raise OptionError(f"--engine pp={self.pp}: {self.model} has {config.layers} layers here")
        sizes = {"attention heads": config.heads, "rows of the MLP": config.intermediate}
        if not config.kv_lora and config.kv_heads > self.tp:
            sizes["key-value heads"] = config.kv_heads
        for what, count in sizes.items():
            if count % self.tp:
                raise OptionError(f"--engine tp={self.tp} does not divide the {count} {what} of {self.model}")
        if config.experts and config.expert_intermediate % (self.tp // self.ep):
            raise OptionError(
                f"--engine tp={self.tp} does not divide the {config.expert_intermediate} rows of an expert of {self.model}"
            )
        if not config.kv_lora and config.kv_heads < self.tp and self.tp % config.kv_heads:
            raise OptionError(
                f"--engine tp={self.tp} is no multiple of the {config.kv_heads} key-value heads of {self.model}"
            )


def pack_bytes(text: str) -> int:
    """Bytes of a row below which it is packed, as `WeightSync.join` takes them: 0 is the kind's own default.

    Raises:
        OptionError: neither a name of `PACKS` nor a number of bytes with or without K, M or G.
    """
    if text in PACKS:
        return {"default": 0, "direct": 1, "packed": 1 << 62}[text]
    number, unit = (text[:-1], _UNITS.get(text[-1:].lower())) if not text.isdigit() else (text, 1)
    if not number.isdigit() or unit is None or int(number) < 1:
        raise OptionError(f"--pack {text!r} is not understood; write {', '.join(PACKS)} or a size such as 64K or 4M")
    return int(number) * unit


def names(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Reads a comma-separated list.

    Raises:
        OptionError: an empty list or an unknown name.
    """
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [part for part in parts if part not in known]
    if unknown or not parts:
        raise OptionError(f"{option} {text!r}: unknown {', '.join(unknown) or 'empty list'}; known: {', '.join(known)}")
    return parts


def trainer(text: str) -> Spec:
    """Reads `--trainer fsdp:ranks=N` or `--trainer megatron:ranks=N,tp=N,...`."""
    spec = trainer_spec(text)
    known = TRAINERS[spec.name] if spec.name == "megatron" else ("ranks",)
    return only("--trainer", spec, tuple(TRAINERS), tuple(known), "rdt bench")


def megatron(spec: Spec) -> MegatronLayout | None:
    """The layout of Megatron that `trainer` has read; None for another trainer."""
    layout = layout_of(spec)
    return layout if isinstance(layout, MegatronLayout) else None


def engine(text: str) -> Spec:
    """Reads `--engine vllm:tp=N,ep=N,pp=N`."""
    return only("--engine", engine_spec(text), tuple(ENGINES), ("tp", "ep", "pp"), "rdt bench")
