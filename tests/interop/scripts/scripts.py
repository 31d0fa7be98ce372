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
        hardware: a script that requires a GPU finds the CPU as the accelerator, and trains in fp32 in place of fp16.
        sounds: replaces torchcodec.
        inside: runs in the run's own folder, with links to the inputs, because the script writes where it runs.
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
    hardware: bool = False
    sounds: bool = False
    inside: bool = False
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


_VISION = "--remove_unused_columns False"
_PICTURES = f"--dataset_name made/pictures {_VISION}"
_VIT = "--model_name_or_path google/vit-base-patch16-224-in21k"
_BERT = "--model_name_or_path bert-base-cased"
_T5 = "--model_name_or_path google-t5/t5-small"
_LINES = "--train_file lines_train.txt --validation_file lines_validation.txt"
_SOUNDS = "--dataset_name made/sounds --eval_split_name validation"
# Scripts with Trainer and scripts with a loop of their own: folder, arguments, further packages.
_MORE_TASKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "run_mlm": ("language-modeling", f"{_BERT} {_LINES} --max_seq_length 32", _METRICS),
    "run_swag": (
        "multiple-choice",
        f"{_BERT} --train_file choices_train.json --validation_file choices_validation.json --max_seq_length 32",
        _METRICS,
    ),
    "run_ner": (
        "token-classification",
        f"{_BERT} --train_file entities_train.json --validation_file entities_validation.json --max_seq_length 32",
        _METRICS,
    ),
    "run_translation": (
        "translation",
        f"{_T5} --train_file translations_train.json --validation_file translations_validation.json "
        "--source_lang en --target_lang ro --max_source_length 48 --max_target_length 24 --predict_with_generate",
        _METRICS,
    ),
    "run_seq2seq_qa": (
        "question-answering",
        f"{_T5} --train_file questions_train.json --validation_file questions_validation.json --max_seq_length 64 "
        "--doc_stride 16 --max_answer_length 8 --predict_with_generate --context_column context "
        "--question_column question --answer_column answers",
        _METRICS,
    ),
    "run_qa_beam_search": (
        "question-answering",
        "--model_name_or_path xlnet-base-cased --train_file questions_train.json --validation_file "
        "questions_validation.json --max_seq_length 48 --doc_stride 16",
        _METRICS,
    ),
    "run_image_classification": (
        "image-classification",
        f"{_VIT} {_PICTURES} --label_column_name label --ignore_mismatched_sizes",
        (*_METRICS, "torchvision"),
    ),
    "run_mae": (
        "image-pretraining",
        f"--model_name_or_path facebook/vit-mae-base {_PICTURES} --label_names pixel_values",
        ("torchvision",),
    ),
    "run_mim": ("image-pretraining", f"{_VIT} {_PICTURES} --mask_patch_size 16", ("torchvision",)),
    "run_semantic_segmentation": (
        "semantic-segmentation",
        f"--model_name_or_path nvidia/mit-b0 --dataset_name made/masks {_VISION}",
        (*_METRICS, "albumentations"),
    ),
    "run_object_detection": (
        "object-detection",
        f"--model_name_or_path facebook/detr-resnet-50 --dataset_name made/boxes --image_square_size 32 {_VISION} "
        "--eval_do_concat_batches False",
        ("albumentations", "torchmetrics", "pycocotools"),
    ),
    "run_instance_segmentation": (
        "instance-segmentation",
        "--model_name_or_path facebook/mask2former-swin-tiny-coco-instance --dataset_name made/instances "
        f"--image_height 32 --image_width 32 {_VISION} --eval_do_concat_batches False",
        ("albumentations", "torchmetrics", "pycocotools"),
    ),
    "run_audio_classification": (
        "audio-classification",
        f"--model_name_or_path facebook/wav2vec2-base {_SOUNDS} {_VISION}",
        _METRICS,
    ),
    "run_speech_recognition_ctc": (
        "speech-recognition",
        f"--model_name_or_path made/wav2vec2-base {_SOUNDS} --train_split_name train --eval_metrics wer "
        "--layerdrop 0 --mask_time_prob 0",
        _METRICS,
    ),
    "run_speech_recognition_seq2seq": (
        "speech-recognition",
        f"--model_name_or_path openai/whisper-tiny {_SOUNDS} --train_split_name train --freeze_feature_encoder False "
        "--predict_with_generate --generation_max_length 16 --text_column_name text",
        _METRICS,
    ),
    "run_clip": (
        "contrastive-image-text",
        "--model_name_or_path made/clip --train_file captions_train.json --validation_file captions_validation.json "
        f"--image_column image_path --caption_column caption --max_seq_length 16 {_VISION}",
        ("torchvision",),
    ),
}
_SPOKEN = ("run_audio_classification", "run_speech_recognition_ctc", "run_speech_recognition_seq2seq")


def _task_rows(name: str) -> list[Script]:
    folder, data, needs = _MORE_TASKS[name]
    first = Script(
        f"{name}, stage 3",
        f"transformers/examples/pytorch/{folder}/{name}.py",
        f"{data} {_TRAINER} --do_eval",
        launch="--num_processes 2",
        extra="--deepspeed zero3.json",
        plain_extra=_PLAIN,
        sounds=name in _SPOKEN,
        hardware=name == "run_clip",
        needs=needs,
    )
    return [first, replace(first, name=f"{name}, stage 2", extra="--deepspeed zero2.json", plainly=first.name)]


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


# Tasks whose scripts with a loop of their own name an argument differently.
_OTHERWISE = {
    "run_glue": ("--max_seq_length", "--max_length"),
    "run_ner": ("--max_seq_length", "--max_length"),
    "run_summarization": (" --predict_with_generate", " --num_beams 1"),
    "run_translation": (" --predict_with_generate", " --num_beams 1"),
}
_ONLY_TRAINER = ("run_seq2seq_qa", "run_mae", "run_clip", *_SPOKEN)


def _loop_row(name: str) -> Script:
    folder, data, *needs = _TASKS.get(name) or _MORE_TASKS[name]
    data = (
        data.replace(*_OTHERWISE.get(name, ("", ""))).replace(_VISION, "").replace("--eval_do_concat_batches False", "")
    )
    return Script(
        f"{name}_no_trainer",
        f"transformers/examples/pytorch/{folder}/{name}_no_trainer.py",
        f"{data} --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_train_steps 8 "
        "--learning_rate 1e-3 --seed 0 --output_dir {out}",
        # accelerate's default under DeepSpeed clips at 1.0, which the scripts do not do under DDP.
        launch=f"{STAGE.format(stage=3)} --gradient_clipping 0",
        needs=needs[0] if needs else _NEEDS.get(name, _METRICS),
    )


TRANSFORMERS = (
    *(row for name in _TASKS for row in _trainer_rows(name)),
    *map(_loop_row, (*_TASKS, *(name for name in _MORE_TASKS if name not in _ONLY_TRAINER))),
    *(row for name in _MORE_TASKS for row in _task_rows(name)),
)

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

_PEFT = "peft/examples"
_LLAMA = "HuggingFaceTB/SmolLM-360M"
_SFT_LORA = (
    "--seed 100 --model_name_or_path made/llama --dataset_name made/instructions --chat_template_format chatml "
    "--add_special_tokens False --append_concat_token False --splits train,test --max_length 64 --num_train_epochs 2 "
    "--logging_steps 1 --eval_strategy epoch --save_strategy epoch --packing True --learning_rate 1e-2 "
    "--lr_scheduler_type cosine --weight_decay 1e-4 --warmup_steps 0 --max_grad_norm 1.0 --output_dir {out} "
    "--per_device_train_batch_size 1 --per_device_eval_batch_size 2 --gradient_checkpointing True "
    "--dataset_text_field content --use_peft_lora True --lora_r 4 --lora_dropout 0 "
    "--lora_target_modules all-linear --report_to none"
)
_QLORA = (
    "--use_4bit_quantization True --use_nested_quant True --bnb_4bit_compute_dtype bfloat16 "
    "--bnb_4bit_quant_storage_dtype bfloat16"
)


def _sft_row(name: str, config: str, updates: int, more: str, precision: str = "--mixed_precision no") -> Script:
    return Script(
        f"PEFT sft, {name}",
        f"{_PEFT}/sft/train.py",
        f"{_SFT_LORA} --gradient_accumulation_steps {updates} {more}",
        launch=f"--config_file {{sources}}/{_PEFT}/sft/configs/{config}.yaml --num_processes 2 {precision}".strip(),
        # TrainingArguments checks bf16 against a GPU otherwise.
        extra="" if precision else "--use_cpu",
        plain_extra=_PLAIN,
        tolerance=1e-5 if precision else 1e-2,
        needs=("bitsandbytes",) if _QLORA in more else (),
    )


_FP32 = "--bf16 False"
_SFT_ROWS = (
    _sft_row("LoRA", "deepspeed_config", 4, f"{_FP32} --use_reentrant False"),
    _sft_row("LoRA, reentrant", "deepspeed_config", 4, f"{_FP32} --use_reentrant True"),
    _sft_row("LoRA, bf16", "deepspeed_config", 4, "--bf16 True --use_reentrant False", ""),
    _sft_row("QLoRA, bf16", "deepspeed_config_z3_qlora", 1, f"--bf16 True --use_reentrant True {_QLORA}", ""),
)
_OFFLOAD_YAML = "accelerate_ds_zero3_cpu_offload_config.yaml"
_LOOP_ROWS = tuple(
    Script(
        f"PEFT {name}",
        f"{_PEFT}/{folder}/{name}.py",
        launch=f"--config_file {{sources}}/{_PEFT}/{folder}/{_OFFLOAD_YAML} --num_processes 2 --gradient_clipping 0",
        hardware=True,
        inside=True,
    )
    for folder, name in (
        ("conditional_generation", "peft_lora_seq2seq_accelerate_ds_zero3_offload"),
        ("causal_language_modeling", "peft_lora_clm_accelerate_ds_zero3_offload"),
    )
)
_AS_OLORA = (
    f"--base_model {_LLAMA} --data_path made/instructions --output_dir {{out}} --batch_size 4 --device_map cpu "
    "--dtype float32 --eval_step 2 --save_step 2 --val_set_size 8 --learning_rate 0.3 --seed 0"
)
_AS_DORA = (
    f"--base_model {_LLAMA} --data_path made/instructions --output_dir {{out}} --batch_size 1 --device cpu "
    "--cutoff_len 32 --num_epochs 2 --eval_step 1 --save_step 1 --learning_rate 0.3"
)
# Examples of one method each, with Trainer: folder and arguments.
_METHODS = {
    "olora": f"{_AS_OLORA} --lora_r 4 --lora_dropout 0",
    "hira": f"{_AS_OLORA} --hira_r 4",
    "shira": f"{_AS_OLORA} --shira_r 4",
    "waveft": f"{_AS_OLORA} --waveft_n_frequency 64",
    "glora": f"{_AS_OLORA} --glora_r 4",
    "dora": f"{_AS_DORA} --use_dora --lora_dropout 0",
    "gralora": f"{_AS_DORA} --gralora_r 4 --gralora_dropout 0",
    "lily": f"{_AS_DORA} --lily_r 4",
    "peanut": f"{_AS_DORA} --peanut_r 4",
    "road": _AS_DORA.replace(_LLAMA, "made/llama"),
    "randlora": f"{_AS_DORA} --rank 4 --randlora_dropout 0",
    "supertuning": _AS_DORA,
    "deft": f"{_AS_DORA} --rank 4 --alpha 8 --deft_dropout 0",
    "delora": f"{_AS_DORA} --rank 4 --module_dropout 0",
    "alora": f"{_AS_DORA} --lora_r 4 --lora_dropout 0 --invocation_string <assistant>",
    "lora_ga": "--base_model openai-community/gpt2 --dataset_name wikitext --dataset_config wikitext-2-v1 "
    "--max_length 32 --r 4 --lora_dropout 0 --num_epochs 1 --batch_size 32 --warmup_steps 0 --learning_rate 1e-2 "
    "--logging_steps 1 --save_steps 4 --eval_steps 4 --output_dir {out}",
}


def _method_rows(name: str) -> list[Script]:
    first = Script(
        f"PEFT {name}, stage 3",
        f"{_PEFT}/{name}_finetuning/{name}_finetuning.py",
        _METHODS[name],
        launch="--use_deepspeed --deepspeed_config_file zero3.json --num_processes 2",
        hardware=True,
        inside=True,
    )
    launch = first.launch.replace("zero3", "zero2")
    return [first, replace(first, name=f"PEFT {name}, stage 2", launch=launch, plainly=first.name)]


PEFT = (*_SFT_ROWS, *_LOOP_ROWS, *(row for name in _METHODS for row in _method_rows(name)))

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

SCRIPTS = (*DEEPSPEED, *ACCELERATE, *TRANSFORMERS, *TRL, *PEFT, *SERVED, *IMPORTS)
