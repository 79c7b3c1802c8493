"""Which settings and models the pinned MaxText knows, read from its own wheel without importing it.

MaxText itself needs jax; its YAML and Python files are read as text. Sources (MaxText 0.2.3):
`configs/base.yml`, `configs/post_train/rl.yml`, `configs/models/*.yml`, `configs/types.py`, `utils/globals.py`,
`checkpoint_conversion/utils/hf_model_configs.py`.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Scope = Literal["training", "conversion"]

#: MaxText settings that have a field of their own in the recipe, with that field's path.
RECIPE_FIELDS: dict[str, str] = {
    "model_name": "model.name",
    "tokenizer_path": "model.repo and model.revision",
    "dataset_name": "dataset.repo",
    "eval_dataset_name": "dataset.repo",
    "hf_path": "dataset.repo",
    "hf_name": "dataset.subset",
    "train_split": "dataset.train_split",
    "eval_split": "dataset.eval_split",
    "hf_eval_split": "dataset.eval_split",
    "hf_train_files": "dataset.repo and dataset.revision",
    "hf_eval_files": "dataset.repo and dataset.revision",
    "num_batches": "training.num_batches",
    "num_test_batches": "training.num_test_batches",
    "batch_size": "training.batch_size",
    "eval_batch_size": "training.eval_batch_size",
    "rl.num_generations": "training.num_generations",
    "learning_rate": "training.learning_rate",
    "rollout_data_parallelism": "training.rollout_data_parallelism",
    "rollout_tensor_parallelism": "training.rollout_tensor_parallelism",
    "chips_per_vm": "training.chips_per_vm",
    "checkpoint_period": "training.checkpoint_period",
    "scan_layers": "conversion.scan_layers",
    "use_multimodal": "conversion.use_multimodal",
}

#: MaxText settings that Nightshift sets itself, with the reason why a recipe may not.
RESERVED: dict[str, str] = {
    "base_config": "the configuration file follows from the step",
    "run_name": "the run's name is made from the recipe and the date",
    "base_output_directory": "the folders on the VM are given by Nightshift",
    "load_parameters_path": "the folders on the VM are given by Nightshift",
    "load_full_state_path": "the folders on the VM are given by Nightshift",
    "hf_access_token": "the token comes from the Hugging Face connection and never stands in a recipe",
    "use_pathways": "a single TPU VM runs without Pathways",
    "skip_jax_distributed_system": "a single TPU VM needs no coordinator",
    "enable_checkpointing": "without its final checkpoint a training has no result",
}
_RESERVED_IN_CONVERSION = {
    "hardware": "conversions run on the VM's CPU",
    "weight_dtype": "it is conversion.weight_dtype",
    "checkpoint_storage_use_zarr3": "train_rl reads the format that the tutorial's value gives",
    "checkpoint_storage_use_ocdbt": "train_rl reads the format that the tutorial's value gives",
}

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?")
_KIND_WORDS = {
    "int": "whole number",
    "NonNegativeInt": "whole number",
    "PositiveInt": "whole number",
    "float": "number",
    "NonNegativeFloat": "number",
    "bool": "true or false",
    "str": "text",
    "PathStr": "text",
}


@dataclass(frozen=True)
class Setting:
    """A MaxText setting as its own files describe it.

    :param kinds: which kinds of value it takes ("whole number", "number", "true or false", "text");
        empty when MaxText's annotation does not say.
    """

    key: str
    default: object
    kinds: frozenset[str]
    choices: tuple[str, ...]
    nullable: bool


@lru_cache(maxsize=1)
def package_folder() -> Path:
    """Return the folder of the installed MaxText. Raises ModuleNotFoundError when it is not installed."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        msg = "MaxText is not installed: install requirements.txt (its wheel is enough, without dependencies)"
        raise ModuleNotFoundError(msg)
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=1)
def installed_version() -> str:
    """Return the version of the MaxText whose files are read."""
    return importlib.metadata.version("maxtext")


@lru_cache(maxsize=2)
def known_settings(scope: Scope) -> Mapping[str, Setting]:
    """Return every setting of a step by its dotted key: base.yml, and for training rl.yml on top of it.

    Only what these files name counts. `MaxTextConfig` has more fields, but those are derived from others, or
    silently without effect (`grpo_beta` at the top level, where only `rl.grpo_beta` is read).
    """
    merged = dict(_yaml("base.yml"))
    if scope == "training":
        merged.update(_yaml("post_train/rl.yml"))
    classes = _class_bodies()
    annotations = _annotations("MaxTextConfig", classes)
    settings: dict[str, Setting] = {}
    for key, value in merged.items():
        annotation = annotations.get(key, "Any")
        if isinstance(value, dict) and annotation in classes:
            inner = _annotations(annotation, classes)
            for name, default in value.items():
                dotted = f"{key}.{name}"
                settings[dotted] = _setting(dotted, default, inner.get(name, "Any"))
        else:
            settings[key] = _setting(key, value, annotation)
    return settings


@lru_cache(maxsize=64)
def model_architecture(model_name: str) -> Mapping[str, object]:
    """Return `configs/models/<name>.yml`, which MaxText does not let a command line contradict."""
    path = package_folder() / "configs" / "models" / f"{model_name.replace('-Instruct', '')}.yml"
    return _read_yaml(path) if path.is_file() else {}


@lru_cache(maxsize=1)
def supported_models() -> Mapping[str, str]:
    """Return the models that can be converted in, trained and converted out, with their Hugging Face repos.

    to_maxtext looks `model_name` up in HF_IDS and, without "-Instruct", in HF_MODEL_CONFIGS; every step's
    configuration accepts only the names of `types.ModelName`.
    """
    accepted = set(_literal("configs/types.py", "ModelName"))
    configured = set(_dict_keys("checkpoint_conversion/utils/hf_model_configs.py", "HF_MODEL_CONFIGS"))
    repos = _string_dict("utils/globals.py", "HF_IDS")
    return {
        name: repo
        for name, repo in repos.items()
        if name in accepted and name.replace("-Instruct", "") in configured
    }


def extra_problem(key: str, value: object, scope: Scope, model_name: str | None = None) -> str | None:
    """Return what is wrong with an extra MaxText setting and what to write instead, or None."""
    if key in RECIPE_FIELDS:
        return f"has a field of its own: write {RECIPE_FIELDS[key]}"
    reserved = RESERVED | (_RESERVED_IN_CONVERSION if scope == "conversion" else {})
    if key in reserved:
        return f"is set by Nightshift ({reserved[key]}): leave it out"
    settings = known_settings(scope)
    if key not in settings:
        return _unknown(key, settings)
    if model_name is not None:
        architecture = model_architecture(model_name)
        if key in architecture and architecture[key] != value:
            return (
                f"is part of {model_name}'s architecture ({architecture[key]!r}) and MaxText refuses another "
                "value: leave it out"
            )
    return _value_problem(settings[key], value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean x?' for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown(key: str, settings: Mapping[str, Setting]) -> str:
    nested = [known for known in settings if known.rpartition(".")[2] == key]
    group = sorted(known for known in settings if known.startswith(f"{key}."))
    if group:
        hint = f" by itself: write its parts with a dot ({', '.join(group)})"
    else:
        hint = f"; did you mean {nested[0]}?" if nested else did_you_mean(key, settings)
    return f"is no setting of MaxText {installed_version()}{hint}"


def _value_problem(setting: Setting, value: object) -> str | None:
    if value is None:
        return None if setting.nullable else f"cannot be null: {_expected(setting)}"
    if "${" in json.dumps(value, default=str):
        # OmegaConf would resolve it on the VM, where `${oc.env:…}` takes the token to MaxText's log.
        return "may not contain '${': write the value itself"
    if setting.choices:
        if value in setting.choices:
            return None
        return f"must be one of {', '.join(setting.choices)}"
    if not setting.kinds or isinstance(value, list | dict):
        return None if not setting.kinds else f"cannot be a list or a mapping: {_expected(setting)}"
    return None if _fits(value, setting.kinds) else _expected(setting)


def _fits(value: object, kinds: frozenset[str]) -> bool:
    match value:
        case bool():
            return "true or false" in kinds
        case int():
            return bool(kinds & {"whole number", "number"})
        case float():
            return "number" in kinds
        case str():
            # YAML 1.1 reads 3e-6 as text; MaxText's own reader takes it as the number that was meant.
            return "text" in kinds or ("number" in kinds and _NUMBER.fullmatch(value) is not None)
        case _:
            return False


def _expected(setting: Setting) -> str:
    return f"must be {' or '.join(sorted(setting.kinds))} (MaxText's default: {setting.default!r})"


def _setting(key: str, default: object, annotation: str) -> Setting:
    choices: tuple[str, ...] = ()
    literal = re.search(r"Literal\[(.*)\]", annotation)
    if literal and not re.search(r"\blist\b|\bdict\b", annotation):
        choices = tuple(part.strip().strip("'\"") for part in literal.group(1).split(","))
    words = set(re.findall(r"\w+", annotation))
    kinds: set[str] = set()
    if not words & {"Any", "list", "dict", "Literal"}:
        kinds = {kind for word, kind in _KIND_WORDS.items() if word in words}
        if not kinds and isinstance(default, str):
            kinds = {"text"}  # an enumeration: MaxText checks its members itself
    return Setting(
        key, default, frozenset(kinds), choices, default is None or bool(words & {"None", "Optional", "Any"})
    )


def _yaml(name: str) -> dict[str, Any]:
    return _read_yaml(package_folder() / "configs" / name)


def _read_yaml(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(path.read_bytes(), yaml.CSafeLoader) or {}
    return loaded


@lru_cache(maxsize=4)
def _tree(name: str) -> ast.Module:
    return ast.parse((package_folder() / name).read_text(encoding="utf-8"))


def _class_bodies() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree("configs/types.py").body if isinstance(node, ast.ClassDef)}


def _annotations(name: str, classes: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    """Return the annotated fields of a class and of its bases, as written."""
    found: dict[str, str] = {}
    if name in classes:
        for base in classes[name].bases:
            if isinstance(base, ast.Name):
                found |= _annotations(base.id, classes)
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation)
    return found


def _assigned(name: str, variable: str) -> ast.expr:
    for node in _tree(name).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == variable for target in node.targets
        ):
            return node.value
    msg = f"MaxText {installed_version()} has no {variable} in {name}: adapt nightshift.maxtext.settings"
    raise LookupError(msg)


def _literal(name: str, variable: str) -> list[str]:
    value = _assigned(name, variable)
    return [
        node.value
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _dict_keys(name: str, variable: str) -> list[str]:
    value = _assigned(name, variable)
    keys = value.keys if isinstance(value, ast.Dict) else []
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _string_dict(name: str, variable: str) -> dict[str, str]:
    value = _assigned(name, variable)
    pairs = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
    return {
        key.value: item.value
        for key, item in pairs
        if isinstance(key, ast.Constant)
        and isinstance(item, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(item.value, str)
    }
