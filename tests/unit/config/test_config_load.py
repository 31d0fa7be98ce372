"""The sources of a config, the parsing of each, and the messages for unreadable ones."""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.refusals import message
from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError

TREE = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _message(source: object) -> str:
    return message(ConfigError, load_config, source)


def test_all_sources_give_the_same_config(here: Path) -> None:
    text = json.dumps(TREE)
    (here / "ds.json").write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    sources: list[object] = ["ds.json", here / "ds.json", text, f"\n{text}\n", encoded, encoded.rstrip("="), TREE]
    configs = [load_config(source) for source in sources]  # type: ignore[arg-type]
    assert all(config == configs[0] for config in configs)
    assert configs[0].zero_optimization.max_live_parameters == 5


def test_a_config_is_handed_back() -> None:
    config = load_config(TREE)
    assert load_config(config) is config


def test_a_file_wins_over_base64_of_the_same_name(here: Path) -> None:
    name = base64.urlsafe_b64encode(b'{"train_batch_size": 1}').decode().rstrip("=")
    (here / name).write_text('{"train_batch_size": 2}')
    assert load_config(name).train_batch_size == 2


def test_the_dict_given_is_neither_changed_nor_kept() -> None:
    given = {
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": True,
        "optimizer": {"type": "A", "params": {"x": [1]}},
    }
    before = json.dumps(given)
    config = load_config(given)
    assert json.dumps(given) == before
    assert config.raw == given
    given["zero_optimization"] = False
    given["optimizer"]["params"]["x"].append(2)  # type: ignore[index]
    assert json.dumps(config.raw) == before
    assert config.optimizer is not None
    assert config.optimizer.params == {"x": [1]}


def test_objects_in_a_dict_are_shared_not_copied() -> None:
    mpu = object()
    config = load_config({"tensor_parallel": {"tensor_parallel": {"mpu": mpu}}})
    assert config.tensor_parallel.tensor_parallel.mpu is mpu
    assert config.raw["tensor_parallel"]["tensor_parallel"]["mpu"] is mpu


def test_json5_is_read_with_its_places(here: Path) -> None:
    (here / "ds.json").write_text(
        "// a comment\n"
        "{\n"
        '  /* another: {"x": 1} */ train_batch_size: 8,  // a bare key\n'
        "  'zero_optimization': {\"stage\": 2, },\n"
        "}\n"
    )
    config = load_config("ds.json")
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)
    assert config.sources == {
        "train_batch_size": "ds.json:3:27",
        "zero_optimization": "ds.json:4:3",
        "zero_optimization.stage": "ds.json:4:25",
    }


def test_hjson_is_read_with_its_places_and_a_note(here: Path) -> None:
    (here / "ds.json").write_text(
        "{\n"
        "  # commas are missing\n"
        '  "train_batch_size": 8\n'
        "  optimizer:\n"
        "  {\n"
        "    type: AdamW\n"
        "    params: {lr: 1e-3}\n"
        "  }  # and quotes\n"
        '  data_types: {"keep_in_fp32_modules": ["a#b"\n'
        "    c: d\n  ]\n  },\n"
        "}"
    )
    config = load_config("ds.json")
    assert config.optimizer is not None
    assert (config.train_batch_size, config.optimizer.type, config.optimizer.params) == (8, "AdamW", {"lr": 1e-3})
    assert config.data_types.keep_in_fp32_modules == ("a#b", "c: d")
    assert config.sources["optimizer.params.lr"] == "ds.json:7:14"
    assert config.notes[0].startswith("ds.json:2:3: a comment starts with #: Hjson, which zeroaccel and DeepSpeed read")
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 1 # 2\n\n   stagee: 2\n}}')
    with pytest.raises(ConfigError, match=r"^ds.json:3:4: zero_optimization.stagee: unknown key"):
        load_config("ds.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "train_batch_size": 8\n  "steps_per_print": 1\n}', "2:24: a comma is missing"),
        ('{\n  "fp16": {"enabled": true}\n\n  "steps_per_print": 1\n}', "2:28: a comma is missing"),
        ('{\n  "optimizer": {"type":\n    Adam\n}}', "3:5: a text has no quotes"),
        ('{\n  "steps_per_print": 1, # often\n}', "2:25: a comment starts with #"),
    ],
)
def test_hjson_warns_with_line_and_column(here: Path, text: str, said: str) -> None:
    (here / "ds.json").write_text(text)
    [note] = load_config("ds.json").notes
    assert note.partition(": Hjson, which")[0] == f"ds.json:{said}"


def test_a_byte_order_mark_is_no_error(here: Path) -> None:
    (here / "ds.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TREE).encode())
    assert load_config("ds.json").train_batch_size == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{\n  "a": 1 "b": 2\n}',
            'ds.json:2:10: not valid JSON: expecting \',\' delimiter\n      "a": 1 "b": 2\n             ^',
        ),
        (
            '{\n  // note\n\t"a": ]\n}',
            "ds.json:3:7: not valid JSON: unexpected ']'\n     \"a\": ]\n          ^",
        ),
        ('{"a": 1', "ds.json:1:8: not valid JSON: expecting ',' delimiter\n    {\"a\": 1\n           ^"),
        (
            "{/* */ a: 1",
            "ds.json:1:12: not valid JSON: unexpected end of text\n    {/* */ a: 1\n               ^",
        ),
        ("  \n", "ds.json: not valid JSON: it is empty"),
        ("[1]", "ds.json: expected an object at the top level, got [1]"),
    ],
)
def test_malformed_text_is_shown_with_a_caret(here: Path, text: str, said: str) -> None:
    (here / "ds.json").write_text(text)
    assert _message("ds.json") == said


def test_a_long_line_is_cut_around_the_caret() -> None:
    text = '{"a": [' + "1," * 500 + "x" + ",1" * 500 + "]}"
    said, excerpt, caret = _message(text).split("\n")
    assert said == "<json>:1:1008: not valid JSON: expecting value"
    assert len(excerpt) <= 104
    assert excerpt[caret.index("^")] == "x"


def test_a_missing_file_is_missing_not_base64(here: Path) -> None:
    for name in ("ds_config.json", "dsconfig", "abcd", "configs/ds.json"):
        assert f"config file {name!r} does not exist" in _message(name)


def test_a_missing_file_names_the_folder_and_near_names(here: Path) -> None:
    (here / "ds_config.json").write_text("{}")
    cwd = f"(working directory {os.getcwd()!r})"
    assert _message("ds_confg.json") == (
        f"config file 'ds_confg.json' does not exist {cwd}; did you mean 'ds_config.json'?"
    )
    assert _message("zero3") == f"config file 'zero3' does not exist {cwd}; JSON files there: 'ds_config.json'"
    assert _message("no/x.json") == f"config file 'no/x.json' does not exist {cwd}; there is no folder 'no'"
    absolute = str(here / "ds_confg.json")
    assert _message(here / "ds_confg.json").endswith(f"did you mean {str(here / 'ds_config.json')!r}?")
    assert absolute in _message(absolute)


def test_a_folder_is_no_file(here: Path) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "z3.json").write_text("{}")
    assert _message("configs") == "config file 'configs' is a folder; JSON files there: 'configs/z3.json'"


def test_base64_that_is_no_json_object_is_a_missing_file(here: Path) -> None:
    encoded = base64.urlsafe_b64encode(b"hello world").decode()
    assert "does not exist" in _message(encoded)
    broken = base64.urlsafe_b64encode(b'{"a": }').decode()
    assert _message(broken).startswith("<base64>:1:7: not valid JSON")


def test_other_unreadable_sources(here: Path) -> None:
    (here / "ds.json").write_bytes(b'{"a": "\xff"}')
    assert _message("ds.json") == "config file 'ds.json': byte 7 is not UTF-8"
    assert _message("x" * 5000).count("x") < 300
    assert "embedded null" in _message("a\0b")
    forms = "a dict, the path of a JSON file, JSON text, or urlsafe base64 of JSON"
    assert _message(3) == f"config: expected {forms}, got 3"
    assert "does not exist" in _message("")


def test_duplicate_keys_are_listed_with_their_lines() -> None:
    text = '{\n"dump_state": true,\n"fp16": {"enabled": true},\n"dump_state": false,\n"fp16": {"enabled": false}\n}'
    assert _message(text).split("\n") == [
        "<json>: 2 settings are wrong",
        "  <json>:4:1: dump_state: given 2 times, on lines 2, 4; keep one",
        "  <json>:5:1: fp16: given 2 times, on lines 3, 5; keep one",
    ]


def test_equal_keys_in_different_objects_are_no_duplicates() -> None:
    text = '{"fp16": {"enabled": false}, "bf16": {"enabled": true}, "timers": {"throughput": {"enabled": true}}}'
    assert load_config(text).precision == "bf16"


def test_all_mistakes_of_a_file_are_reported_at_once_in_its_order(here: Path) -> None:
    (here / "ds.json").write_text(
        '{\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stge": 3, "offload_param": {"device": "gpu"}},\n'
        '  "fp16": {"enabled": true},\n  "dump_state": 1,\n  "dump_state": 0,\n  "amp": {"enabled": true}\n}'
    )
    assert _message("ds.json").split("\n") == [
        "ds.json: 5 settings are wrong",
        '  ds.json:3:25: zero_optimization.stge: unknown key; did you mean "stage"?',
        "  ds.json:3:54: zero_optimization.offload_param.device: expected 'none', 'cpu' or 'nvme', got 'gpu'",
        "  ds.json:4:12: fp16.enabled: fp16 and bf16 are both enabled; "
        "set one of fp16.enabled and bf16.enabled to false",
        "  ds.json:6:3: dump_state: given 2 times, on lines 5, 6; keep one",
        "  ds.json:7:3: amp: Apex is not supported; use bf16 or fp16",
    ]


def test_sources_of_a_merged_dict_are_reported() -> None:
    sources = {"train_batch_size": "--train-batch-size", "zero_optimization.stage": "launch.yaml:4"}
    config = load_config(
        {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "dump_state": True}, sources=sources
    )
    assert config.sources == {
        "train_batch_size": "--train-batch-size",
        "zero_optimization": "config",
        "zero_optimization.stage": "launch.yaml:4",
        "dump_state": "config",
    }
    with pytest.raises(ConfigError, match=r"^launch\.yaml:4: zero_optimization\.stage: expected 0, 1, 2 or 3, got 9$"):
        load_config({"zero_optimization": {"stage": 9}}, sources=sources)


def test_where_gives_others_the_address_of_a_key() -> None:
    config = load_config('{\n"optimizer": {"type": "Adam", "params": {"lr": 1}},\n"bfloat16": {"enabled": true}\n}')
    assert config.where("optimizer.params.lr") == "<json>:2:42: optimizer.params.lr"
    assert config.where("optimizer.params.eps") == "<json>:2:31: optimizer.params.eps"
    assert config.where("bf16.enabled") == "<json>:3:14: bfloat16.enabled"
    assert config.where("gradient_clipping") == "gradient_clipping"


def test_notes_are_logged_once_at_info_level() -> None:
    with log_lines(logging.WARNING) as warnings, log_lines(logging.INFO) as lines:
        for _ in range(2):
            load_config('{"zero_optimization": {"round_robin_gradients": true}}')
    assert lines == [
        "<json>:1:24: zero_optimization.round_robin_gradients: every rank owns an equal part of every unit"
    ]
    assert warnings == []
