"""Keys and flags of accelerate that this launcher lacks: it translates, drops with a note, or refuses each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refusals import refused
from zeroaccel.cli.launch.typed_settings import TypedSettings
from zeroaccel.config.launch.launch_file import parse_launch_file
from zeroaccel.config.launch.launch_foreign import translate_fsdp
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.launch.resolution import resolve
from zeroaccel.errors import ConfigError


def _notes(text: str, **arguments: Any) -> list[str]:
    return list(parse_launch_file(text, "f.yaml", **arguments).notes)


@pytest.mark.parametrize(
    ("fsdp", "values"),
    [
        ({}, {"zero_stage": 3}),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"zero_stage": 3}),
        ({"fsdp_sharding_strategy": 1}, {"zero_stage": 3}),
        ({"fsdp_sharding_strategy": "2"}, {"zero_stage": 2}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_version": 1}, {"zero_stage": 2}),
        ({"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": True}, {"zero_stage": 0}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"zero_stage": 3}),
        ({"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2"}, {"zero_stage": 2}),
        ({"fsdp_reshard_after_forward": False, "fsdp_version": 2}, {"zero_stage": 2}),
        ({"fsdp_reshard_after_forward": "true", "fsdp_version": "2"}, {"zero_stage": 3}),
        (
            # FSDP2 has no strategy, so the other key decides.
            {"fsdp_reshard_after_forward": False, "fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"},
            {"zero_stage": 2},
        ),
        (
            {"fsdp_reshard_after_forward": False, "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
            {"zero_stage": 3},
        ),
        (
            {"fsdp_offload_params": "true", "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        ),
        (
            {"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
            {
                "zero_stage": 3,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu",
                "zero3_save_16bit_model": True,
            },
        ),
        ({"sharding_strategy": 2, "offload_params": False}, {"zero_stage": 2}),  # keys of accelerate's first files
    ],
)
def test_fsdp_shards_as_a_stage_does(fsdp: dict[str, Any], values: dict[str, Any]) -> None:
    made = translate_fsdp(fsdp)
    assert made.values == values
    assert made.problems == []
    # Each given key has a note.
    keys = {key if key.startswith("fsdp_") else f"fsdp_{key}" for key in fsdp}
    assert keys <= {key for key, _ in made.notes}


def test_shards_within_machines_are_reported_where_there_are_several() -> None:
    assert not any("mics_shard_size" in text for _, text in translate_fsdp({"fsdp_sharding_strategy": "4"}, 1).notes)
    assert any("mics_shard_size" in text for _, text in translate_fsdp({"fsdp_sharding_strategy": "4"}, 2).notes)


def test_an_fsdp_file_is_read_with_a_note_per_key_and_places() -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n"
        "  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
    )
    given = parse_launch_file(text, "f.yaml")
    assert given.values == {"distributed_type": "DEEPSPEED", "num_processes": 2, "zero_stage": 2}
    assert given.sources["zero_stage"] == "f.yaml:4:3"
    assert list(given.notes) == [
        "f.yaml:1:1: distributed_type: FSDP -> DEEPSPEED, with the equivalent ZeRO stage",
        "f.yaml:4:3: fsdp_config.fsdp_sharding_strategy: SHARD_GRAD_OP -> zero_stage 2",
        "f.yaml:5:3: fsdp_config.fsdp_backward_prefetch_policy: left out, because stage3_prefetch_bucket_size in "
        "the JSON config controls prefetching",
    ]


def test_flags_of_fsdp_count_more_than_the_file() -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: true}\n"
    flags = {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    assert parse_launch_file(text, "f.yaml", fsdp_flags=flags).values["zero_stage"] == 2
    over = ExplicitSettings({"distributed_type": "FSDP"})
    assert parse_launch_file("num_processes: 2\n", "f.yaml", over=over, fsdp_flags=flags).values["zero_stage"] == 2
    (note,) = _notes("num_processes: 2\n", fsdp_flags=flags)
    assert note == "f.yaml: --fsdp_sharding_strategy: no effect without --use_fsdp"


@pytest.mark.parametrize(
    ("fsdp", "words"),
    [
        ("{fsdp_sharding_strategy: HALF}", "f.yaml:2:15: fsdp_config.fsdp_sharding_strategy: expected FULL_SHARD or"),
        ("{fsdp_sharding_stratgy: NO_SHARD}", "fsdp_config.fsdp_sharding_stratgy: unknown key; did you mean fsdp_sha"),
    ],
)
def test_wrong_fsdp_keys_are_refused(fsdp: str, words: str) -> None:
    with refused(ConfigError, words):
        parse_launch_file(f"distributed_type: FSDP\nfsdp_config: {fsdp}\n", "f.yaml")


DDP = "distributed_type: MULTI_GPU"
LAUNCHER = "deepspeed_config: {{deepspeed_multinode_launcher: {}}}"


@pytest.mark.parametrize(
    ("text", "values", "note"),
    [
        ("fsdp_config: {fsdp_version: 1}", {}, "f.yaml:1:1: fsdp_config: does nothing, because no distribu"),
        (
            f"{DDP}\nfsdp_config: {{fsdp_version: 1}}",
            {"distributed_type": "MULTI_GPU"},
            "f.yaml:2:1: fsdp_config: does",
        ),
        (f"{DDP}\ndeepspeed_config: {{zero_stage: 3}}", {"distributed_type": "MULTI_GPU"}, "type is MULTI_GPU"),
        (
            "distributed_type: 'NO'\nnum_processes: 8",
            {"distributed_type": "NO", "num_processes": 1},
            "distributed_type is NO: one process",
        ),
        ("distributed_type: MULTI_XPU", {"distributed_type": "MULTI_GPU"}, "distributed_type: MULTI_XPU -> MULTI_GPU"),
        ("downcast_bf16: 'yes'", {}, "f.yaml:1:1: downcast_bf16: does nothing, because it is a setting for"),
        ("tpu_use_sudo: true", {}, "f.yaml:1:1: tpu_use_sudo: does nothing, because it is a setting for"),
        ("tpu_name: a", {}, "f.yaml:1:1: tpu_name: does nothing, because it is a setting for"),
        ("main_training_function: train", {}, "does nothing, because it is a setting for TPUs; the launcher"),
        ("ipex_config: {ipex: true}", {}, "ipex_config: does nothing, because zeroaccel does not use that library"),
        ("fp8_config: {backend: TE}", {}, "fp8_config: does nothing, because mixed_precision is not fp8"),
        ("megatron_lm_config: {megatron_lm_tp_degree: 2}", {}, "megatron_lm_config: does nothing, because no dist"),
        (
            "mpirun_config: {mpirun_hostfile: h}",
            {},
            "mpirun_config: does nothing, because the launcher itself starts",
        ),
        ("fp16: true", {"mixed_precision": "fp16"}, "f.yaml:1:1: fp16: true -> mixed_precision fp16"),
        (
            "num_machines: 1\ndeepspeed_config: {deepspeed_hostfile: hosts, deepspeed_multinode_launcher: pdsh}",
            {"num_machines": 1, "multinode_launcher": "ssh"},
            "f.yaml:2:20: deepspeed_config.deepspeed_hostfile: does nothing, because num_machines is 1",
        ),
        (
            f"num_machines: 1\n{LAUNCHER.format('openmpi')}",
            {"num_machines": 1},
            "does nothing, because num_machines is 1",
        ),
        (
            f"num_machines: 2\n{LAUNCHER.format('OPENMPI')}",
            {"num_machines": 2, "multinode_launcher": "ssh"},
            "f.yaml:2:20: deepspeed_config.deepspeed_multinode_launcher: OPENMPI -> ssh, which starts the same",
        ),
        (
            "deepspeed_config: {zero_stage: 3, bf16: {enabled: true}}",
            {"zero_stage": 3},
            "f.yaml:1:35: deepspeed_config.bf",
        ),
        (
            "deepspeed_config: {zero_stage: '3', quux_size: 3}",
            {"zero_stage": 3},
            "config.quux_size: does nothing, because accel",
        ),
    ],
)
def test_keys_that_accelerate_ignores_leave_a_note_with_their_place(
    text: str, values: dict[str, Any], note: str
) -> None:
    given = parse_launch_file(text, "f.yaml")
    assert given.values == values
    assert len(given.notes) == 1
    assert note in given.notes[0]


def test_the_older_section_of_tensor_parallelism_is_translated() -> None:
    text = "tp_config:\n  tp_size: '4'\ndistributed_type: TP\nnum_processes: 4\n"
    given = parse_launch_file(text, "f.yaml")
    assert given.values == {"distributed_type": "MULTI_GPU", "num_processes": 4, "tp_size": 4}
    assert (given.sources["tp_size"], given.sources["distributed_type"]) == ("f.yaml:2:3", "f.yaml:3:1")
    assert list(given.notes) == [
        "f.yaml:2:3: tp_config.tp_size: 4 -> parallelism_config.tp_size",
        "f.yaml:3:1: distributed_type: TP -> MULTI_GPU; tp_size sets the ranks that share each layer",
    ]
    given = parse_launch_file(f"{text}parallelism_config: {{parallelism_config_sp_size: 2, cp_size: 1}}\n", "f.yaml")
    assert (given.values["tp_size"], given.values["sp_size"]) == (4, 2)


@pytest.mark.parametrize("before", ["", "sp_size: 1, ", "parallelism_config_sp_size: 1, "])
@pytest.mark.parametrize("key", ["cp_size", "parallelism_config_cp_size"])
def test_the_size_of_context_parallelism_is_that_of_sequence_parallelism(before: str, key: str) -> None:
    text = f"num_processes: 2\nparallelism_config: {{{before}{key}: 2, cp_comm_strategy: alltoall}}\n"
    given = parse_launch_file(text, "f.yaml")
    assert given.values == {"num_processes": 2, "sp_size": 2}
    place = f"f.yaml:2:{text.splitlines()[1].index(key) + 1}"
    said = "is sp_size here: ranks that share a sequence exchange heads of attention"
    assert list(given.notes) == [f"{place}: parallelism_config.{key}: {said}"]
    flags = TypedSettings.of({"parallelism_config_cp_size": "2", "parallelism_config_cp_comm_strategy": "alltoall"})
    assert (flags.settings.values, flags.settings.sources) == (
        {"sp_size": 2},
        {"sp_size": "--parallelism_config_cp_size"},
    )
    assert list(flags.settings.notes) == [f"--parallelism_config_cp_size: {said}"]


def test_a_translated_section_of_another_kind_is_left_out() -> None:
    text = "tp_config:\n  tp_size: '4'\ndistributed_type: TP\nnum_processes: 4\n"
    given = parse_launch_file(text.replace("TP", "MULTI_GPU"), "f.yaml")  # accelerate reads it for TP only
    assert "tp_size" not in given.values
    assert list(given.notes) == ["f.yaml:1:1: tp_config: does nothing, because distributed_type is MULTI_GPU"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("4", "f.yaml:1:1: tp_config: expected a size such as `tp_size: 2`, got 4"),
        ("{tp_size: four}", "f.yaml:1:13: parallelism_config.tp_size: expected a whole number, got 'four'"),
        ("{tp_sise: 2}", "f.yaml:1:13: tp_config.tp_sise: unknown key; its only key is tp_size"),
    ],
)
def test_a_mistake_in_the_older_section_is_refused(section: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_launch_file(f"tp_config: {section}\ndistributed_type: TP\n", "f.yaml")
    assert str(error.value) == said


def test_empty_keys_leave_no_note() -> None:
    text = (
        "downcast_bf16: 'no'\ntpu_env: []\ntpu_use_cluster: false\nfsdp_config: {}\nmegatron_lm_config: {}\n"
        "main_training_function: main\ncommand_file: null\ntpu_name: null\nmain_process_ip: ''\nnum_processes: 2\n"
    )
    given = parse_launch_file(text, "f.yaml")
    assert (given.values, given.notes) == ({"num_processes": 2}, ())


def test_blanks_of_a_file_are_filled_by_flags() -> None:
    text = "num_machines: 2\nmachine_rank: 'MACHINE_RANK'\nmain_process_ip: HOST\n"
    with pytest.raises(ConfigError, match="machine_rank: expected a whole number, got 'MACHINE_RANK'"):
        parse_launch_file(text, "f.yaml")
    given = parse_launch_file(text, "f.yaml", over=ExplicitSettings({"machine_rank": 1}))
    assert given.values == {"num_machines": 2, "main_process_ip": "HOST"}


@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"zero_stage": 2, "offload_param_device": "cpu"}, ["offload_param_device"]),
        (
            {"offload_param_device": "nvme", "offload_param_nvme_path": "/d"},
            ["offload_param_device", "offload_param_nvme_path"],
        ),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, ["offload_optimizer_device"]),
        ({"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": "cpu"}, []),
        ({"offload_optimizer_device": "cpu"}, []),
        ({"zero_stage": 2, "offload_param_device": "CPU"}, ["offload_param_device"]),
        ({"zero_stage": 2, "offload_param_device": "none"}, []),
        ({"zero_stage": 2, "offload_param_device": "gpu"}, []),  # an invalid value, reported elsewhere
        ({"offload_param_device": "cpu", "deepspeed_config_file": "ds.json"}, []),  # the JSON has the stage
    ],
)
def test_offload_of_unsharded_tensors_has_no_effect(values: dict[str, Any], idle: list[str]) -> None:
    given = ExplicitSettings(values, dict.fromkeys(values, "f.yaml:3:5")).effective()
    assert given.values == {name: value for name, value in values.items() if name not in idle}
    assert [note.split()[1] for note in given.notes] == idle
    assert all(note.startswith("f.yaml:3:5: ") and "does nothing" in note for note in given.notes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"offload_param_device": "cpu"},
            "parameters are sharded at stage 3 only, and the stage is 2, the default",
        ),
        (
            {"zero_stage": 0, "offload_optimizer_device": "cpu"},
            "optimizer states are sharded from stage 1 on, and the stage is 0",
        ),
    ],
)
def test_a_note_says_why_offload_does_nothing(values: dict[str, Any], said: str) -> None:
    (note,) = ExplicitSettings(values, dict.fromkeys(values, "f.yaml:3:5")).effective().notes
    assert note.endswith(f"does nothing: {said}")


def test_rdzv_conf_may_have_the_endpoint() -> None:
    conf = {"rdzv_backend": "c10d", "rdzv_endpoint": "node1:29400", "join_timeout": 60}
    given, _ = resolve(ExplicitSettings.of({"rdzv_conf": conf}, "--rdzv_conf"))
    assert given.values == {
        "rdzv_backend": "c10d",
        "main_process_ip": "node1",
        "main_process_port": 29400,
        "rdzv_conf": {"join_timeout": 60},
    }
    assert given.where("main_process_port") == "--rdzv_conf"
    file = ExplicitSettings(
        {"rdzv_conf": {**conf, "is_host": "1"}, "main_process_ip": "node2"},
        {"rdzv_conf": "f.yaml:2:1", "main_process_ip": "f.yaml:1:1"},
    )
    given, _ = resolve(file=lambda _: file)
    assert given.values["main_process_ip"] == "node2"
    assert (
        given.notes[1]
        == "f.yaml:2:1: main_process_ip node1: does nothing, because f.yaml:1:1: main_process_ip is node2"
    )
    assert given.notes[-1] == "f.yaml:2:1: is_host: does nothing: machine 0 hosts the rendezvous"


def test_flags_that_change_nothing_are_noted_and_others_taken() -> None:
    typed: dict[str, Any] = dict.fromkeys(("quiet", "downcast_bf16", "use_fsdp"), True)
    typed |= {
        "use_parallelism_config": True,
        "use_tp": True,
        "parallelism_config_cp_size": "1",
    }
    typed |= {"pass_local_rank": None, "master_port": "5", "log_level": "info", "fsdp_version": "2", "num_gpus": "-1"}
    flags = TypedSettings.of(typed)
    assert flags.settings.values == {"main_process_port": 5}
    assert flags.settings.sources == {"main_process_port": "--master_port"}
    assert (flags.fsdp, flags.is_fsdp, flags.num_gpus) == ({"fsdp_version": "2"}, True, None)
    assert [note.partition(":")[0] for note in flags.settings.notes] == [
        "--quiet",
        "--downcast_bf16",
        "--use_parallelism_config",
        "--use_tp",
        "--log_level",
    ]


@pytest.mark.parametrize(
    ("words", "fsdp"),
    [
        ("full shard", {"fsdp_sharding_strategy": "FULL_SHARD"}),
        ("full_shard auto_wrap", {"fsdp_sharding_strategy": "FULL_SHARD"}),
        ("shard grad op offload", {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}),
        ("hybrid_shard_zero2, auto wrap", {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}),
        ("", {}),
    ],
)
def test_the_older_fsdp_flag_is_translated(words: str, fsdp: dict[str, Any]) -> None:
    flags = TypedSettings.of({"fsdp": words, "pass_local_rank": None})
    assert (flags.fsdp, flags.is_fsdp) == (fsdp, True)
    assert translate_fsdp({"fsdp_sharding_strategy": "full shard"}).values["zero_stage"] == 3


def test_an_unknown_word_of_the_older_fsdp_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--fsdp: expected one of full_shard, .* got 'full shart'"):
        TypedSettings.of({"fsdp": "full shart", "pass_local_rank": None})
