"""Makes the checkpoints of this folder with DeepSpeed's pipeline, tensor and expert parallelism, and their values.

Run as `python make.py OUT` in an environment with deepspeed and transformers; four processes run each case. `truth.pt`
has full parameters under the names that a reader should give them, and some optimizer states; `states.json` hashes of
all states that DeepSpeed returns.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from torch import nn

CASES = [
    "pipe_stage1",
    "pipe_stage1_tied",
    "pipe_stage0",
    "moe_stage2_bf16",
    "moe_stage0",
    "tp_stage1",
    "tp_stage3",
]
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("offset", torch.arange(3.0))
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(inputs) * self.scale)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def pipe(case: str, config: dict) -> tuple:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [LayerSpec(nn.Linear, 4, 6), LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.Linear, 6, 4)]
    if "tied" in case:
        layers = [TiedLayerSpec("ends", Ends), *layers, TiedLayerSpec("ends", Ends)]
    loss = lambda outputs, labels: (outputs - labels).square().mean()  # noqa: E731
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config | {"optimizer": ADAM}, model_parameters=trained)
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        engine.train_batch(iter([(torch.randn(2, 4, generator=generator).to(dtype),) * 2 for _ in range(2)]))
    return engine, model


def moe(case: str, config: dict) -> tuple:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
            self.first = nn.Linear(4, 6)
            self.moe = MoE(6, expert, num_experts=4, ep_size=2, k=1, use_rts=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.moe(self.first(inputs))[0].square().mean()

    torch.manual_seed(torch.distributed.get_rank() % 2)
    model = Mixture()
    optimizer = torch.optim.Adam(split({"params": list(model.parameters()), "name": "all"}), lr=0.01)
    config = config | {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 4).to(dtype)))
        engine.step()
    return engine, model


def tp(case: str, config: dict) -> tuple:
    import deepspeed
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    config = config | {"tensor_parallel": {"autotp_size": 2}, "optimizer": ADAM}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() // 2)
    for _ in range(2):
        tokens = torch.randint(0, 32, (2, 8), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine, model


def joined(first: torch.Tensor, second: torch.Tensor, name: str) -> torch.Tensor:
    if "norm" in name or "embed" in name:
        return first
    return torch.cat([first, second], dim=1 if "o_proj" in name or "down_proj" in name else 0)


def truth_of(case: str, engine, model: nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in model.named_parameters():
        if case.startswith("tp"):
            with deepspeed.zero.GatheredParameters([param], enabled="stage3" in case):
                found[f"module/{name}"] = param.detach().clone()
            continue
        if match := EXPERT.fullmatch(name):
            name = f"{match[1]}{int(match[2]) + 2 * (torch.distributed.get_rank() % 2)}{match[3]}"
        name = name.replace("tied_modules.ends.", "0.module.")
        found[f"module/{name}"] = param.detach().clone()
        if case.startswith("pipe_stage1") and param.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(param).clone()
            found[f"state/exp_avg/{name}"] = safe_get_full_optimizer_state(param, "exp_avg").clone()
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    if case.startswith("tp"):  # ranks 0 and 1 have the slices of one model
        return {name: joined(value, every[1][name], name) for name, value in every[0].items()}
    return {name: value for one in every for name, value in one.items()}


def state_of(optimizer, param: nn.Parameter, kind: str) -> torch.Tensor:
    """Returns a whole state of a parameter; below stage 3, DeepSpeed returns those of the first param group only."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(param, "ds_id"):
        return safe_get_full_optimizer_state(param, kind)
    (group,) = [i for i, each in enumerate(optimizer.bit16_groups) if any(param is other for other in each)]
    whole, place = torch.zeros(param.numel()), param._hp_mapping
    if place is not None:
        state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[group]][kind]
        source, target = place.get_hp_fragment_address(), place.lp_fragment_address
        whole[target.start : target.start + target.numel] = state[source.start : source.start + source.numel]
    torch.distributed.all_reduce(whole, group=param._dp_group)
    return whole.view(param.shape)


def digests_of(case: str, engine, model: nn.Module) -> dict[str, str]:
    """Returns hashes of the optimizer's states in memory, whole, under the names that a reader gives them."""
    if case.endswith("stage0"):  # states without names
        return {}
    found = {}
    for name, param in model.named_parameters():
        if match := EXPERT.fullmatch(name):
            name = f"{match[1]}{int(match[2]) + 2 * (torch.distributed.get_rank() % 2)}{match[3]}"
        name = name.replace("tied_modules.ends.", "0.module.")
        for kind in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            found[f"state/{kind}/{name}"] = state_of(engine.optimizer, param, kind)
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    whole = {name: value for one in reversed(every) for name, value in one.items()}
    if case.startswith("tp"):
        whole = {name: joined(value, every[1][name], name) for name, value in every[0].items()}
    return {
        name: hashlib.sha1(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in whole.items()
    }


def run_rank(out: Path, cases: list[str]) -> None:
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler
    deepspeed.init_distributed("gloo", verbose=False)
    for case in cases:
        kind, stage, *_ = case.split("_")
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2 if kind == "pipe" else 1}
        config["zero_optimization"] = {"stage": int(stage[-1]), "gather_16bit_weights_on_model_save": True}
        if "bf16" in case:
            config["bf16"] = {"enabled": True}
        engine, model = {"pipe": pipe, "moe": moe, "tp": tp}[kind](case, config)
        engine.save_checkpoint(str(out / case), client_state={"epoch": 3})
        truth = truth_of(case, engine, model)
        if torch.distributed.get_rank() == 0:
            torch.save({name: value.contiguous() for name, value in truth.items()}, out / case / "truth.pt")
            for script in (out / case).glob("zero_to_*.py"):
                script.unlink()
        states = digests_of(case, engine, model)
        if torch.distributed.get_rank() == 0 and states:
            (out / case / "states.json").write_text(json.dumps(states, indent=1))
        torch.distributed.barrier()


def make_universal(folder: Path) -> None:
    tag, target = (folder / "latest").read_text(), folder.with_name(folder.name + "_universal")
    folders = ["--input_folder", str(folder / tag), "--output_folder", str(target / f"{tag}_universal")]
    options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *options], check=True)
    for name in ("truth.pt", "states.json"):
        shutil.copy(folder / name, target)


def main() -> None:
    out = Path(sys.argv[1])
    if "RANK" in os.environ:
        run_rank(out, sys.argv[2:])
        return
    base = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_SIZE": "4", "DS_ACCELERATOR": "cpu"}
    for port, kind in enumerate(("pipe", "moe", "tp"), 29517):  # processes of their own: DeepSpeed keeps its groups
        command = [sys.executable, __file__, str(out), *(case for case in CASES if case.startswith(kind))]
        own = base | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environments = [{**os.environ, **own, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(4)]
        ranks = [subprocess.Popen(command, env=environment) for environment in environments]
        if any([rank.wait() for rank in ranks]):  # noqa: C419  (waits for all of them)
            raise SystemExit("a rank failed")
    make_universal(out / "tp_stage1")
    for case in [*CASES, "tp_stage1_universal"]:
        with tarfile.open(out / f"{case}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted((out / case).rglob("*")):
                entry = tarfile.TarInfo(str(path.relative_to(out)))
                if path.is_file():
                    entry.size = path.stat().st_size
                    with path.open("rb") as content:
                        archive.addfile(entry, content)


if __name__ == "__main__":
    main()
