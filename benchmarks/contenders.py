"""The engines that the benchmark compares, each as forward, backward and update of one step.

All of them train the same bf16 model with AdamW and clip the global norm to 1; contenders with "muon" in their names
use Muon for the matrices of the blocks and AdamW for the rest. Each is set up as its documentation recommends, with its
default settings; README.md describes the contenders. Only the process that runs an engine imports it. `rank.py` and
`race.py` measure the time and run the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["CONTENDERS", "HEATS", "Contender", "needs_deepspeed"]

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0


class Contender(Protocol):
    """One engine around one model, on one rank."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of this rank's batch."""

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients and starts their reduction."""

    def update(self) -> None:
        """Clips, steps and drops the gradients; the next forward uses the new weights."""

    def facts(self) -> dict[str, Any]:
        """Returns the bytes sent by each operation since the last call, and the bytes of model states."""


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


class _Torch:
    """The loop that DDP and FSDP2 share."""

    def __init__(self, model: nn.Module, *, autocast: bool = False) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.optimizer = _adamw(self.params)
        self.autocast = autocast

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        return {}


class _Bare(_Torch):
    """Forward and backward without communication or update: the lower bound of every other step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.bfloat16())

    def update(self) -> None:
        self.optimizer.zero_grad()


class _MasterDdp(_Torch):
    """DDP over a bf16 model, and the optimizer over an fp32 copy of its weights."""

    def __init__(self, model: nn.Module, *, muon: bool = False) -> None:
        masters = {name: param.detach().clone() for name, param in model.named_parameters()}
        super().__init__(_ddp(model.bfloat16()))
        self.masters = list(masters.values())
        self.optimizer = _muon(masters) if muon else _adamw(self.masters)

    def update(self) -> None:
        for master, param in zip(self.masters, self.params, strict=True):
            assert param.grad is not None, "every parameter of the model has a gradient"
            master.grad = param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)
                param.grad = None


def _muon(named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Returns Muon over all parameters on every rank, as a script for DDP has it."""
    from zeroaccel.ops.tensorwise import Muon

    matrices = [value for name, value in named.items() if _is_hidden_matrix(name, value)]
    rest = [value for name, value in named.items() if not _is_hidden_matrix(name, value)]
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return Muon(groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _is_hidden_matrix(name: str, value: Tensor) -> bool:
    return value.dim() == 2 and name.startswith("layers.")


def _ddp(model: nn.Module) -> nn.Module:
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _ddp_autocast(model: nn.Module) -> Contender:
    return _Torch(_ddp(model), autocast=True)


def _ddp_bf16(model: nn.Module) -> Contender:
    return _Torch(_ddp(model.bfloat16()))


def _fsdp2(model: nn.Module, *, keep: bool = False, reduce: torch.dtype = torch.bfloat16) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    return _Torch(model)


def _deepspeed_json(stage: int, **zero: Any) -> dict[str, Any]:
    """Returns the config that both DeepSpeed and zeroaccel get."""
    settings = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": 1e-8, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": 1,  # the engines only count samples with it
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": settings},
    }


def _muon_section(model: nn.Module) -> dict[str, Any]:
    for name, param in model.named_parameters():
        param.use_muon = _is_hidden_matrix(name, param)  # type: ignore[attr-defined]
    settings = {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY, "momentum": 0.95}
    return {"type": "Muon", "params": settings}


class _DeepSpeed:
    def __init__(
        self, model: nn.Module, *, stage: int, torch_adam: bool = False, muon: bool = False, **zero: Any
    ) -> None:
        import deepspeed  # type: ignore[import-not-found]

        deepspeed.init_distributed(dist_backend="gloo")
        config = _deepspeed_json(stage, **zero)
        config["optimizer"]["params"]["torch_adam"] = torch_adam
        if muon:
            config["optimizer"] = _muon_section(model)
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def facts(self) -> dict[str, Any]:
        return {}


class _Zeroaccel:
    def __init__(self, model: nn.Module, *, stage: int, muon: bool = False, **zero: Any) -> None:
        import zeroaccel
        from zeroaccel.comm.collectives import Collectives
        from zeroaccel.comm.recording import RecordingCollectives
        from zeroaccel.comm.topology import init_process_group

        self.recording = RecordingCollectives(Collectives(init_process_group()))
        config = _deepspeed_json(stage, **zero)
        if muon:
            config["optimizer"] = _muon_section(model)
        self.engine = zeroaccel.initialize(model=model, config=config, collectives=self.recording)[0]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def facts(self) -> dict[str, Any]:
        sent = self.recording.nbytes_by_op()
        self.recording.reset()
        return {"sent_nbytes": sent, "model_state_nbytes": self.engine.model_state_nbytes()}


def _compiled(make: Callable[[nn.Module], Contender], model: nn.Module) -> Contender:
    """Compiles each block with inductor before the engine is made, as users of FSDP2 do."""
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    return make(model)


CONTENDERS: Mapping[str, Callable[[nn.Module], Contender]] = {
    "bare": _Bare,
    "ddp-master": _MasterDdp,
    "ddp-muon": partial(_MasterDdp, muon=True),
    "ddp-autocast": _ddp_autocast,
    "ddp-bf16": _ddp_bf16,
    "fsdp2": _fsdp2,
    "fsdp2-compiled": partial(_compiled, _fsdp2),
    "fsdp2-fp32-reduce": partial(_fsdp2, reduce=torch.float32),
    "fsdp2-keep": partial(_fsdp2, keep=True),
    "deepspeed-2": partial(_DeepSpeed, stage=2),
    "deepspeed-2-muon": partial(_DeepSpeed, stage=2, muon=True),
    "deepspeed-2-torch-adam": partial(_DeepSpeed, stage=2, torch_adam=True),
    "deepspeed-2-host": partial(_DeepSpeed, stage=2, offload_optimizer={"device": "cpu"}),
    "deepspeed-3": partial(_DeepSpeed, stage=3),
    "deepspeed-3-host": partial(_DeepSpeed, stage=3, offload_optimizer={"device": "cpu"}),
    "deepspeed-3-lean": partial(_DeepSpeed, stage=3, stage3_max_reuse_distance=0),
    "deepspeed-3-muon": partial(_DeepSpeed, stage=3, muon=True, reduce_scatter=False),  # the only way that it supports
    "deepspeed-3-torch-adam": partial(_DeepSpeed, stage=3, torch_adam=True),
    "zeroaccel-0": partial(_Zeroaccel, stage=0),
    "zeroaccel-0-compiled": partial(_compiled, partial(_Zeroaccel, stage=0)),
    "zeroaccel-1": partial(_Zeroaccel, stage=1),
    "zeroaccel-2": partial(_Zeroaccel, stage=2),
    "zeroaccel-2-muon": partial(_Zeroaccel, stage=2, muon=True),
    "zeroaccel-2-host": partial(_Zeroaccel, stage=2, offload_optimizer={"device": "cpu"}),
    "zeroaccel-3": partial(_Zeroaccel, stage=3),
    "zeroaccel-3-compiled": partial(_compiled, partial(_Zeroaccel, stage=3)),
    "zeroaccel-3-muon": partial(_Zeroaccel, stage=3, muon=True),
    "zeroaccel-3-host": partial(_Zeroaccel, stage=3, offload_optimizer={"device": "cpu"}),
    "zeroaccel-3-host-both": partial(
        _Zeroaccel, stage=3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    ),
    "zeroaccel-3-lean": partial(_Zeroaccel, stage=3, stage3_max_reuse_distance=0),
}

HEATS: Sequence[Sequence[str]] = (
    ("bare", "ddp-master", "ddp-autocast", "deepspeed-2", "zeroaccel-0", "zeroaccel-1", "zeroaccel-2"),
    ("bare", "fsdp2", "fsdp2-keep", "deepspeed-3", "deepspeed-3-lean", "zeroaccel-3", "zeroaccel-3-lean"),
)
"""Contenders that run together by default: those with unsharded parameters, and those with sharded ones. All
together take 35 GiB."""


def needs_deepspeed(name: str) -> bool:
    """Returns True if the contender needs an interpreter with DeepSpeed."""
    return name.startswith("deepspeed")
