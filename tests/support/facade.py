"""Imported by the fork server of ranks that start with the facade installed and Hugging Face libraries imported."""

from __future__ import annotations

import importlib

from zeroaccel import compat

compat.install()
for _name in ("accelerate", "transformers.models.llama.modeling_llama", "transformers.integrations.deepspeed", "peft"):
    importlib.import_module(_name)
