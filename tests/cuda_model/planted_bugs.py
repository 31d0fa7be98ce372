"""Bugs that are planted into the engine, each of a kind that a change could bring; the model has to find them all.

Most leave out one wait: a call of a stream or an event from one function. The rest replace a method of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from tests.cuda_model.replacements import Replacements

if TYPE_CHECKING:
    from zeroaccel.comm.collective_tracker import MessageWork
    from zeroaccel.zero.param_unit import ParamUnit

_Plant = Callable[[Replacements], None]


@dataclass(frozen=True)
class Bug:
    """A bug.

    Attributes:
        case: the case that shows it.
        plant: replaces code of the engine.
        finding: part of a finding that the model must have, or of an early free.
    """

    case: str
    plant: _Plant
    finding: str


def _class(name: str) -> type:
    """By its full name: only the process of the model may import what imports torch."""
    module, _, attribute = name.rpartition(".")
    found: type = getattr(import_module(module), attribute)
    return found


def _without(owner: str, method: str, file: str, function: str, result: object = None) -> _Plant:
    """Leaves out the calls of a method that one function of a file makes."""

    def plant(replacements: Replacements) -> None:
        original = vars(_class(owner))[method]

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller: FrameType = sys._getframe(1)
            if caller.f_code.co_name == function and caller.f_code.co_filename.endswith(file):
                return result
            return original(self, *args, **kwargs)

        replacements.set(_class(owner), method, replaced)

    return plant


def _no_stream_wait(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Stream", "wait_stream", file, function)


def _no_event_of_stream(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Stream", "wait_event", file, function)


def _no_event_wait(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Event", "wait", file, function)


def _no_synchronize(file: str, function: str) -> _Plant:
    return _without("tests.cuda_model.fake_cuda._Event", "synchronize", file, function)


def _no_record_stream(file: str, function: str) -> _Plant:
    return _without("torch.Tensor", "record_stream", file, function)


def _with(owner: str, method: str, replaced: Callable[..., Any]) -> _Plant:
    """Replaces a method; `replaced` is called with the original one before its arguments."""

    def plant(replacements: Replacements) -> None:
        original = vars(_class(owner))[method]
        replacements.set(_class(owner), method, lambda self, *args, **kw: replaced(original, self, *args, **kw))

    return plant


def _wait_for_no_gather(original: Callable[..., Any], unit: ParamUnit) -> None:
    unit._works.clear()
    original(unit)


def _complete_at_once(original: Callable[..., Any], work: MessageWork) -> None:
    complete, work._complete = work._complete, None
    if complete is not None:
        complete()


_COPIES, _ACTIVATIONS = "zero/storage/copy_stream.py", "offload/activation_store.py"
_BOTH, _BACKGROUND = "stage 3, both on the host", "a checkpoint saved in the background"

BUGS: Mapping[str, Bug] = {
    "gathers are not waited for": Bug(
        "stage 3", _with("zeroaccel.zero.param_unit.ParamUnit", "wait", _wait_for_no_gather), "READ AFTER WRITE"
    ),
    "no collective is waited for": Bug(
        "stage 3", _with("zeroaccel.comm.collective_tracker.MessageWork", "wait", _complete_at_once), "READ AFTER WRITE"
    ),
    "a reduction in two hops is not waited for": Bug(
        "stage 3, qgZ", _no_event_of_stream("comm/hierarchical.py", "wait"), "READ AFTER WRITE"
    ),
    "a reduction in two hops does not wait for the gradients": Bug(
        "stage 3, qgZ", _no_stream_wait("comm/hierarchical.py", "run_on"), "READ AFTER WRITE"
    ),
    "copies to the device do not wait for the memory": Bug(
        _BOTH, _no_stream_wait(_COPIES, "to_device"), "USED TOO EARLY"
    ),
    "weights are used before they are copied": Bug(
        _BOTH, _no_event_wait("storage/shards.py", "wait"), "READ AFTER WRITE"
    ),
    "shards change while they are copied": Bug(
        "evaluation before the step, both on the host", _no_synchronize(_COPIES, "finish_reads"), "WRITE AFTER READ"
    ),
    "gradients leave before they are reduced": Bug(
        "stage 2, optimizer on the host, several ranks", _no_event_wait(_COPIES, "to_host"), "READ AFTER WRITE"
    ),
    "a gradient's memory goes back while it is copied": Bug(
        "stage 2, optimizer on the host", _no_event_wait(_COPIES, "drop_source"), "FREED IN USE"
    ),
    "gradients that are not reduced yet are freed": Bug(
        "stage 2, optimizer on the host, small buckets", _no_event_wait(_COPIES, "wait_for_source"), "FREED IN USE"
    ),
    "codes behind a copy are freed before they are read": Bug(
        "stage 3, qwZ, parameters on the host",
        _no_record_stream("comm/collectives.py", "_record_current_stream"),
        "waits for all_gather",
    ),
    "the host reads gradients before they have come": Bug(
        "stage 2, optimizer on the host", _no_synchronize(_COPIES, "finish"), "READ AFTER WRITE"
    ),
    "an update in the next step begins before its gradients have come": Bug(
        "stage 2, update during the next step", _no_synchronize(_COPIES, "finish"), "READ AFTER WRITE"
    ),
    "weights of an update in another thread are installed before it ends": Bug(
        "stage 2, update during the next step",
        _without("tests.cuda_model.model_threads._Result", "result", "zero/weight_update.py", "install", 0.0),
        "not ordered after",
    ),
    "the device's part of an update is used before it is back": Bug(
        "stage 2, half of each update on the device",
        _no_synchronize("offload/device_lane.py", "wait"),
        "not ordered after",
    ),
    "the host reads the norm before it has come": Bug(
        "stage 2", _no_synchronize("zero/grad_norm.py", "read"), "READ AFTER WRITE"
    ),
    "a file's data is used before it is read": Bug(
        "stage 3, parameters in files",
        _without("tests.cuda_model.model_threads._Event", "wait", "offload/nvme.py", "wait"),
        "not ordered after",
    ),
    "a buffer goes back to its tier while the device copies it": Bug(
        "stage 3, parameters in files",
        _with("zeroaccel.offload.nvme.NvmeTier", "release", lambda original, tier, buffer, **_: original(tier, buffer)),
        "not ordered after",
    ),
    "activations leave before they are computed": Bug(
        "stage 2, activations on the host", _no_stream_wait(_ACTIVATIONS, "copy_to_host"), "READ AFTER WRITE"
    ),
    "activations are used before they are back": Bug(
        "stage 2, activations on the host", _no_event_wait(_ACTIVATIONS, "wait"), "READ AFTER WRITE"
    ),
    "activations change while they leave": Bug(
        "an input changed in place, activations on the host",
        _no_event_wait(_ACTIVATIONS, "protect_sources"),
        "WRITE AFTER READ",
    ),
    "activations that nothing waits for are freed while they come back": Bug(
        "a graph dropped, activations on the host", _no_record_stream(_ACTIVATIONS, "copy_to_device"), "FREED IN USE"
    ),
    "a checkpoint is written before it is copied": Bug(
        _BACKGROUND,
        _with("zeroaccel.checkpoint.rank_file_writer.DeviceChunkCopies", "mark", lambda original, copies: lambda: None),
        "READ AFTER WRITE",
    ),
    "a checkpoint is copied before the step is computed": Bug(
        _BACKGROUND,
        _no_event_of_stream("checkpoint/rank_file_writer.py", "__init__"),
        "READ AFTER WRITE",
    ),
    "a step does not wait for the copy of a checkpoint": Bug(
        f"{_BACKGROUND}, both on the host",
        _with("zeroaccel.checkpoint.background_save.BackgroundSave", "wait_copied", lambda original, save: None),
        "not ordered after",
    ),
    "a program's stream does not wait for the default one": Bug(
        "evaluation on another stream",
        _no_stream_wait("cuda_model/training_loops.py", "evaluation_on_another_stream"),
        "not ordered after",
    ),
}
