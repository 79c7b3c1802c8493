"""Stand-in for to_maxtext: the downloaded model's weights as a checkpoint at step 0."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from localcloud_stand_in import checkpoints, control, settings
from localcloud_stand_in.logging import log

CARRIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    """Convert."""
    given = settings.parse(sys.argv[1:], flags=("lazy_load_tensors", "hf_model_path"))
    source, target = Path(given["hf_model_path"]), Path(given["base_output_directory"])
    log("to_maxtext.py:702", "Starting weight transformation")
    control.fail_if_ordered(control.reach("convert_to_maxtext"), "convert_to_maxtext")
    if not target.exists():  # MaxText 0.2.3 saves nothing into an existing folder, and still reports success
        items = target / "0" / "items"
        checkpoints.write_item(items, (source / "model.safetensors").read_bytes(), {"steps": 0})
        for name in CARRIED:
            shutil.copyfile(source / name, items / name)
    log("to_maxtext.py:820", f"Conversion complete. Checkpoint saved to {target}")


if __name__ == "__main__":
    main()
