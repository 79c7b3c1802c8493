"""Runs on the TPU VM: make a model that to_huggingface wrote complete, and check that it can be loaded.

Arguments: folder of the source model, folder of the export, data type of the weights.

MaxText 0.2.3 writes the tokenizer of the *base* model (no chat template), no generation_config.json, and a
config.json without `architectures` and with the base model's end-of-text token. All of these belong to the model
that was trained, so they are taken from it. Weights come from MaxText alone; compare_weights.py looks at them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from model_folder import CONFIG, UNCHANGED  # type: ignore[import-not-found]  # beside this file on the VM
from transformers import AutoConfig, AutoTokenizer  # type: ignore[import-not-found]  # MaxText's environment

#: What a checkpoint's shapes follow from. MaxText's own config must agree with the source's in these.
SHAPES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def fail(message: str) -> NoReturn:
    """End with a message that the Airflow side recognises."""
    sys.exit(f"nightshift: error[bad_export]: {message}")


def overlay(source: Path, export: Path, dtype: str) -> None:
    """Replace tokenizer, chat template, generation settings and configuration by the source model's."""
    for path in [path for path in export.iterdir() if UNCHANGED.fullmatch(path.name)]:
        path.unlink()
    for path in [path for path in source.iterdir() if UNCHANGED.fullmatch(path.name)]:
        shutil.copyfile(path, export / path.name)
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    written = json.loads((export / CONFIG).read_text(encoding="utf-8"))
    for key in SHAPES:
        if key in config and key in written and config[key] != written[key]:
            fail(f"{CONFIG}: {key} is {written[key]} in the export and {config[key]} in the source model")
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (export / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check(source: Path, export: Path) -> None:
    """Check that configuration and tokenizer load, and belong to each other."""
    config = AutoConfig.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        fail(f"the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary}")
    if tokenizer.chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False)
    elif AutoTokenizer.from_pretrained(source).chat_template:
        fail("the tokenizer has no chat template")
    sizes = [path.stat().st_size for path in export.iterdir() if path.is_file()]
    sys.stdout.write(f"nightshift: {export} holds {len(sizes)} files, {sum(sizes)} bytes in all, and loads\n")


def main() -> None:
    """Complete the export, then check it."""
    source, export, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    overlay(source, export, dtype)
    check(source, export)


if __name__ == "__main__":
    main()
