"""DeepSpeed's calls that estimate the memory of model states, answered by `zeroaccel.estimate`.

The estimate runs the engine on tensors without data: a decoder with as many parameters stands in for the model, in
bf16 with Adam, and its activations are not counted.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from zeroaccel.estimate import Estimate, Offload, Workload, estimate

_GIB = 1 << 30
_SMALLEST = 1000  # parameters that the stand-in has at least
_Plan = tuple[int, Offload, Offload]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of host memory per machine, bytes of device memory per rank) at stage 2.

    Args:
        additional_buffer_factor: of no effect: buffers are part of the estimate.
    """
    (one,) = _estimates(total_params, num_gpus_per_node, num_nodes, [(2, _device(cpu_offload), "none")])
    return one.host.total * num_gpus_per_node, _states(one)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(host memory per machine, device memory per rank, weights and gradients of the largest layer), in bytes.

    Args:
        zero_init: False counts the whole fp32 model, which each rank has in host memory before it is sharded.
        additional_buffer_factor: of no effect: buffers are part of the estimate.
    """
    plan: _Plan = (3, _device(cpu_offload), _device(cpu_offload and cpu_offload_params))
    (one,) = _estimates(total_params, num_gpus_per_node, num_nodes, [plan])
    built = 0 if zero_init else 4 * total_params
    return max(one.host.total, built) * num_gpus_per_node, _states(one), 4 * largest_layer_params


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the memory of a model's states at stage 2, with and without offload."""
    estimate_zero2_model_states_mem_needs_all_cold(_numel(model), num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the same for a number of parameters."""
    _print(total_params, num_gpus_per_node, num_nodes, [(2, "cpu", "none"), (2, "none", "none")])


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the memory of a model's states at stage 3, with and without offload of states and parameters."""
    largest = max(sum(param.numel() for param in part.parameters(recurse=False)) for part in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(_numel(model), largest, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the same for a number of parameters, and of those of the largest layer."""
    plans: list[_Plan] = [(3, "cpu", "cpu"), (3, "cpu", "none"), (3, "none", "none")]
    _print(total_params, num_gpus_per_node, num_nodes, plans)
    print(f"the largest layer has {largest_layer_params:,} parameters")


def _print(total_params: int, per_machine: int, machines: int, plans: list[_Plan]) -> None:
    print(
        f"model states of {total_params:,} parameters in bf16 with Adam, {machines} machines of {per_machine} ranks; "
        "activations come on top (`zeroaccel estimate` has all)"
    )
    print("  host per machine | device per rank | plan")
    for one in _estimates(total_params, per_machine, machines, plans):
        print(f"  {one.host.total * per_machine / _GIB:13.2f} GB | {_states(one) / _GIB:12.2f} GB | {one.name}")


def _estimates(total_params: int, per_machine: int, machines: int, plans: list[_Plan]) -> list[Estimate]:
    workload = Workload(ranks=per_machine * machines, ranks_per_machine=per_machine, sequence=8)
    return estimate(str(max(total_params, _SMALLEST)), workload, plans)


def _states(one: Estimate) -> int:
    return one.device.total - one.device.activations


def _device(offloaded: bool) -> Literal["none", "cpu"]:
    return "cpu" if offloaded else "none"


def _numel(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(param.numel() for param in model.parameters())
