"""Runs on the TPU VM: make a model that to_huggingface wrote complete, and check that it can be loaded.

Arguments: folder of the source model, folder of the export, data type of the weights.

MaxText 0.2.3 writes the tokenizer of the *base* model (no chat template), no generation_config.json, and a
config.json without `architectures` and with the base model's end-of-text token. All of these belong to the model
that was trained, so they are taken from it. Weights come from MaxText alone.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from safetensors import safe_open  # type: ignore[import-not-found]  # MaxText's environment, on the VM
from transformers import AutoConfig, AutoTokenizer  # type: ignore[import-not-found]

TOKENIZER = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|.*\.tiktoken"
    r"|chat_template.*|generation_config\.json)"
)
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


def fail(message: str) -> None:
    """End with a message that the Airflow side recognises."""
    sys.exit(f"nightshift: error[bad_export]: {message}")


def overlay(source: Path, export: Path, dtype: str) -> None:
    """Replace tokenizer, chat template, generation settings and configuration by the source model's."""
    for path in [path for path in export.iterdir() if TOKENIZER.fullmatch(path.name)]:
        path.unlink()
    for path in [path for path in source.iterdir() if TOKENIZER.fullmatch(path.name)]:
        shutil.copyfile(path, export / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written = json.loads((export / "config.json").read_text(encoding="utf-8"))
    for key in SHAPES:
        if key in config and key in written and config[key] != written[key]:
            fail(f"config.json: {key} is {written[key]} in the export and {config[key]} in the source model")
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    (export / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tensors(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in the folder's safetensors files, which the index must agree with."""
    shapes: dict[str, list[int]] = {}
    owners: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                shapes[name] = list(file.get_slice(name).get_shape())
                owners[name] = path.name
    index = folder / "model.safetensors.index.json"
    if index.is_file() and json.loads(index.read_text(encoding="utf-8"))["weight_map"] != owners:
        fail("model.safetensors.index.json does not list what the safetensors files hold")
    return shapes


def check(source: Path, export: Path) -> None:
    """Check weights against the source model's, and that configuration and tokenizer load."""
    expected, found = tensors(source), tensors(export)
    config = AutoConfig.from_pretrained(export)
    # A text model taken from a multimodal one leaves tensors behind on purpose; a tied output layer is stored once.
    optional = set(expected) if hasattr(config, "vision_config") else set()
    optional |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(set(expected) - set(found) - optional)
    if missing:
        fail(f"{len(missing)} of {len(expected)} tensors are missing, e.g. {missing[0]}")
    wrong = sorted(name for name, shape in expected.items() if found.get(name, shape) != shape)
    if wrong:
        fail(f"{wrong[0]} has shape {found[wrong[0]]}, the source model's has {expected[wrong[0]]}")
    tokenizer = AutoTokenizer.from_pretrained(export)
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        fail(f"the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary}")
    if tokenizer.chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False)
    elif AutoTokenizer.from_pretrained(source).chat_template:
        fail("the tokenizer has no chat template")
    size = sum(path.stat().st_size for path in export.iterdir() if path.is_file())
    sys.stdout.write(f"nightshift: {export} holds {len(found)} tensors, {size} bytes in all, and loads\n")


def main() -> None:
    """Complete the export, then check it."""
    source, export, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    overlay(source, export, dtype)
    check(source, export)


if __name__ == "__main__":
    main()
