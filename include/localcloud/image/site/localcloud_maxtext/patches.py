"""What is changed in MaxText 0.2.3's modules after they are loaded; see the package's docstring."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import TOY_MODEL

if TYPE_CHECKING:
    from types import ModuleType

_MODELS = ("llama3.1-8b", "llama3.1-8b-Instruct")
_MODEL_FILE = "llama3.1-8b.yml"  # MaxText drops "-Instruct" from the name when it looks for the sizes

#: MaxText's names for sizes → those of a Hugging Face config.json.
_SIZES = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "base_num_decoder_layers": "num_hidden_layers",
    "base_mlp_dim": "intermediate_size",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def _toy_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(os.environ[TOY_MODEL]) / "config.json").read_text("utf-8"))
    return config


def model_sizes(pyconfig: ModuleType) -> None:
    """Give the model's YAML file the toy's sizes as it is read."""
    omega_conf = pyconfig.omegaconf.OmegaConf
    load = omega_conf.load

    def load_with_toy_sizes(file: Any) -> Any:
        loaded = load(file)
        if Path(str(file)).name == _MODEL_FILE:
            config = _toy_config()
            loaded = omega_conf.merge(loaded, {size: config[name] for size, name in _SIZES.items()})
        return loaded

    omega_conf.load = staticmethod(load_with_toy_sizes)


def hf_configs(module: ModuleType) -> None:
    """Give the conversions the toy's Hugging Face configuration."""
    config = {k: v for k, v in _toy_config().items() if k not in {"architectures", "transformers_version"}}
    transformers = importlib.import_module("transformers")
    for model in _MODELS:
        module.HF_MODEL_CONFIGS[model] = transformers.LlamaConfig(**config)


def eager_loading(module: Any) -> None:
    """Lend `--lazy_load_tensors=False` a stand-in for torch where torch is not installed."""
    if importlib.util.find_spec("torch") is not None:
        return
    load = module.load_hf_dict_from_safetensors

    def load_without_torch(*args: Any, **kwargs: Any) -> Any:
        stand_in = importlib.import_module("localcloud_maxtext.torch_stand_in")
        # to_maxtext runs as __main__ and keeps torch, None when absent, as a global of its own
        sys.modules["__main__"].torch = stand_in  # type: ignore[attr-defined]
        sys.modules["torch"] = stand_in  # what safetensors' Rust side imports
        try:
            return load(*args, **kwargs)
        finally:
            del sys.modules["torch"]

    module.load_hf_dict_from_safetensors = load_without_torch


def exit_handler(module: ModuleType) -> None:
    """Leave the end of the grading pool to multiprocessing, which can do it.

    MaxText 0.2.3's own handler sends SIGTERM to an idle worker that holds the queue's read lock and then
    cannot start its helper thread, because Python 3.12 refuses new threads at shutdown; so multiprocessing's
    finalizer waits for that lock for ever.
    """
    if os.environ.get("LOCALCLOUD_MAXTEXT_EXIT_FIX", "1") != "0":
        atexit.unregister(module._shutdown_pool)
