"""The table of supported keys: it is complete, has no unused lines, and the config obeys it."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest

from tests.unit.house.house_rules import sources
from zeroaccel.config import load_config, support
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, field_paths, nested_section
from zeroaccel.config.support import KEYS, Kind, SupportStatus
from zeroaccel.errors import ConfigError

FIELDS = {".".join(path) for path in field_paths(Config)}
REFUSED = [name for name, standing in KEYS.items() if standing.kind is Kind.REFUSED]
IGNORED = [name for name, standing in KEYS.items() if standing.kind is Kind.IGNORED]
_READ_FROM_THE_TREE = {
    *("sequence_parallel_size", "tp_size", "expert_parallel"),
    *("tensor_parallel", "autoep_size", "autotp_size"),
}
"""Keys of meshes, which `with_config_axes` reads."""
ON_VALUES: dict[str, Any] = {"device": "cpu", "autotp_size": 2}


def _wrap(name: str, value: object) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _section_of(name: str) -> type[ConfigSection]:
    section: type[ConfigSection] = Config
    for part in name.split(".")[:-1]:
        nested = nested_section(section.model_fields[part])
        assert nested is not None
        section = nested
    return section


def _switched(name: str, *, on: bool) -> dict[str, Any]:
    """Returns a config in which one refused key is on, or present and off."""
    standing, leaf = KEYS[name], name.split(".")[-1]
    field = _section_of(name).model_fields[leaf]
    if name == "data_efficiency":  # it is off unless one of its parts is on
        return _wrap(name, {"enabled": on, "data_routing": {"enabled": True}})
    if standing.switch:
        off = {"device": "none", "autotp_size": 0}.get(standing.switch, False)
        return _wrap(f"{name}.{standing.switch}", ON_VALUES.get(standing.switch, True) if on else off)
    if name == "pipeline":
        return _wrap(name, {"stages": 2} if on else {})
    if nested_section(field) is not None:
        return _wrap(name, {} if on else None)
    default = field.get_default()
    if default is None:
        return _wrap(name, {"enabled": on})
    return _wrap(name, (not default if isinstance(default, bool) else default + 3) if on else default)


def _standing(name: str) -> SupportStatus | None:
    """Returns the status that applies to a key: its own, or that of an enclosing section that does not work."""
    if name in KEYS:
        return KEYS[name]
    above = name
    while "." in above:
        above = above.rpartition(".")[0]
        if above in KEYS:
            return KEYS[above] if KEYS[above].kind is not Kind.WORKS else None
    return None


def test_every_field_of_the_schema_is_in_the_table() -> None:
    assert [name for name in sorted(FIELDS) if _standing(name) is None] == []


def test_every_line_of_the_table_is_a_field() -> None:
    assert set(support._TABLE) - FIELDS == set()
    assert set(support._TABLE) <= set(KEYS)


def test_every_key_that_works_is_read_somewhere() -> None:
    """The code reads every key that the table lists as working. Keys with the same last name count as one."""
    nodes = [node for source in sources("zeroaccel", "cli").values() for node in source.nodes]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    working = {name.rpartition(".")[2] for name, status in KEYS.items() if status.kind is Kind.WORKS}
    assert working - read == _READ_FROM_THE_TREE


def test_every_line_that_does_not_work_has_a_reason() -> None:
    for name, standing in KEYS.items():
        assert bool(standing.reason) == (standing.kind is not Kind.WORKS), name
        assert not standing.switch or standing.switch in {path.rpartition(".")[2] for path in FIELDS}, name


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_key_is_refused_by_name_when_it_is_on(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_switched(name, on=True))
    standing = KEYS[name]
    path = f"{name}.{standing.switch}" if standing.switch else name
    assert f"{path}: {standing.reason}; " in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_key_is_accepted_when_it_is_off(name: str) -> None:
    load_config(_switched(name, on=False))


@pytest.mark.parametrize("name", [name for name in REFUSED if KEYS[name].switch])
def test_other_keys_of_a_section_that_is_off_do_not_matter(name: str) -> None:
    section = nested_section(_section_of(name).model_fields[name.split(".")[-1]])
    switch = KEYS[name].switch
    assert section is not None
    counts = {key: 3 for key, field in section.model_fields.items() if type(field.default) is int and key != switch}
    off: object = {"device": "none", "autotp_size": 0}.get(switch, False)
    load_config(_wrap(name, {switch: off, **counts, **dict.fromkeys(section.unread.split(), 3)}))


@pytest.mark.parametrize("name", IGNORED)
def test_a_key_without_effect_leaves_one_note(name: str) -> None:
    standing, field = KEYS[name], _section_of(name).model_fields[name.split(".")[-1]]
    default = field.get_default()
    value: object = {"vocabulary_size": 8}.get(name, default)
    if isinstance(default, bool):
        value = not default
    elif nested_section(field) is not None:
        value = {standing.switch: True} if standing.switch else {}
    elif standing.warns:
        value = {"enabled": True} if default is None else default + 1
    if name == "zero_optimization.cpu_offload_use_pin_memory":
        value = True
    where = f"{name}.{standing.switch}" if standing.switch else name
    tree = _wrap(name, value)
    if name.startswith("optimizer"):
        tree["optimizer"]["type"] = "Adam"
    notes = load_config(tree).notes
    assert f"{where}: {standing.reason}" in notes
    assert sum(note.startswith(f"{where}: ") for note in notes) == 1


@pytest.mark.parametrize("name", [name for name in IGNORED if KEYS[name].warns])
def test_a_refused_key_that_is_off_leaves_no_note(name: str) -> None:
    standing, field = KEYS[name], _section_of(name).model_fields[name.split(".")[-1]]
    off: object = {standing.switch: False} if standing.switch else field.get_default()
    assert load_config(_wrap(name, off if off is not None else {"enabled": False})).notes == ()


def test_keys_that_work_leave_no_note() -> None:
    assert load_config({"zero_optimization": {"stage": 2, "overlap_comm": True}, "gradient_clipping": 1.0}).notes == ()


def test_a_note_uses_the_spelling_that_was_written() -> None:
    config = load_config({"zero_optimization": {"stage3_allgather_sequential": True}})
    assert config.notes == (
        "zero_optimization.stage3_allgather_sequential: each unit is gathered directly into place, without copies",
    )


@pytest.mark.parametrize("tree", [{"amp": True}, {"weight_quantization": {}}, {"zero_optimization": {"zenflow": {}}}])
def test_sections_that_are_on_without_saying_so_are_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(tree)


def test_making_a_feature_available_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "weight_quantization"
    tree = {"weight_quantization": {"enabled": True}}
    with pytest.raises(ConfigError):
        load_config(tree)
    works = dataclasses.replace(KEYS[name], kind=Kind.WORKS, reason="", switch="")
    monkeypatch.setattr(support, "KEYS", {**KEYS, name: works})
    assert load_config(tree).weight_quantization.enabled


def test_a_config_as_training_libraries_hand_it_over() -> None:
    """Accelerate's dict has both precisions, infinity, empty offload sections, and keys that it filled in."""
    config = load_config("""
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "nvme_path": null},
        "offload_param": {"device": "none", "nvme_path": null},
        "stage3_gather_16bit_weights_on_model_save": false, "overlap_comm": true, "contiguous_gradients": true,
        "reduce_bucket_size": 4096.0, "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640, "sub_group_size": 1000000000.0}, "gradient_clipping": 1.0,
        "steps_per_print": Infinity, "fp16": {"enabled": false, "auto_cast": true, "loss_scale": 0,
        "loss_scale_window": 1000}, "bf16": {"enabled": true}, "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
        "wall_clock_breakdown": false, "tensor_parallel": {"autotp_size": 0},
        "zero_optimization.reduce_bucket_size": 4096,
        "zero_optimization.stage3_param_persistence_threshold": 640,
        "zero_optimization.stage3_prefetch_bucket_size": 3686.4}
    """)
    assert config.precision == "bf16"
    assert config.steps_per_print is None
    assert config.zero_optimization.reduce_bucket_size == 4096
    assert config.zero_optimization.prefetch_bucket_size == 3686
    assert config.unresolved == ()
