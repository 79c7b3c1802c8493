"""The recipes of the matrix: the rehearsal's, small, each with names of its own so that their runs never meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml
from rehearsal.demo import RECIPE

from chaos.cases import CHECKPOINT_PERIOD, NUM_BATCHES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Limits in minutes that a healthy run is far from, so that a hanging case ends.
_LIMITS: Final = {
    "queue": 3,
    "boot": 2,
    "install": 4,
    "to_maxtext": 4,
    "restore": 4,
    "train": 5,
    "to_huggingface": 4,
    "export": 4,
    "publish": 4,
    "delete": 3,
}
#: Limits that a case waits for.
_BRIEF: Final = {**_LIMITS, "queue": 1, "boot": 0.5, "train": 0.5, "to_huggingface": 0.5}
#: How many recipes there are of each kind: so many of its cases run beside each other.
STAND_IN: Final[Mapping[str, int]] = {"night": 9, "brief": 3}
REAL: Final[Mapping[str, int]] = {"whole": 1, "short": 2}
SHORT_STEPS: Final = 8
#: Zones by recipe: what the cloud is ordered to answer to inserts there concerns one recipe's runs.
ZONES: Final[Mapping[str, tuple[str, ...]]] = {
    "brief-1": ("us-east5-a", "us-east5-b"),
    "brief-2": ("us-central1-b", "us-east1-d"),
    "brief-3": ("europe-west4-a", "asia-northeast1-b"),
}
_OF_ALL_OTHERS: Final = ("us-south1-ai1b",)


def write(folder: Path, kinds: Mapping[str, int]) -> dict[str, list[str]]:
    """Write recipes into a folder; return their names by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    lanes = {kind: [f"{kind}-{number}" for number in range(1, count + 1)] for kind, count in kinds.items()}
    for kind, recipes in lanes.items():
        for name in recipes:
            recipe = (
                _real(name, kind) if kind in REAL else _recipe(name, _BRIEF if kind == "brief" else _LIMITS)
            )
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return lanes


def zones(name: str) -> tuple[str, ...]:
    """Return the zones of a recipe that runs on the stand-in."""
    return ZONES.get(name, _OF_ALL_OTHERS)


def _named(name: str) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    recipe |= {"name": name, "description": "A run of the fault matrix."}
    recipe["publish"]["repo"] = f"nightshift-rehearsal/Llama-{name}"
    return recipe


def _real(name: str, kind: str) -> dict[str, Any]:
    recipe = _named(name)
    if kind == "short":
        recipe["training"] |= {"num_batches": SHORT_STEPS, "checkpoint_period": SHORT_STEPS // 2}
    return recipe


def _recipe(name: str, limits: Mapping[str, float]) -> dict[str, Any]:
    recipe = _named(name)
    recipe["timeouts"] = dict(limits)
    recipe["training"] |= {"num_batches": NUM_BATCHES, "checkpoint_period": CHECKPOINT_PERIOD}
    recipe["tpu"] |= {"provisioning": {"model": "STANDARD"}, "zones": list(zones(name))}
    recipe["software"] = {"lock": None, "extra_deps": False}
    return recipe
