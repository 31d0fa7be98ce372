"""Runs every `>>>` example of the package in turn, in one process of a one-rank job.

`test_docstring_examples.py` starts this program in an empty folder, because examples create process groups, write files
and install import finders. It prints one line per example, and doctest's report of those that fail.
"""

from __future__ import annotations

import contextlib
import doctest
import gc
import importlib
import inspect
import io
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

from torch.distributed.pipelining import ScheduleGPipe

import zeroaccel
from zeroaccel.comm.topology import destroy
from zeroaccel.logs import logger

# The command line has its help, and `__main__` and `sitecustomize` are programs.
_NOT_IMPORTED = ("cli", "templates", "__main__", "sitecustomize")

# Objects that need a newer torch: the pipeline schedules of torch 2.6 keep all outputs.
_LEFT_OUT = (
    ()
    if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters
    else ("zeroaccel.parallel.pipeline_engine.PipelineEngine",)
)


def modules() -> Iterator[ModuleType]:
    """Yields the modules of the package that are safe to import."""
    yield zeroaccel
    for found in pkgutil.walk_packages(zeroaccel.__path__, "zeroaccel."):
        if not set(found.name.split(".")) & set(_NOT_IMPORTED):
            yield importlib.import_module(found.name)


def examples() -> Iterator[doctest.DocTest]:
    """Yields the docstrings with `>>>`, each under the name of its object."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        yield from (
            test for test in finder.find(module, module.__name__) if test.examples and test.name not in _LEFT_OUT
        )


def main() -> int:
    """Runs the examples and returns the exit status: 0 if all pass."""
    warnings.simplefilter("ignore")
    logger.setLevel("ERROR")
    failures = 0
    found = list(examples())
    gc.collect()
    gc.freeze()  # excludes the libraries' objects, over which one collection per example took 90 % of the time
    for example in found:
        output = io.StringIO()
        with contextlib.redirect_stderr(io.StringIO()):
            result = doctest.DocTestRunner(verbose=False).run(example, out=output.write)
        print(f"{'FAILED' if result.failed else 'passed'} {example.name}\n{output.getvalue()}".rstrip())
        failures += bool(result.failed)
        gc.collect()
        destroy()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
