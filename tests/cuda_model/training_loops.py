"""Training loops: one step of each, by the name in a `Case`."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda_model.fake_cuda import DEVICE  # first: it loads the library before torch

import torch  # isort: skip
from torch import Tensor, nn

import zeroaccel
from tests.cuda_model.configurations import Case
from tests.cuda_model.gated_network import (
    GatedNetwork,
    attention_network,
    mixture_network,
    staged_network,
    token_loss,
)
from tests.cuda_model.network_size import Size
from tests.cuda_model.stream_model import StreamModel
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.engine import Engine
from zeroaccel.rollout.receiver import WeightReceiver

_ROUNDS = "gradient_accumulation_steps"


@dataclass
class Program:
    """State of a loop.

    Attributes:
        tokens: (1, T) int64, a batch.
        others: engines besides the first, for loops that create some.
        folder: folder for checkpoints.
        rounds: calls of the loop so far, if it counts them.
        receiver: receiver of the weights, for loops that stream them.
        live_nbytes: bytes of device memory that the loop noted.
    """

    case: Case
    model: StreamModel
    engine: Engine
    tokens: Tensor
    others: list[Engine] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="cuda-model-")))
    rounds: int = 0
    receiver: WeightReceiver | None = None
    live_nbytes: list[int] = field(default_factory=list)

    def phase(self, name: str) -> None:
        """Sets the phase under which the model counts."""
        self.model.phase = name

    def backward(self, engine: Engine | None = None) -> None:
        """Runs the micro-steps of a step, without the last `step`."""
        engine = engine or self.engine
        rounds = self.case.config[_ROUNDS]
        for round_ in range(rounds):
            self.phase("forward")
            loss = engine(self.tokens)
            self.phase("backward")
            engine.backward(loss)
            if round_ < rounds - 1:
                engine.step()

    def evaluate(self) -> None:
        """Runs a forward without gradients."""
        self.phase("evaluation")
        with torch.no_grad():
            self.engine(self.tokens)

    def step(self, engine: Engine | None = None) -> None:
        """Runs the optimizer step."""
        self.phase("step")
        (engine or self.engine).step()
        self.phase("")


def new_engine(case: Case) -> tuple[Engine, Tensor]:
    """Creates an engine of a case on the device, and a batch."""
    mesh: dict[str, Any] = dict(case.mesh)
    kind: Callable[[Size], nn.Module] = GatedNetwork
    pipeline = None
    if "pp" in mesh:
        kind, pipeline = staged_network, PipelineConfig(loss=token_loss)
    elif "sp" in mesh:
        kind = attention_network
    elif "ep" in mesh:
        kind = mixture_network
    elif "tp" in mesh:
        mesh["tp_plan"] = _SPLIT_LAYERS
    with torch.device(DEVICE.type):
        network = kind(case.size)
        tokens = torch.zeros(1, case.size.tokens, dtype=torch.long)
    if case.frozen:
        for layer in network.layers:
            for matrix in (layer.query, layer.key, layer.value, layer.mix, layer.gate, layer.up):
                matrix.requires_grad_(False)
    # The check at the start compares values, which large tensors lack.
    parallel = ParallelConfig(**mesh, verify_cut=False) if mesh else None
    engine, *_ = zeroaccel.initialize(network, config=dict(case.config), parallel=parallel, pipeline=pipeline)
    return engine, tokens


_SPLIT_LAYERS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), "colwise"),
    **dict.fromkeys(("mix", "down"), "rowwise"),
}


def plain(program: Program) -> None:
    """Forward, backward, step."""
    program.backward()
    program.step()


def of_a_causal_model(program: Program) -> None:
    """As `plain`, with a model of transformers."""
    program.phase("forward")
    loss = program.engine(input_ids=program.tokens, labels=program.tokens).loss
    program.phase("backward")
    program.engine.backward(loss)
    program.step()


def forward_and_backward(program: Program) -> None:
    """As `plain`, but the last time without the step: the clock shows the overlap within a backward."""
    program.rounds += 1
    program.backward()
    if program.rounds < 3:
        program.step()


def evaluation_before_step(program: Program) -> None:
    """An evaluation between backward and step reads the old weights while the step is about to write new ones."""
    program.backward()
    program.evaluate()
    program.step()


def evaluation_on_another_stream(program: Program) -> None:
    """An evaluation on a stream of the program; it waits for the default stream, and the default stream for it."""
    streams = torch.get_device_module(DEVICE)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        program.evaluate()
    streams.current_stream().wait_stream(side)
    plain(program)


def full_parameters(program: Program) -> None:
    """Full parameters are read and written right after an evaluation."""
    plain(program)
    program.evaluate()
    parameters = list(program.engine.module.layers[0].parameters())
    with zeroaccel.zero.GatheredParameters(parameters):
        pass
    with zeroaccel.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        parameters[0].mul_(0.5)


def weights_to_a_generator(program: Program) -> None:
    """Streams all weights, marks those that a step changes, sends shards, and gathers one parameter of a unit."""
    engine = program.engine
    if not engine.streamed_version:
        engine.mark_changes()
        for packet in engine.stream_weights(bucket_bytes=1 << 12):
            packet.payload.sum()
    plain(program)
    for packet in engine.stream_deltas(None):  # tensors without values cannot tell how many are marked
        packet.payload.sum()
    with zeroaccel.zero.GatheredParameters(next(engine.module.layers[0].parameters())):
        pass


def weights_in_a_generator(program: Program) -> None:
    """A generator in the same process computes on a stream of its own, and receives all weights after a step."""
    streams, engine = torch.get_device_module(DEVICE), program.engine
    if program.receiver is None:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in GatedNetwork(program.case.size).named_parameters()}
        tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for name, shape in shapes.items()}
        program.receiver = WeightReceiver(tensors, stream=streams.Stream())
    receiver = program.receiver
    plain(program)
    program.phase("weights")
    for packet in engine.stream_weights(bucket_bytes=1 << 15):
        receiver.take(packet)
    assert receiver.version == engine.streamed_version
    program.phase("generation")
    with streams.stream(receiver.stream):
        for tensor in receiver.tensors.values():
            tensor.float().sum()
    program.phase("")


def input_changed_in_place(program: Program) -> None:
    """A block's input is changed in place after the block ran."""
    engine, network = program.engine, program.engine.module
    x = network.embedding(program.tokens) * 1.0
    for layer in network.layers:
        y = layer(x)
        x = x.detach().mul_(0.5) + y
    engine.backward(x.float().sum())
    program.step()


def graph_dropped(program: Program) -> None:
    """Backward reaches a part of the graph of the forward; the rest is dropped."""
    engine, network = program.engine, program.engine.module
    x = network.embedding(program.tokens) * 1.0
    for layer in list(network.layers)[:-1]:
        x = layer(x)
    y = network.layers[-1](x.detach().requires_grad_())
    engine.backward(y.float().sum())
    program.step()
    del x, y
    gc.collect()


def two_engines(program: Program) -> None:
    """Two engines take turns, as with a student and a teacher that both train."""
    if not program.others:
        program.others.append(new_engine(program.case)[0])
    program.backward()
    program.backward(program.others[0])
    program.step()
    program.step(program.others[0])


def states_to_the_host_and_back(program: Program) -> None:
    """A generator gets the device between two steps; notes the bytes of the states, and before, during and after."""
    plain(program)
    buffers = [buffer for unit in program.engine.units for buffer in unit.buffers]
    states = sum(2 * buffer.shard.range.numel + 12 * buffer.masters.range.numel for buffer in buffers)
    program.live_nbytes = [states, program.model.live_nbytes]
    program.phase("offload")
    program.engine.offload_states()
    program.live_nbytes.append(program.model.live_nbytes)
    program.phase("reload")
    program.engine.reload_states()
    program.phase("")
    program.live_nbytes.append(program.model.live_nbytes)


def sequence_parts(program: Program) -> None:
    """A step over a sequence that several ranks share."""
    engine = program.engine
    program.phase("forward")
    batch = engine.sequence_group.shard({"input_ids": program.tokens, "labels": program.tokens})
    labels = batch["shift_labels"]
    loss = engine.sequence_group.mean_loss(engine(**batch, labels=labels).loss, labels)
    program.phase("backward")
    engine.backward(loss)
    program.step()


def stages(program: Program) -> None:
    """A step of a pipeline; each micro-batch passes all stages."""
    program.phase("batch")
    program.engine.train_batch(iter([(program.tokens, program.tokens)] * program.case.config[_ROUNDS]))
    program.phase("")


def outcomes_read_late(program: Program) -> None:
    """Two steps, before the program reads the outcome of the first."""
    plain(program)
    plain(program)
    program.phase("outcome")
    program.engine.finish_update()
    program.phase("")


def aborted_pass(program: Program) -> None:
    """A forward fails in its first block, with later ones prefetched; the program resets the engine and continues."""
    program.phase("forward")
    hook = program.engine.module.layers[0].register_forward_pre_hook(_fail)
    with contextlib.suppress(_AbortedError):
        program.engine(program.tokens)
    hook.remove()
    program.engine.reset()
    plain(program)


class _AbortedError(Exception):
    """Raised by the program's own module."""


def _fail(module: nn.Module, args: object) -> None:
    raise _AbortedError


def background_save(program: Program) -> None:
    """Saves a checkpoint in the background during the next step."""
    plain(program)
    program.engine.save_checkpoint(program.folder)
    plain(program)


LOOPS: Mapping[str, Callable[[Program], None]] = {
    loop.__name__: loop
    for loop in (
        aborted_pass,
        background_save,
        evaluation_before_step,
        evaluation_on_another_stream,
        forward_and_backward,
        full_parameters,
        weights_in_a_generator,
        weights_to_a_generator,
        graph_dropped,
        input_changed_in_place,
        of_a_causal_model,
        outcomes_read_late,
        plain,
        sequence_parts,
        stages,
        states_to_the_host_and_back,
        two_engines,
    )
}
