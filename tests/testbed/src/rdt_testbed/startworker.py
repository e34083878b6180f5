"""What a raylet runs to start a worker with a runtime environment: does what Ray's own does without importing Ray first.

Ray's imports itself, 0.7 CPU seconds, only to set variables and to run the worker in its place. Handed to Ray by
`cluster`; whatever else than variables and an executable is asked for, Ray's own does.
"""

from __future__ import annotations

import json
import os
import sys

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def command(arguments: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Returns the worker's command line and its variables; None: Ray's own has to start it.

    Args:
        arguments: as the raylet gives them.
    """
    context, rest = {}, []
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT))
        elif argument.startswith(_LANGUAGE):
            if argument != f"{_LANGUAGE}PYTHON":
                return None
        else:
            rest.append(argument)
    variables = context.pop("env_vars", None) or {}
    executable = context.pop("py_executable", None) or sys.executable
    if any(context.values()) or any("$" in value for value in variables.values()):
        return None
    return [executable, *rest], variables


def main() -> None:
    """Becomes the worker."""
    if (found := command(sys.argv[1:])) is None:
        import runpy

        runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
        return
    line, variables = found
    os.execve(line[0], line, {**os.environ, **variables})


if __name__ == "__main__":
    main()
