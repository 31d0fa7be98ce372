"""`deepspeed.ops.op_builder`, as what it is asked for: whether an optimizer or a device can be used.

DeepSpeed compiles an extension per operation; here nothing is compiled, so a builder tells that its operation is there
and loads the module that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from zeroaccel.errors import UsageError

# Operation -> the module that does its work; operations that are not here -> "".
_MODULES: Mapping[str, str] = {
    "async_io": "zeroaccel.offload.file_io",
    "cpu_adagrad": "zeroaccel.ops.elementwise",
    "cpu_adam": "zeroaccel.ops.elementwise",
    "cpu_lion": "zeroaccel.ops.elementwise",
    "deepspeed_not_implemented": "",
    "evoformer_attn": "",
    "fused_adam": "zeroaccel.ops.elementwise",
    "fused_lamb": "zeroaccel.ops.tensorwise",
    "fused_lion": "zeroaccel.ops.elementwise",
    "inference_core_ops": "",
    "quantizer": "zeroaccel.comm.quantized",
    "ragged_ops": "",
    "random_ltd": "",
    "sparse_attn": "",
    "spatial_inference": "",
    "stochastic_transformer": "",
    "transformer": "",
    "transformer_inference": "",
    "utils": "zeroaccel.nested",
}
__compatible_ops__: dict[str, bool] = {name: bool(module) for name, module in _MODULES.items()}
"""Operation -> whether it is there."""


class OpBuilder:
    """Tells of one operation; nothing is built.

    Attributes:
        NAME: of the operation.
    """

    NAME = "deepspeed_not_implemented"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operation is there."""
        return __compatible_ops__[self.NAME]

    def load(self, verbose: bool = True) -> ModuleType:
        """The module that does the work; its names are zeroaccel's.

        Raises:
            UsageError: the operation is not there.
        """
        if not _MODULES[self.NAME]:
            raise UsageError(f"{type(self).__name__}.load()", expected="an operation of training", got=self.NAME)
        return import_module(_MODULES[self.NAME])

    jit_load = load


class AsyncIOBuilder(OpBuilder):
    """Whether states and parameters can be on NVMe."""

    NAME = "async_io"


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class SparseAttnBuilder(OpBuilder):
    NAME = "sparse_attn"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class FlattenBuilder(OpBuilder):
    """`UtilsBuilder` of DeepSpeed, which flattens tensors."""

    NAME = "utils"


ALL_OPS: Mapping[str, OpBuilder] = {
    kind.NAME: kind()
    for kind in (
        AsyncIOBuilder,
        CPUAdagradBuilder,
        CPUAdamBuilder,
        CPULionBuilder,
        FusedAdamBuilder,
        FusedLambBuilder,
        FusedLionBuilder,
        InferenceBuilder,
        QuantizerBuilder,
        SparseAttnBuilder,
        TransformerBuilder,
        FlattenBuilder,
    )
}
"""Operation -> its builder."""


def builder_of(class_name: str) -> type[OpBuilder]:
    """The class of DeepSpeed's name.

    Raises:
        UsageError: there is none.
    """
    known: dict[str, type[OpBuilder]] = {type(builder).__name__: type(builder) for builder in ALL_OPS.values()}
    known["UtilsBuilder"] = FlattenBuilder
    if class_name not in known:
        raise UsageError("get_op_builder", expected=f"one of {', '.join(sorted(known))}", got=class_name)
    return known[class_name]
