"""What `uv pip install` and `uv pip freeze` say on a VM of the stand-in image."""

from __future__ import annotations

import importlib.metadata
import sys

from localcloud_stand_in import control


def main() -> None:
    """Pretend to install, or list what there is."""
    names = ("google-cloud-storage", "huggingface-hub", "maxtext")
    packages = [f"{name}=={importlib.metadata.version(name)}" for name in names]
    if "--freeze" not in sys.argv:
        control.fail_if_ordered(control.reach("install_maxtext"), "install_maxtext")
        packages = [f" + {package}" for package in packages]
    print(*packages, sep="\n", flush=True)


if __name__ == "__main__":
    main()
