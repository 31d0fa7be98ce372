"""The scripts, their arguments and their settings; paths are below the folder of sources.

A row runs twice: with zeroaccel by `zeroaccel launch`, and as plain DDP. All runs use fp32 where the script allows
it, so that the losses can be compared closely.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2"
STAGE = "--use_deepspeed --zero_stage {stage} --num_processes 2 --mixed_precision no"


@dataclass(frozen=True)
class Script:
    """One row of the table.

    Attributes:
        name: name of the row.
        path: path of the script below the folder of sources; or `-m module`.
        arguments: arguments of the script in both runs. `{out}` is the run's own folder.
        launch: arguments of `zeroaccel launch`.
        extra: arguments of the script in the zeroaccel run only.
        plain: arguments of Python for the DDP run.
        plain_extra: arguments of the script in the DDP run only.
        pictures: replaces torchvision and timm. Set only for rows that use them: transformers looks for them as well.
        stands_in: for a script that needs DeepSpeed, the plain run uses DDP behind DeepSpeed's names.
        after: name of the row with whose output folder this row starts.
        tolerance: maximum expected relative difference of the losses.
        imports: a copy of the script imports `zeroaccel` in place of `accelerate`.
        measure: a key of the script's `all_results.json` that is compared instead of the losses.
        command: "deepspeed" starts it with that command, which `zeroaccel compat install` wrote.
        one_order: random samplers return one order in both runs, because zeroaccel's loader and accelerate's differ.
        one_schedule: a schedule advances once per update in the DDP run, too, as with zeroaccel's Accelerator.
        plainly: name of the row whose plain run this row shares; its own by default.
        dummies: adds accelerate's classes for sections of DeepSpeed's config to the DDP run; accelerate.utils has
            them only if DeepSpeed is installed. The script imports them always, but does not use them under DDP.
        generator: the model that `generator/server.py` serves during the run, on the ports `{port}` and `{group_port}`.
        needs: packages that the script imports in addition to this tree's environment; `module:name` if only some
            versions of the module have the name.
    """

    name: str
    path: str
    arguments: str = ""
    launch: str = STAGE.format(stage=2)
    extra: str = ""
    plain: str = TORCHRUN
    plain_extra: str = ""
    pictures: bool = False
    stands_in: bool = False
    after: str = ""
    tolerance: float = 1e-5
    imports: bool = False
    measure: str = ""
    command: str = "zeroaccel launch"
    generator: str = ""
    one_order: bool = False
    one_schedule: bool = False
    plainly: str = ""
    dummies: bool = False
    needs: tuple[str, ...] = ()


def missing(script: Script, sources: Path) -> str:
    """Returns the missing requirements of a row, with paths below `sources`; empty if there are none."""
    paths = [] if script.path.startswith("-m ") else [script.path]
    paths += [part.removeprefix("{sources}/") for part in script.launch.split() if part.startswith("{sources}/")]
    absent = [str(sources / path) for path in paths if not (sources / path).exists()]
    for need in script.needs:
        module, _, name = need.partition(":")
        if importlib.util.find_spec(module) is None:
            absent.append(f"package {module}")
        elif name and not hasattr(importlib.import_module(module), name):
            absent.append(f"{name} of {module}")
    return ", ".join(absent)


_EXAMPLES = "DeepSpeedExamples/training"
_CHAT = "DeepSpeedExamples/applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py"
_SFT = (
    "--data_path Dahoas/rm-static --data_split 10,0,0 --data_output_path {out}/data --max_seq_len 64 "
    "--model_name_or_path facebook/opt-125m --per_device_train_batch_size 4 --per_device_eval_batch_size 4 "
    "--dtype bf16 --output_dir {out}/model --num_train_epochs 1 --deepspeed --print_loss"
)


def _cifar(stage: int) -> Script:
    return Script(
        f"cifar10, stage {stage}",
        f"{_EXAMPLES}/cifar/cifar10_deepspeed.py",
        f"--deepspeed --epochs 2 --dtype fp32 --stage {stage} --log-interval 5",
        launch="--num_gpus 2",
        pictures=True,
        stands_in=True,
    )


DEEPSPEED = (
    *(_cifar(stage) for stage in range(4)),
    replace(_cifar(2), name="cifar10, by the command deepspeed", command="deepspeed", plainly="cifar10, stage 2"),
    Script(
        "HelloDeepSpeed",
        f"{_EXAMPLES}/HelloDeepSpeed/train_bert_ds.py",
        "--checkpoint_dir {out} --max_seq_length 64 --h_dim 32 --ff_dim 64 --num_heads 2 --num_layers 2 --dropout 0.0 "
        "--batch_size 4 --num_iterations 13 --checkpoint_every 6",
        launch="--num_gpus 2 --bind_cores_to_rank",
        stands_in=True,
        needs=("fire", "loguru", "pytz", "sh"),
        tolerance=1e-2,
    ),
    *(
        Script(
            f"DeepSpeed-Chat SFT, stage {stage}{name}",
            _CHAT,
            f"{_SFT} --zero_stage {stage} {extra}",
            launch="--num_gpus 2",
            plain_extra="--zero_stage 0",
            stands_in=True,
            needs=("transformers.modeling_utils:no_init_weights",),
            tolerance=1e-2,
        )
        for stage, name, extra in (
            (2, "", ""),
            (3, "", ""),
            (2, ", offload", "--offload"),
            (3, ", LoRA", "--lora_dim 4 --only_optimize_lora"),
        )
    ),
)

_BY_FEATURE = {
    "automatic_gradient_accumulation": "",
    "checkpointing": "--checkpointing_steps epoch --output_dir {out}",
    "cross_validation": "--num_folds 2",
    "ddp_comm_hook": "",
    "early_stopping": "",
    "gradient_accumulation": "--gradient_accumulation_steps 2",
    "gradient_accumulation_for_autoregressive_models": "--gradient_accumulation_steps 2 --per_device_batch_size 4",
    "local_sgd": "--gradient_accumulation_steps 2 --local_sgd_steps 2",
    "memory": "",
    "multi_process_metrics": "",
    "profiler": "",
    "schedule_free": "",
    "tracking": "--with_tracking --project_dir {out}",
}
_METRICS = ("evaluate",)
_FURTHER = {"cross_validation": ("sklearn",), "schedule_free": ("schedulefree",)}
_CONFIG_SUPPORT = (
    "--train_file lines_train.txt --validation_file lines_validation.txt --model_name_or_path openai-community/gpt2 "
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --block_size 32 --num_train_epochs 1 --seed 0 "
    "--output_dir {out} --learning_rate 1e-3"
)

ACCELERATE = (
    Script("nlp_example", "accelerate/examples/nlp_example.py", needs=_METRICS),
    Script("complete_nlp_example", "accelerate/examples/complete_nlp_example.py", "--output_dir {out}", needs=_METRICS),
    Script("cv_example", "accelerate/examples/cv_example.py", "--data_dir pictures", pictures=True),
    Script(
        "complete_cv_example",
        "accelerate/examples/complete_cv_example.py",
        "--data_dir pictures --output_dir {out}",
        pictures=True,
    ),
    *(
        Script(name, f"accelerate/examples/by_feature/{name}.py", arguments, needs=(*_METRICS, *_FURTHER.get(name, ())))
        for name, arguments in _BY_FEATURE.items()
    ),
    Script(
        "deepspeed_with_config_support",
        "accelerate/examples/by_feature/deepspeed_with_config_support.py",
        _CONFIG_SUPPORT,
        launch=f"{STAGE.format(stage=3)} --gradient_clipping 0",
        one_order=True,  # drawn from the global generator, so that each run has another one
        dummies=True,
    ),
)

IMPORTS = tuple(
    replace(
        script,
        name=f"{script.name}, import changed",
        imports=True,
        launch="--num_processes 2",
        one_order=True,
        one_schedule=True,
    )
    for script in ACCELERATE
)

_TRAINER = (
    "--do_train --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_steps 8 --logging_steps 1 "
    "--save_steps 4 --learning_rate 1e-3 --report_to none --output_dir {out}"
)
_PLAIN = "--use_cpu --ddp_backend gloo"
_TASKS = {
    "run_clm": (
        "language-modeling",
        "--model_name_or_path openai-community/gpt2 --train_file lines_train.txt "
        "--validation_file lines_validation.txt --block_size 32",
    ),
    "run_glue": (
        "text-classification",
        "--model_name_or_path bert-base-cased --train_file pairs_train.csv --validation_file pairs_validation.csv "
        "--max_seq_length 32",
    ),
    "run_qa": (
        "question-answering",
        "--model_name_or_path bert-base-cased --train_file questions_train.json "
        "--validation_file questions_validation.json --max_seq_length 48 --doc_stride 16",
    ),
    "run_summarization": (
        "summarization",
        "--model_name_or_path google-t5/t5-small --train_file summaries_train.json "
        "--validation_file summaries_validation.json --max_source_length 48 --max_target_length 12 "
        "--predict_with_generate",
    ),
}
_NEEDS = {"run_summarization": (*_METRICS, "nltk")}


def _trainer_rows(name: str) -> list[Script]:
    folder, data = _TASKS[name]
    path = f"transformers/examples/pytorch/{folder}/{name}.py"
    train = Script(
        f"{name}, train",
        path,
        f"{data} {_TRAINER} --do_eval",
        launch="--num_processes 2",
        extra="--deepspeed zero3.json",
        plain_extra=_PLAIN,
        needs=_NEEDS.get(name, _METRICS),
    )
    return [
        train,
        replace(
            train,
            name=f"{name}, resumed",
            arguments=f"{data} {_TRAINER} --resume_from_checkpoint {{out}}/checkpoint-4",
            after=train.name,
        ),
        replace(
            train,
            name=f"{name}, evaluation only",
            arguments=f"{data} --do_eval --per_device_eval_batch_size 4 --report_to none --output_dir {{out}}",
            measure="eval_loss" if name != "run_qa" else "eval_exact_match",
        ),
    ]


def _loop_row(name: str) -> Script:
    folder, data = _TASKS[name]
    data = data.replace("--max_seq_length", "--max_length") if name == "run_glue" else data
    data = data.replace(" --predict_with_generate", " --num_beams 1")
    return Script(
        f"{name}_no_trainer",
        f"transformers/examples/pytorch/{folder}/{name}_no_trainer.py",
        f"{data} --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_train_steps 8 "
        "--learning_rate 1e-3 --seed 0 --output_dir {out}",
        # accelerate's default under DeepSpeed clips at 1.0, which the scripts do not do under DDP.
        launch=f"{STAGE.format(stage=3)} --gradient_clipping 0",
        needs=_NEEDS.get(name, _METRICS),
    )


TRANSFORMERS = (*(row for name in _TASKS for row in _trainer_rows(name)), *map(_loop_row, _TASKS))

_TRL = (
    "--model_name_or_path HuggingFaceTB/SmolLM-360M --dtype float32 --bf16 False --per_device_train_batch_size 4 "
    "--max_steps 5 --logging_steps 1 --report_to none --learning_rate 1e-3 --output_dir {out} "
    "--gradient_checkpointing False"
)
_TRL_DATA = {
    "sft": "--dataset_name trl-lib/Capybara",
    "dpo": "--dataset_name trl-lib/ultrafeedback_binarized",
    "reward": "--dataset_name trl-lib/ultrafeedback_binarized",
    "grpo": "--dataset_name HuggingFaceH4/Polaris-Dataset-53K --reward_funcs made_rewards.share_of_vowels "
    # Two updates per generation and a penalty: the loss of the first update is zero for any gradient.
    "--max_completion_length 8 --num_generations 4 --num_iterations 2 --beta 0.1",
}

TRL = tuple(
    Script(
        f"trl.scripts.{name}, {stage}.yaml",
        f"trl/trl/scripts/{name}.py" if stage == "zero1" else f"-m trl.scripts.{name}",
        f"{_TRL} {data}",
        launch=f"--config_file {{sources}}/trl/trl/accelerate_configs/{stage}.yaml --num_processes 2 "
        "--mixed_precision no",
        plain_extra=_PLAIN,
        plainly="" if stage == "zero2" else f"trl.scripts.{name}, zero2.yaml",
    )
    for name, data in _TRL_DATA.items()
    for stage in ("zero2", "zero1", "zero3")
)

_SERVED = (
    "--use_vllm True --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port {port} "
    "--vllm_group_port {group_port}"
)
_LORA = "--use_peft True --lora_r 4 --lora_target_modules q_proj v_proj down_proj"
_POLARIS = "--dataset_name HuggingFaceH4/Polaris-Dataset-53K --reward_funcs made_rewards.share_of_vowels"
_RL_DATA = {
    "grpo": _TRL_DATA["grpo"],
    "rloo": f"{_POLARIS} --max_completion_length 8 --num_generations 4 --num_iterations 2 --beta 0.1",
    "online_dpo": "--dataset_name HuggingFaceH4/Polaris-Dataset-53K --reward_model_path HuggingFaceTB/SmolLM-360M "
    # The script passes its dtype to the tokenizer as well, whose JSON accepts only the word.
    "--max_new_tokens 8 --dtype auto",
}


def _served_row(name: str, stage: int, kind: str, extra: str) -> Script:
    is_example = name == "online_dpo"
    return Script(
        f"trl.scripts.{name} {kind}, generator, zero{stage}.yaml",
        f"trl/examples/scripts/{name}.py" if is_example else f"-m trl.scripts.{name}",
        f"{_TRL} {_RL_DATA[name]} {_SERVED} {extra}",
        launch=f"--config_file {{sources}}/trl/trl/accelerate_configs/zero{stage}.yaml --num_processes 2 "
        "--mixed_precision no",
        plain_extra=_PLAIN,
        plainly="" if stage == 2 else f"trl.scripts.{name} {kind}, generator, zero2.yaml",
        generator="HuggingFaceTB/SmolLM-360M",
        needs=("trl.generation.vllm_client:c10d", "requests"),
    )


SERVED = tuple(
    _served_row(name, stage, kind, extra)
    for name in _RL_DATA
    for kind, extra in (("full", ""), ("LoRA", _LORA))
    for stage in (2, 3)
    if (name, kind, stage) != ("online_dpo", "full", 3)  # its copy of the model for reference refuses ZeRO-3
)

SCRIPTS = (*DEEPSPEED, *ACCELERATE, *TRANSFORMERS, *TRL, *SERVED, *IMPORTS)
