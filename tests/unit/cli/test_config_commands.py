"""`zeroaccel config` and its sub-commands, in this process: printed texts, written files and error messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import typed
from tests.support.environment import ROOT
from zeroaccel.cli.config import config_command as command_module
from zeroaccel.cli.config.config_command import SUB_COMMANDS
from zeroaccel.config.schema import Config
from zeroaccel.templates import ABOUT

FILE = "zeroaccel.yaml"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and a user without a launch file."""
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    monkeypatch.setattr(command_module.os, "environ", environ)
    return tmp_path


def test_data_goes_to_stdout_and_messages_to_stderr(project: Path) -> None:
    said = typed("config --yes --dry_run --zero-stage 1")
    assert yaml.safe_load(said.out)["deepspeed_config"]["zero_stage"] == 1
    assert said.err == "dry run: zeroaccel.yaml is not written\n"
    assert list(project.iterdir()) == []
    written = typed("config --yes --zero_stage 1")
    assert written.out == ""
    assert (project / FILE).read_text() == said.out
    assert "\x1b" not in written.err


def test_a_model_is_planned_for(project: Path) -> None:
    words = ["--yes", "--dry_run", "--use_cpu", "yes", "--sequence", "64", "--num_processes", "2"]
    said = typed("config", *words, "--model", "1m")
    assert yaml.safe_load(said.out)["deepspeed_config"]["zero_stage"] == 1
    assert said.err.startswith("1m takes 0.")
    assert "per process, which fits\n" in said.err
    assert (
        "more in memory, which fits\n"
        in typed("config", *words, "--model", "1m", "--zero_stage", "3", "--offload_optimizer_device", "cpu").err
    )


def test_without_a_terminal_the_missing_flags_are_named(project: Path) -> None:
    said = typed("config --zero_stage 3", code=2).err
    assert said.startswith("zeroaccel: stdin is not a terminal, so no question can be asked: give --use_cpu (true), ")
    assert "--zero3_init_flag (true)" in said
    assert "--zero_stage" not in said
    assert said.count("\n") == 1
    assert (
        "--yes is given, and there is no default for --main_process_ip: give a value."
        in typed("config --yes --num_machines 2", code=2).err
    )
    assert list(project.iterdir()) == []


def test_no_terminal_is_needed_where_nothing_is_left_to_ask(project: Path) -> None:
    flags = ["--use_cpu", "yes", "--num_machines", "1", "--use_deepspeed", "no", "--num_processes", "1"]
    typed("config --no_input", *flags, "--mixed_precision", "no")
    assert yaml.safe_load((project / FILE).read_text())["distributed_type"] == "NO"


def test_flags_before_set_before_answers(project: Path) -> None:
    (project / "answers.yaml").write_text("zero_stage: 1\nnum_processes: 3\nuse_cpu: yes\n")
    sets = ["--set", "deepspeed_config.zero_stage=2", "--set", "num_processes=4", "--set", "max_restarts=5"]
    made = yaml.safe_load(typed("config --yes --dry_run --answers answers.yaml", *sets, "--num_processes", "2").out)
    assert made["deepspeed_config"]["zero_stage"] == 2
    assert (made["num_processes"], made["max_restarts"], made["use_cpu"]) == (2, 5, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--zero_stage 7", "--zero_stage: expected 0, 1, 2 or 3, got '7'"),
        ("--offload_param_device gpu", "--offload_param_device: expected none, cpu or nvme, got 'gpu'"),
        ("--zero_stge 3", "No such option '--zero_stge'"),
        ("--set deepspeed_config.zero_stge=3", "--set deepspeed_config.zero_stge: unknown key; did you mean"),
        ("--set zero_stage", "--set: expected KEY=VALUE, as in deepspeed_config.zero_stage=3, got 'zero_stage'"),
        ("--set num_processes.x=1", "--set num_processes.x: num_processes is not a section; set a key of a section"),
        ("--set max_restarts=-1", "max_restarts: expected a number of at least 0, got -1"),
        ("--answers nowhere.yaml", "file nowhere.yaml (--answers) does not exist"),
        ("--answers bad.yaml", "bad.yaml:1:1: zero_stge: no such question; did you mean zero_stage?"),
        ("--config_file .", ". is a folder; name a file"),
        ("--deepspeed_config_file broken.json", "broken.json:1:2: not valid JSON"),
        ("valdate", "No such command 'valdate'. Did you mean validate?"),
        ("--zero_stage 3 show", "--zero_stage must come after show."),
        ("--yes default", "--yes must come after default."),
        ("--model 7b default", "--model must come after default."),
        ("show", "there is no launch file; create one with `zeroaccel config`"),
        ("update", "there is no launch file; name one by --config_file"),
        ("explain zero_stge", "zero_stge: no such key; did you mean zero_stage?"),
        ("template zero_stage3_bf61", "no such template; did you mean zero_stage3_bf16.json?"),
        ("convert nowhere.yaml", "file nowhere.yaml does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: str, words: str, project: Path) -> None:
    (project / "bad.yaml").write_text("zero_stge: 3\n")
    (project / "broken.json").write_text("{")
    flags = "" if {*SUB_COMMANDS, "valdate"} & set(arguments.split()) else "--yes"
    said = typed(f"config {flags} {arguments}", code=2)
    assert said.err.startswith("zeroaccel: ")
    assert words in said.err
    assert "Traceback" not in said.err
    assert not (project / FILE).exists()


def test_default_replaces_a_file_only_on_request(project: Path) -> None:
    typed("config default --mixed_precision fp16")
    first = (project / FILE).read_text()
    assert "mixed_precision: fp16\n" in first
    assert "zeroaccel.yaml exists; --yes replaces it and keeps a copy" in typed("config default", code=2).err
    typed("config default --yes")
    assert (project / f"{FILE}.bak").read_text() == first
    assert (project / FILE).read_text() != first


def test_update_changes_the_given_settings(project: Path) -> None:
    (project / FILE).write_text(
        "num_processes: 2\ntimeout: 30\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n"
    )
    typed("config update --zero_stage 2")
    made = yaml.safe_load((project / FILE).read_text())
    assert made["deepspeed_config"] == {"zero_stage": 2, "offload_optimizer_device": "none"}
    assert (made["num_processes"], made["timeout"]) == (2, 30.0)


def test_show_lists_the_settings_of_a_launch(project: Path) -> None:
    (project / "ds.json").write_text('{"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": "auto"}')
    (project / FILE).write_text("num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    command_module.os.environ["ZEROACCEL_NUM_PROCESSES"] = "3"  # type: ignore[index]
    assert typed("config show").out == (project / FILE).read_text()
    rows = dict(line.split("\t", 1) for line in typed("config show --resolve").out.splitlines())
    assert rows["num_processes"] == "3\tenvironment ZEROACCEL_NUM_PROCESSES"
    assert rows["deepspeed_config_file"] == "ds.json\tzeroaccel.yaml:3:3"
    assert rows["max_restarts"] == "0\tdefault"
    assert rows["ds.json: gradient_clipping"] == "0.5\tds.json:1:2"
    assert rows["ds.json: train_micro_batch_size_per_gpu"].startswith("auto\t")
    assert json.loads(typed("config show --resolve --json").out)["num_processes"]["value"] == 3


def test_validate_reports_every_file(project: Path) -> None:
    (project / "good.yaml").write_text("num_processes: 2\n")
    (project / "bad.yaml").write_text("num_proceses: 2\n")
    (project / "ds.json").write_text('{"zero_optimization": {"stage": 7}}')
    (project / "accelerate.json").write_text('{"distributed_type": "NO", "mixed_precision": "no"}')
    (project / "job.sh").write_text("#!/bin/sh\nexport ZEROACCEL_NUM_PROCESES=2\nzeroaccel launch train.py\n")
    (project / "flag.sh").write_text("#!/bin/sh\nzeroaccel launch \\\n  --zero_stge 3 train.py\n")
    (project / "hosts").write_text("node1 slots=8\nnode2 slot=8\n")
    names = ["good.yaml", "bad.yaml", "ds.json", "accelerate.json", "job.sh", "flag.sh", "hosts"]
    said = typed("config validate", *names, code=2)
    assert said.out.splitlines() == ["good.yaml: launch file, valid", "accelerate.json: launch file, valid"]
    assert said.err.splitlines() == [
        'zeroaccel: bad.yaml:1:1: num_proceses: unknown key; did you mean "num_processes"?',
        "zeroaccel: ds.json:1:24: zero_optimization.stage: expected 0, 1, 2 or 3, got 7",
        "zeroaccel: job.sh:2: ZEROACCEL_NUM_PROCESES: no such setting; did you mean ZEROACCEL_NUM_PROCESSES?",
        "zeroaccel: flag.sh:2: No such option --zero_stge; did you mean --zero_stage?",
        "zeroaccel: hosts:2: expected a machine and its number of processes, as in: node1 slots=8, got 'node2 slot=8'",
    ]


def test_validate_reads_any_ending_by_its_content(project: Path) -> None:
    (project / "job.conf").write_text('num_processes: "2"\nuse_cpu: true\n')
    (project / "ds.cfg").write_text('{"train_batch_size": "8"}')
    (project / "hosts.conf").write_text("node1 slots=2\n")
    assert typed("config validate job.conf ds.cfg hosts.conf").out.splitlines() == [
        "job.conf: launch file, valid",
        "ds.cfg: JSON config, valid",
        "note: ds.cfg:1:2: train_batch_size: '8' in quotes is read as 8",
        "hosts.conf: hostfile, valid",
    ]
    (project / "job.conf").write_text("num_processes: [2\n")
    assert "job.conf:1:16: not valid YAML" in typed("config validate job.conf", code=2).err


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion", "Adagrad", "SGD", "Lamb", "Muon", "Adafactor", "RMSprop"])
def test_validate_takes_every_optimizer_that_a_config_can_name(name: str, project: Path) -> None:
    (project / "ds.json").write_text(json.dumps({"optimizer": {"type": name, "params": {"lr": 0.01}}}))
    typed("config validate ds.json")


WRONG_FOR_INITIALIZE = {
    '{"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": "auto"}}}': "T_max: expected a value, which",
    '{"optimizer": {"type": "AdmaW"}}': "ds.json:1:16: optimizer.type: expected a known optimizer, got 'AdmaW'; did",
    '{"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}': "ds.json:1:44: optimizer.params.lrr: expected a",
    '{"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}': "optimizer.params of AdamW: ",
    '{"optimizer": {"type": "ZeroOneAdam"}}': "ds.json:1:16: optimizer.type: zeroaccel does not have the 1-bit",
    '{"scheduler": {"type": "WarmupLr"}}': "ds.json:1:16: scheduler.type: expected a known scheduler, got 'WarmupLr'",
    '{"scheduler": {"type": "WarmupDecayLR"}}': "scheduler.params.total_num_steps: expected a value, which",
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}': 'expected "log" or "linear"',
    '{"scheduler": {"type": "ReduceLROnPlateau"}}': "scheduler.type ReduceLROnPlateau is not supported: it needs",
    '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}': "ds.json:1:2: train_batch_size: 10 is no multiple",
}


@pytest.mark.parametrize("text", WRONG_FOR_INITIALIZE)
def test_validate_finds_the_mistakes_that_initialize_finds(text: str, project: Path) -> None:
    (project / "ds.json").write_text(text)
    said = typed("config validate ds.json", code=2)
    assert WRONG_FOR_INITIALIZE[text] in said.err
    assert said.out == ""


def test_validate_accepts_auto(project: Path) -> None:
    auto = {"lr": "auto", "betas": "auto", "weight_decay": "auto"}
    steps = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": [1e-3, 1e-4]}
    tree = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": auto},
        "scheduler": {"type": "WarmupDecayLR", "params": steps},
    }
    (project / "ds.json").write_text(json.dumps(tree))
    said = typed("config validate ds.json")
    assert said.out.splitlines() == [
        "ds.json: JSON config, valid",
        "note: ds.json:1:58: bf16.loss_scale: bf16 needs no loss scale; this is a key of fp16",
    ]
    assert said.err == ""


def test_validate_follows_the_strict_flag(project: Path) -> None:
    (project / "ds.json").write_text('{"wibble": 1, "overlap_comm": true}')
    assert typed("config validate ds.json", code=2).err == (
        'zeroaccel: ds.json:1:15: overlap_comm: unknown key; did you mean "zero_optimization.overlap_comm"?\n'
    )
    assert typed("config validate --strict ds.json", code=2).err.splitlines() == [
        "zeroaccel: ds.json: 2 settings are wrong",
        "  ds.json:1:2: wibble: unknown key",
        '  ds.json:1:15: overlap_comm: unknown key; did you mean "zero_optimization.overlap_comm"?',
    ]
    assert (
        "note: ds.json:1:2: wibble: unknown key, which changes nothing"
        in typed("config validate --lenient ds.json").out
    )


def test_validate_notes_misplaced_sections_of_a_launch_file(project: Path) -> None:
    (project / "l.yaml").write_text("machine_rank: 'MACHINE_RANK'\ndeepspeed_config:\n  bf16: {enabled: true}\n")
    right, section, blank = typed("config validate l.yaml").out.splitlines()
    assert right == "l.yaml: launch file, valid"
    assert section.startswith("note: l.yaml:3:3: deepspeed_config.bf16: does nothing, as in accelerate: it belongs in")
    assert blank == "note: l.yaml: complete it with --machine_rank of `zeroaccel launch`"


def test_validate_looks_into_the_json_that_a_launch_file_names(project: Path) -> None:
    (project / "ds.json").write_text('{"optimizer": {"type": "AdmaW"}}')
    (project / "l.yaml").write_text("num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert "ds.json:1:16: optimizer.type: expected a known optimizer" in typed("config validate l.yaml", code=2).err
    (project / "ds.json").write_text('{"comms_logger": {"enabled": true}}')
    assert typed("config validate l.yaml").out.splitlines()[0] == "l.yaml: launch file, valid"


def test_convert_drops_unknown_keys_on_request(project: Path) -> None:
    (project / "ds.json").write_text('{"_why": 1, "wibble": 2, "gradient_clippin": 1, "gradient_clipping": 0.5}')
    said = typed("config convert ds.json", code=2).err
    assert "ds.json:1:13: wibble: unknown key" in said
    assert 'ds.json:1:26: gradient_clippin: unknown key; did you mean "gradient_clipping"?' in said
    assert "--drop_unknown" in said
    said = typed("config convert --drop-unknown ds.json")
    assert json.loads(said.out) == {"gradient_clipping": 0.5}
    assert said.err.splitlines() == [
        "left out ds.json:1:13: wibble: unknown key",
        "left out ds.json:1:26: gradient_clippin: unknown key",
        "left out ds.json:1:2: _why: taken for a comment, because it begins with _",
    ]


def test_explain_covers_launch_and_json() -> None:
    said = typed("config explain zero_stage").out
    assert "  environment  ZEROACCEL_ZERO_STAGE, ACCELERATE_DEEPSPEED_ZERO_STAGE\n" in said
    assert "  launch file  deepspeed_config.zero_stage\n" in said
    assert "launch file  parallelism_config.parallelism_config_tp_size\n" in typed("config explain tp_size").out
    assert "also         stage3_prefetch_bucket_size" in typed("config explain stage3_prefetch_bucket_size").out
    assert "refused: the batch size does not follow the number of ranks" in typed("config explain elasticity").out
    assert (
        "Number of ranks that divide the experts of each layer."
        in typed("config explain expert_parallel.autoep_size").out
    )


def test_the_schemas_are_json_schema() -> None:
    launch = json.loads(typed("config schema").out)
    assert launch["additionalProperties"] is False
    assert {"deepspeed_config", "num_processes", "hostfile"} - set(launch["properties"]) == {"hostfile"}
    assert json.loads(typed("config schema json").out) == json.loads(json.dumps(Config.model_json_schema()))


OF_FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
"""


@pytest.mark.parametrize(
    ("change", "section"),
    [
        (
            ("", ""),
            {
                "zero_stage": 3,
                "zero3_init_flag": True,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu",
                "zero3_save_16bit_model": True,
            },
        ),
        (("FULL_SHARD", "2"), {"zero_stage": 2, "offload_optimizer_device": "cpu"}),
        (
            ("fsdp_sharding_strategy: FULL_SHARD", "fsdp_reshard_after_forward: false"),
            {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        ),
        (
            ("params: true\n  fsdp_sharding_strategy: FULL_SHARD", "params: false\n  fsdp_sharding_strategy: NO_SHARD"),
            {"zero_stage": 0},
        ),
    ],
)
def test_convert_shards_as_fsdp_did(change: tuple[str, str], section: dict[str, Any], project: Path) -> None:
    (project / "fsdp.yaml").write_text(OF_FSDP.replace(*change))
    said = typed("config convert fsdp.yaml")
    made = yaml.safe_load(said.out)
    assert made["deepspeed_config"] == section
    assert (made["distributed_type"], made["num_processes"], made["mixed_precision"]) == ("DEEPSPEED", 2, "bf16")
    assert "fsdp_config.fsdp_backward_prefetch: left out, because stage3_prefetch_bucket_size in" in said.err


def test_validate_lists_the_flags_that_complete_a_launch_file(project: Path) -> None:
    (project / "two.yaml").write_text("num_machines: 2\nmachine_rank: 'MACHINE_RANK'\nnum_processes: 4\n")
    (project / "met.yaml").write_text("num_machines: 2\nrdzv_backend: c10d\nmain_process_ip: node1\n")
    (project / "odd.yaml").write_text("num_machines: 2\nnum_processes: 3\n")
    (project / "idle.yaml").write_text("deepspeed_config: {zero_stage: 2, offload_param_device: cpu}\n")
    assert typed("config validate two.yaml met.yaml idle.yaml").out.splitlines() == [
        "two.yaml: launch file, valid",
        "note: two.yaml: complete it with --machine_rank and --main_process_ip of `zeroaccel launch`",
        "met.yaml: launch file, valid",
        "idle.yaml: launch file, valid",
        "note: idle.yaml:1:35: offload_param_device cpu: does nothing: parameters are sharded at stage 3 "
        "only, and the stage is 2",
    ]
    assert (
        "num_processes: expected a multiple of num_machines (2), got 3" in typed("config validate odd.yaml", code=2).err
    )


def test_convert_lists_all_that_is_wrong_with_places(project: Path) -> None:
    (project / "wrong.yaml").write_text("compute_environment: AMAZON\nfsdp_confg: 1\nwibble: 1\n")
    assert typed("config convert wrong.yaml", code=2).err.splitlines()[1:] == [
        "  wrong.yaml:1:1: compute_environment: expected LOCAL_MACHINE, got 'AMAZON'",
        "  wrong.yaml:2:1: fsdp_confg: unknown key; did you mean fsdp_config?",
        "  wrong.yaml:3:1: wibble: unknown key; remove it",
    ]
    (project / "moved.yaml").write_text("dynamo_config: 3\ndynamo_backend: inductor\n")
    assert "moved.yaml:1:1: dynamo_config: expected an object, got 3" in typed("config convert moved.yaml", code=2).err
    for name, text in (
        ("twice.yaml", "num_processes: 2\nnum_processes: 3\n"),
        ("twice.json", '{"bf16": {}, "bf16": 1}'),
    ):
        (project / name).write_text(text)
        assert "given 2 times" in typed(f"config convert {name}", code=2).err


def test_convert_moves_keys_of_older_files(project: Path) -> None:
    (project / "old.yaml").write_text(
        "num_processes: 2\ndynamo_backend: INDUCTOR\ncommand_file: x\ndowncast_bf16: 'no'\n"
    )
    said = typed("config convert old.yaml")
    assert yaml.safe_load(said.out) == {"num_processes": 2, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    assert said.err == "command_file: does nothing, because it is a setting for TPUs\n"


def test_convert_leaves_out_useless_keys_of_a_json(project: Path) -> None:
    tree = {
        "train_batch_size": "auto",
        "amp": {"enabled": True},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "legacy_stage1": False},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "compile": {"enabled": True, "deepcompile": True, "passes": ["zp3"]},
    }
    (project / "ds.json").write_text(json.dumps(tree))
    said = typed("config convert ds.json -o ours.json").err
    assert json.loads((project / "ours.json").read_text()) == {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "legacy_stage1": False},
        "compile": {"enabled": True},
    }
    assert "compile.passes: zeroaccel does not read it" in said
    assert "left out ds.json:1:30: amp: Apex is not supported; use bf16 or fp16" in said
    assert ": zero_optimization.round_robin_gradients: every rank owns" in said


@pytest.mark.parametrize("name", ["fsdp.yaml", "ds.json"])
def test_convert_does_not_guess(name: str, project: Path) -> None:
    (project / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_stratgy: FULL_SHARD}\n")
    (project / "ds.json").write_text('{"zero_optimisation": {}}')
    assert "unknown key" in typed(f"config convert {name}", code=2).err


def test_templates_are_listed_printed_and_written(project: Path) -> None:
    listed = [line.split("\t")[0] for line in typed("config template").out.splitlines()]
    in_tree = [
        path.name for path in (ROOT / "templates").iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert listed == sorted(ABOUT) == sorted(in_tree)
    assert typed("config template zero_stage3_bf16").out == (ROOT / "templates" / "zero_stage3_bf16.json").read_text()
    typed("config template hostfile -o hosts")
    shutil.copy("hosts", "before")
    typed("config template hostfile -o hosts", code=2)
    typed("config template hostfile -o hosts --yes")
    assert Path("hosts").read_text() == Path("before").read_text()
