"""Runs the DeepSpeed tests of accelerate and transformers on CPUs, with zeroaccel in DeepSpeed's place.

    python tests/interop/suites/accelerate_transformers.py accelerate --source DIR
    python tests/interop/suites/accelerate_transformers.py transformers --source DIR --only zero3 --markdown FILE

DIR is a checkout of the project near the installed version; only its `tests` folder is used, and the libraries
themselves are the installed ones. `tiny_hub` makes tiny models, so the tests use no network. Needs
`parameterized`, for transformers also `optuna` and `evaluate`. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import DIFFERS, FAILED, Cause, explained, facade_environment, markdown, run_files
from tiny_hub import TinyModel, make_hub


@dataclass(frozen=True)
class Suite:
    """Files of a project's tests, the models that they load, and the causes of tests that cannot pass."""

    files: Sequence[str]
    models: Mapping[str, TinyModel]
    causes: Sequence[Cause]
    options: Sequence[str] = ()


_GPT2 = TinyModel("gpt2", {"n_positions": 64, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0})

_UNTRAINED = "needs the accuracy of the hub's trained BERT; the one here has random weights"

_ABSENT = "couldn't connect to|LocalEntryNotFoundError|Couldn't find a module script|OfflineModeIsEnabled"

_CLASSIFIER = "AutoModelForSequenceClassification"

ACCELERATE = Suite(
    files=(
        "tests/deepspeed/test_deepspeed.py",
        "tests/deepspeed/test_deepspeed_gradient_accumulation.py",
        "tests/deepspeed/test_deepspeed_multiple_model.py",
        "tests/deepspeed/test_alst_ulysses_sp.py",
    ),
    models={
        "sshleifer/tiny-gpt2": _GPT2,
        "hf-internal-testing/tiny-random-gpt2": _GPT2,
        "gpt2": _GPT2,
        "distilbert-base-uncased": TinyModel(
            "distilbert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}, _CLASSIFIER, tokenizer=True
        ),
        "bert-base-cased": TinyModel("bert", head=_CLASSIFIER, tokenizer=True),
        "hf-internal-testing/tiny-random-LlamaForCausalLM": TinyModel(
            "llama", {"num_key_value_heads": 4, "vocab_size": 1000}, tokenizer=True
        ),
        "apple/mobilevit-xx-small": TinyModel("mobilevit", head=""),
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": TinyModel(
            "qwen2_moe",
            {
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_experts": 4,
                "num_key_value_heads": 4,
                "vocab_size": 1000,
            },
        ),
    },
    causes=(
        Cause(
            "every request for full weights gathers them; `stage3_gather_16bit_weights_on_model_save: false` "
            "forbids nothing (docs/huggingface.md)",
            test="test_save_checkpoints",
            report="ValueError not raised",
            status=DIFFERS,
        ),
        Cause(_UNTRAINED, report="is lower than the lower bound|best_performance"),
        Cause(
            "without `--use_deepspeed`, accelerate's launcher starts one rank per detected GPU",
            test="test_zero3_integration|test_train_multiple_models",
            report="simple_launcher",
        ),
    ),
)

_OF_TRAINER = "tests/trainer/distributed/test_trainer_distributed_deepspeed.py"

TRANSFORMERS = Suite(
    files=(
        f"{_OF_TRAINER}::TestTrainerIntegrationDeepSpeed",
        f"{_OF_TRAINER}::TestNonTrainerIntegrationDeepSpeed",
        f"{_OF_TRAINER}::TestTrainerDistributedDeepSpeed",
        f"{_OF_TRAINER}::TestTrainerDistributedDeepSpeedCommon",
        f"{_OF_TRAINER}::TestDeepSpeedModelZoo",
        "tests/trainer/test_trainer_checkpointing.py::TrainerAutoBatchSizeTest::test_auto_batch_size_with_deepspeed",
    ),
    models={
        "sshleifer/tiny-gpt2": TinyModel("gpt2", {"n_positions": 512}, tokenizer=True),
        "patrickvonplaten/t5-tiny-random": TinyModel(
            "t5",
            {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
            head="AutoModelForSeq2SeqLM",
            tokenizer=True,
        ),
        "hf-internal-testing/tiny-random-gptj": TinyModel(
            "gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 512}, tokenizer=True
        ),
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": TinyModel(
            "qwen2", {"num_key_value_heads": 2}, tokenizer=True
        ),
    },
    causes=(
        Cause(
            "expects DeepSpeed's file names; zeroaccel has its own checkpoint format (docs/checkpoints.md)",
            test="test_save_checkpoints",
            report=r"model_states\.pt is not found",
            status=DIFFERS,
        ),
        Cause(
            "reads private attributes of DeepSpeed's optimizers",
            test="test_mixed_precision_model_and_optimizer_dtypes",
            report="fp32_partitioned_groups_flat|single_partition_of_fp32_groups",
            status=DIFFERS,
        ),
        Cause(
            "zero.Init keeps the dtype of the model's parameters until `initialize`, so that fp32 masters "
            "have all bits (docs/deepspeed_names.md)",
            test="test_init_zero3_(fp16|bf16)|test_arange_bf16",
            report="torch.float32 != torch.b?float16|False is not true",
            status=DIFFERS,
        ),
        Cause("needs a model or a metric of the hub that has no tiny replacement here", report=_ABSENT),
        Cause("compares the device with cpu:0, but a CPU rank's device has no index", "env_parity", "'cpu:[01]' not"),
        Cause(
            "requires output of the launch, and then the same as at stage 2", "zero3_env_parity", "produced no output"
        ),
    ),
    # The checkout's conftest sets cuDNN's TF32 by the old and the new switch; torch 2.13 rejects the combination.
    options=("--noconftest",),
)

SUITES = {"accelerate": ACCELERATE, "transformers": TRANSFORMERS}


def main() -> int:
    """Runs a suite and writes its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--source", type=Path, required=True, help="checkout of the project, with the folder `tests`")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--file", default="", help="run only files and classes whose name contains this text")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()) / "zeroaccel-tiny-hub")
    parser.add_argument("--limit", type=float, default=600.0, help="time limit for one test in seconds")
    parser.add_argument("--markdown", type=Path, help="file for the tables; default: print them")
    parser.add_argument("--verbose", action="store_true", help="print the report of every failure")
    arguments = parser.parse_args()
    suite = SUITES[arguments.suite]
    source = arguments.source.resolve()
    if missing := [file for file in suite.files if not (source / file.partition("::")[0]).is_file()]:
        print(f"--source {source}: expected a checkout of {arguments.suite} with {missing[0]}", file=sys.stderr)
        return 2
    environment = facade_environment({"RUN_SLOW": "1", **make_hub(arguments.home, suite.models)})
    options = [*suite.options, *(["-k", arguments.only] if arguments.only else [])]
    found = run_files(
        [file for file in suite.files if arguments.file in file],
        source=source,
        environment=environment,
        plugins=["accelerators"],
        options=options,
        limit_seconds=arguments.limit,
    )
    outcomes = explained(found, suite.causes)
    if arguments.verbose:
        print(*(f"=== {o.file}::{o.test}\n{o.text}" for o in outcomes if o.status == FAILED), sep="\n")
    command = f"python tests/interop/suites/accelerate_transformers.py {arguments.suite} --source DIR"
    text = markdown(f"{arguments.suite}'s tests of DeepSpeed", command, outcomes, ("accelerate", "transformers"))
    if arguments.markdown is None:
        print(text)
    else:
        arguments.markdown.write_text(text)
    return int(any(outcome.status == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
