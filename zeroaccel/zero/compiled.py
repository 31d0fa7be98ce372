"""`torch.compile` and the engine: compiled modules of a model, hooks around compiled calls, backends, errors.

[Note: hooks and graphs] Hooks gather and count, and the compiler would trace them within a graph. So a module with its
own compiled call (`module.compile()`) gets its hooks around that call, outside the graph. A module inside the graph of
another one keeps ordinary hooks, which the compiler must not trace: each hook breaks the graph there. So graphs break
at the units of the engine and nowhere else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from zeroaccel.errors import ConfigError, EngineStateError, UsageError

Backend = str | Callable[..., Any]

_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")


def compiled_within(root: nn.Module) -> set[int]:
    """Returns the ids of the compiled modules and of all modules inside them."""
    return {id(module) for outer in root.modules() if _is_compiled(outer) for module in outer.modules()}


def compiled_calls(root: nn.Module) -> dict[int, Any]:
    """Returns id(module) -> compiled call for modules with a compiled call of their own; {} without a compiler."""
    if "torch._dynamo" not in sys.modules:
        return {}
    return {id(module): _compiled_call(module) for module in root.modules() if _is_compiled(module)}


def is_compiled_within(root: nn.Module) -> bool:
    """Returns True if the model or one of its modules is compiled."""
    return bool(compiled_calls(root))


def _is_compiled(module: nn.Module) -> bool:
    return _compiled_call(module) is not None or hasattr(module, "_orig_mod")


def _compiled_call(module: nn.Module) -> Any:
    return getattr(module, "_compiled_call_impl", None)


def check_not_compiled(root: nn.Module, refusal: str) -> None:
    """Raises UsageError with `refusal` as the reason if the model is compiled; an empty reason allows it."""
    if refusal and is_compiled_within(root):
        raise UsageError(
            "torch.compile",
            expected=f"a model that is not compiled: {refusal}",
            got=f"a compiled {type(root).__name__}",
            fix="leave torch.compile out",
        )


class AroundCompiled:
    """Hooks around the compiled call of a module, from construction to `remove`.

    Args:
        before: (module, args) -> None.
        after: (module, args, output) -> a new output, or None; if the forward raises, it gets None as the output.
    """

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., Any]) -> None:
        self._module = module
        self._compiled = inner = _compiled_call(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args)
            output = None
            try:
                output = inner(*args, **kwargs)
            except Exception:
                after(module, args, None)
                raise
            replaced = after(module, args, output)
            return output if replaced is None else replaced

        self._call = torch.compiler.disable(call)
        if hasattr(inner, "get_compiler_config"):
            self._call.get_compiler_config = inner.get_compiler_config
        module._compiled_call_impl = self._call

    def remove(self) -> None:
        """Restores the module's compiled call, unless the module was compiled again."""
        if _compiled_call(self._module) is self._call:
            self._module._compiled_call_impl = self._compiled


@_disable_dynamo
def refuse_compiled_engine() -> None:
    """Raises EngineStateError; the compiler calls it from a graph that contains the engine, and breaks the graph."""
    raise EngineStateError(
        "torch.compile(engine)",
        expected="the model to be compiled without the engine around it, since a graph cannot contain gathers",
        fix="call engine.compile(...) with the same arguments",
    )


# -- backends


def backend_named(name: str, where: str) -> Backend:
    """Returns the name of the `torch.compile` backend, whose case does not matter, or the function at a dotted path.

    Args:
        where: address of the name, for the error.

    Raises:
        ConfigError: there is no such backend.

    Example:
        >>> backend_named("Eager", "compile.backend")
        'eager'
    """
    if name.lower() in torch.compiler.list_backends(exclude_tags=()):
        return name.lower()
    module, _, function = name.rpartition(".")
    if module:
        try:
            found: Backend = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where}: {error}", expected="module.function of a backend", got=name) from error
        return found
    usual = ", ".join(["eager", "aot_eager", *torch.compiler.list_backends()])
    raise ConfigError(where, expected=f"a backend of torch.compile ({usual}), or module.function", got=name)


def check_toolchain(backend: Backend, device: torch.device, where: str) -> None:
    """Raises ConfigError if inductor is requested on a machine without the compiler that it calls.

    Raises:
        ConfigError: there is no C++ compiler for a CPU, or no Triton for a GPU.
    """
    if backend != "inductor":
        return
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f'{where}: "inductor"',
                expected="a C++ compiler on each machine, since inductor writes C++ for CPUs",
                got=str(error).splitlines()[0],
                fix='install g++, set CXX to the path of a compiler, or use the backend "aot_eager"',
            ) from error
    elif importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f'{where}: "inductor"',
            expected="Triton, since inductor writes Triton kernels for GPUs",
            got="no package triton",
            fix='install triton, or use the backend "aot_eager"',
        )


def check_backends_within(root: nn.Module, device: torch.device) -> None:
    """Calls `check_toolchain` for the modules that the program itself has compiled.

    Raises:
        ConfigError: as `check_toolchain`.
    """
    for name, module in root.named_modules():
        if compiler_config(module) is not None:  # only inductor has one
            check_toolchain("inductor", device, f"torch.compile of {name or type(module).__name__}")


def compiler_config(module: nn.Module) -> Any:
    """Returns inductor's settings for a module that it compiles; None for another backend or an eager module."""
    made = _compiled_call(module)
    settings = made.get_compiler_config() if hasattr(made, "get_compiler_config") else None
    return settings or getattr(getattr(module, "dynamo_ctx", None), "compiler_config", None)


def check_no_recorded_graphs(model: nn.Module) -> None:
    """Raises UsageError if the program compiled a module with CUDA graphs while parameters are sharded.

    Raises:
        UsageError: the mode of `torch.compile` uses CUDA graphs; the message names the module.
    """
    for name, module in model.named_modules():
        settings = compiler_config(module)
        if settings is not None and settings.get("triton.cudagraphs"):
            raise UsageError(
                f"torch.compile of {name or type(module).__name__}",
                expected="a mode without CUDA graphs, because they fix the addresses of parameters, and each pass "
                "gathers sharded parameters to other addresses",
                got='triton.cudagraphs, which mode "reduce-overhead" or "max-autotune" enables',
                fix='compile it with mode "default" or "max-autotune-no-cudagraphs", or use a stage below 3',
            )


# -- errors


def compiler_failure(error: BaseException, module: nn.Module) -> UsageError | None:
    """Returns a UsageError for an error of the compiler; None for other errors."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith(_COMPILER)]
    if not kinds:
        return None
    first = " ".join(line.strip() for line in str(error).splitlines()[:2])
    breaks = type(error).__name__ == "Unsupported"
    return UsageError(
        f"torch.compile of {type(module).__name__}",
        expected="one graph, because fullgraph is set" if breaks else "a forward that the compiler supports",
        got=f"{type(error).__name__}: {first}",
        fix="leave fullgraph out, or compile the blocks one by one: gather hooks break a graph at each sharded unit"
        if breaks
        else 'try the backend "eager" or "aot_eager", or leave torch.compile out; torch\'s own error is above',
    )
