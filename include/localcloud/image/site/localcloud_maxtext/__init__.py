"""Makes the real, unmodified MaxText 0.2.3 run a toy Llama on a CPU, by the command lines of production.

An import hook that does four things, each only when MaxText imports the module concerned:

1. `llama3.1-8b` and `llama3.1-8b-Instruct` take their sizes from the toy's config.json, in the folder
   that LOCALCLOUD_TOY_MODEL names.
2. Tunix's rollout, which needs vLLM, is replaced by sampling from the actor itself (`rollout`).
3. `--lazy_load_tensors=False` reads safetensors through torch, which a CPU environment has no other use
   for: where it is not installed, a stand-in is lent for that one call (`torch_stand_in`).
4. MaxText 0.2.3's exit handler can hang for ever and is taken away. LOCALCLOUD_MAXTEXT_EXIT_FIX=0 leaves
   it, to rehearse the hang.

Everything else is MaxText's own: conversions, GRPO, rewards, checkpoints, logs. This file imports only the
standard library, because every Python on the VM does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

TOY_MODEL = "LOCALCLOUD_TOY_MODEL"

_HERE = Path(__file__).parent
_REPLACED = {
    "tunix.generate.vllm_sampler": _HERE / "vllm_sampler.py",
    "tunix.rl.rollout.vllm_rollout": _HERE / "rollout.py",
}
_PATCHED = {
    "maxtext.configs.pyconfig": "model_sizes",
    "maxtext.checkpoint_conversion.utils.hf_model_configs": "hf_configs",
    "maxtext.checkpoint_conversion.utils.utils": "eager_loading",
    "maxtext.trainers.post_train.rl.math_verify_pool": "exit_handler",
}


class _Patching(importlib.abc.Loader):
    """Loads a module as usual and then patches it."""

    def __init__(self, loader: importlib.abc.Loader, patch: str) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        patches = importlib.import_module("localcloud_maxtext.patches")
        patch: Callable[[ModuleType], None] = getattr(patches, self._patch)
        patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _REPLACED:
            return importlib.util.spec_from_file_location(fullname, _REPLACED[fullname])
        if fullname in _PATCHED:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Patching(spec.loader, _PATCHED[fullname])
            return spec
        return None


def install() -> None:
    """Install the hook where LOCALCLOUD_TOY_MODEL is set."""
    if os.environ.get(TOY_MODEL) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
