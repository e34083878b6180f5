"""What each environment variable is for, by name; where it is used is read from the code, and both must agree."""

from __future__ import annotations

# what looks like a variable in the source and is none
NOT_VARIABLES = frozenset(
    {"DEFAULT_BUCKET_BYTES", "DEFAULT_PACK_THRESHOLD", "F8_E4M3", "F8_E5M2", "F8_E8M0", "PCI_BUS_ID"}
)

VARIABLES: dict[str, dict[str, str]] = {
    "read": {
        "RAY_ADDRESS": (
            "The Ray cluster that a process which is not connected yet connects to: a source rank at `join`, "
            "an engine rank when it is attached, `rdt verify`, `python -m rdt_sglang.launch_server`. An "
            "address that is passed, or that came with the call that attaches, wins."
        ),
        "RAY_AUTH_MODE": (
            "Ray's own: `token` or `disabled`, the same for the cluster and everything that connects to it. Without it a cluster "
            "asks for a token where its head has one, and a process that connects by an address sends none. Read by "
            "`rdt doctor`, and to explain why a cluster refuses."
        ),
        "RAY_AUTH_TOKEN": "Ray's token, where it is not in `~/.ray/auth_token`; rdt looks only whether there is one.",
        "RAY_AUTH_TOKEN_PATH": "A file with Ray's token; as above.",
        "RDT_TOKEN": "The token of `rdt verify --token`.",
        "CUDA_VISIBLE_DEVICES": (
            "Which GPUs the process sees; read, never changed, to tell a GPU's index in this process from its"
            " index on the node. A mask from which CUDA would hide devices is refused."
        ),
        "CUDA_DEVICE_ORDER": (
            "How indices count where a node has GPUs of different models; must be `PCI_BUS_ID` there, and is "
            "set for actors."
        ),
        "PYTORCH_ALLOC_CONF": "How torch allocates, by its newer name; read to tell that it asks for expandable segments.",
    },
    "set": {
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": (
            "`on`, for every rank with a GPU: without it UCX reads device memory through TCP where it sees no"
            " NVLink, a thousand times slower. Set it yourself for processes that rdt does not start "
            "(torchrun, `vllm serve`): it must be there before the process makes its NIXL agent."
        ),
        "PYTORCH_CUDA_ALLOC_CONF": (
            "`expandable_segments:False`, for source ranks: memory in such segments cannot be exported, which"
            " excludes mode `live`."
        ),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": (
            "`1`, for engine ranks and for actors that host an engine: engines choose a GPU by its index on "
            "the node, which Ray's mask would renumber."
        ),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": (
            "`0`, for the actor that hosts an SGLang: it asks for no GPU, and Ray would hide all of them from it."
        ),
        "SGLANG_RAY_BUNDLE_INDICES": "The bundles of an SGLang that `rdt_sglang.launch` starts, in its actor.",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": (
            "`0`, by the command `rdt` in its own process, unless it is set: under `uv run` Ray would build "
            "an environment for each worker."
        ),
        "OMP_NUM_THREADS": (
            "What `trainer_options(threads=…)` says, for source ranks; else Ray sets the number of CPUs of the bundle."
        ),
    },
}
