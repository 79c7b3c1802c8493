"""Where an installation keeps what is not code: beside the plugins folder, in include/."""

from __future__ import annotations

import os
from pathlib import Path

_INCLUDE = Path(__file__).resolve().parents[3] / "include"

#: YAML files, a DAG each; another folder can be named by NIGHTSHIFT_RECIPES.
RECIPES = Path(os.environ.get("NIGHTSHIFT_RECIPES", _INCLUDE / "recipes"))
#: Lock files for the VM.
VM_FILES = _INCLUDE / "vm"
#: Templates of the model card, and the texts of licences.
CARDS = _INCLUDE / "cards"
