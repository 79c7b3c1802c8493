"""MaxText's command line: `key=value` words, and no key that its own files do not name."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import yaml


class Refused(SystemExit):
    """MaxText refuses its settings: it says why and exits with 1."""


def parse(arguments: list[str], *, config: str = "base.yml", flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings of a command line over the defaults of MaxText's files; `rl.x=1` sets a part of `rl`.

    :param config: the file below MaxText's configs/ that the module starts from.
    :param flags: what the module takes as `--flag=value`, returned under its bare name.
    """
    settings = {**_file("base.yml"), **(_file(config) if config != "base.yml" else {})}
    settings["hf_access_token"] = os.environ.get("HF_TOKEN")
    for word in arguments:
        key, _, text = word.partition("=")
        if key.removeprefix("--") in flags and key.startswith("--"):
            settings[key.removeprefix("--")] = yaml.load(text, yaml.CSafeLoader)
            continue
        section, _, part = key.partition(".")
        known = section in settings and (not part or part in (settings[section] or {}))
        if not known or "=" not in word:
            raise Refused(f"ValueError: MAXTEXT CONFIG ERROR: {key!r} not in MaxTextConfig")
        value = yaml.load(text, yaml.CSafeLoader)
        if part:
            settings[section] = {**settings[section], part: value}
        else:
            settings[section] = value
    return settings


def _file(name: str) -> dict[str, Any]:
    # Beside the stand-in, whose modules hide it, the real wheel is installed for its settings files.
    path = importlib.metadata.distribution("maxtext").locate_file(f"maxtext/configs/{name}")
    loaded = yaml.load(open(path, encoding="utf-8").read(), yaml.CSafeLoader)  # noqa: SIM115  read at once
    return {key: value for key, value in loaded.items() if key != "base_config"}
