"""`python -m zeroaccel.compat [-m] SCRIPT [ARGUMENTS]`: runs a script in which `import deepspeed` imports zeroaccel.

Every Python process that the script starts inherits this, including the processes of `accelerate launch`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from zeroaccel.compat.finder import inherited_environment, install
from zeroaccel.errors import ZeroAccelError

_USAGE = "usage: python -m zeroaccel.compat [--shadow] [-m] SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Runs the script or module that the arguments name, like `python`."""
    shadow = arguments[:1] == ["--shadow"]
    arguments = arguments[shadow:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(_USAGE)
    try:
        install(shadow=shadow)
    except ZeroAccelError as error:
        print(f"zeroaccel: {error}", file=sys.stderr)
        sys.exit(2)
    os.environ.update(inherited_environment(os.environ, shadow=shadow))
    name = arguments[0]
    if not as_module and not Path(name).exists():
        print(f"zeroaccel: {name}: no such file", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = arguments
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
