"""Stand-in for to_huggingface: a trained checkpoint's weights as a model folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from localcloud_stand_in import checkpoints, control, settings
from localcloud_stand_in.logging import log

_MODEL = "LOCALCLOUD_TOY_MODEL"


def main() -> None:
    """Convert."""
    given = settings.parse(sys.argv[1:])
    log("utils.py:90", "Loading Orbax checkpoint(s)")
    weights, _ = checkpoints.read_item(Path(given["load_parameters_path"]))
    control.fail_if_ordered(control.reach("convert_to_huggingface"), "convert_to_huggingface")
    target = Path(given["base_output_directory"])
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.safetensors").write_bytes(weights)
    config = json.loads((Path(os.environ[_MODEL]) / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]  # as MaxText 0.2.3 does
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    log("to_huggingface.py:310", "MaxText model successfully saved in HuggingFace format")


if __name__ == "__main__":
    main()
