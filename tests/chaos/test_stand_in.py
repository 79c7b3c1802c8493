"""The stand-in for MaxText beside Nightshift's own scripts, which cannot tell it from the real one."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from huggingface_hub import HfApi
from localcloud.vm import image
from nightshift.maxtext import commands, install, logs, outcome, scripts
from nightshift.names import VmLayout
from nightshift.recipe import Recipe, load_recipe
from rehearsal.demo import RECIPE
from rehearsal.settings import WRITE_TOKEN

from tests.maxtext.model_files import TELLING, Stored, content, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud

RUN = "night-1-20261201-1700-0a1b2c"
STEPS = 8


@dataclass(frozen=True)
class Layout(VmLayout):
    """The VM's layout, with a folder of the test in the place of /dev/shm."""

    memory: Path = field(default=Path("/nonexistent"), kw_only=True)

    @property
    def root(self) -> str:
        return f"{self.memory}/{self.model_name}"


@dataclass(frozen=True)
class Bench:
    """A home folder with the image's programs."""

    home: Path
    recipe: Recipe
    layout: Layout
    dataset: str
    environment: dict[str, str]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def done(self, script: str) -> str:
        ran = self.run(script)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    def train(self) -> subprocess.CompletedProcess[str]:
        words = commands.train_argv(self.recipe, self.layout, self.dataset)
        return self.run(f"mkdir -p {self.layout.post_train}; exec " + " ".join(f"'{word}'" for word in words))

    def order(self, **orders: object) -> None:
        (self.home / "control" / "night-1.json").write_text(json.dumps({"step_seconds": 0.0, **orders}))


@pytest.fixture
def bench(cloud: LocalCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv(image.IMAGE, "stand_in")
    (tmp_path / "control").mkdir()
    raw = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    raw["training"] |= {"num_batches": STEPS, "checkpoint_period": 4}
    raw["software"] = {"lock": None, "extra_deps": False, "apt_upgrade": False, "apt_packages": []}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    recipe = load_recipe(path)
    hub = HfApi(cloud.hub_endpoint, token=WRITE_TOKEN)
    model = hub.model_info(recipe.model.repo).sha or ""
    layout = Layout(recipe.model.name, model, recipe.software.maxtext, RUN, memory=tmp_path / "shm")
    environment = {
        **image.environment(cloud.settings),
        "HOME": str(tmp_path),
        "HF_TOKEN": WRITE_TOKEN,
        "LOCALCLOUD_MAXTEXT_CONTROL": str(tmp_path / "control"),
        "LOCALCLOUD_MAXTEXT_RUN": RUN,
    }
    made = Bench(tmp_path, recipe, layout, hub.dataset_info(recipe.dataset.repo).sha or "", environment)
    made.order()
    return made


def test_a_night_runs_from_the_installation_to_the_export_in_seconds(bench: Bench) -> None:
    installed = bench.done(install.install_script(bench.recipe, bench.layout))
    assert "maxtext==0.2.3" in install.installed_packages(installed.splitlines())
    assert "Conversion complete" in bench.done(scripts.to_maxtext_script(bench.recipe, bench.layout))
    trained = bench.train()
    log = logs.summarize(trained.stdout.splitlines())
    assert [step.step for step in log.steps] == list(range(1, STEPS + 1))
    assert (log.pre and log.pre.correct, log.post and log.post.correct) == (1, 13)
    assert logs.latest_step(bench.done(scripts.list_steps_script(bench.layout))) == STEPS
    exported = bench.done(scripts.to_huggingface_script(bench.recipe, bench.layout))
    weights = logs.weights(exported.splitlines())
    assert weights is not None
    assert (weights["tensors_moved"], weights["values_moved"]) == (1, 1)
    assert (Path(bench.layout.hf_trained) / "chat_template.jinja").exists()


def test_a_training_resumes_at_the_newest_checkpoint_and_ends_with_the_same_accuracy(bench: Bench) -> None:
    bench.done(install.install_script(bench.recipe, bench.layout))
    bench.done(scripts.to_maxtext_script(bench.recipe, bench.layout))
    bench.order(fault="killed", at="train:7")
    assert bench.train().returncode == -9
    again = logs.summarize(bench.train().stdout.splitlines())
    assert [step.step for step in again.steps] == [5, 6, 7, 8]
    assert again.pre
    assert again.pre.correct == 7
    assert again.post
    assert again.post.correct == 13


def test_a_half_written_checkpoint_is_refused(bench: Bench) -> None:
    bench.done(install.install_script(bench.recipe, bench.layout))
    bench.done(scripts.to_maxtext_script(bench.recipe, bench.layout))
    bench.order(fault="killed", at="train:7")
    bench.train()
    weights = Path(bench.layout.actor_checkpoints) / "4" / "model_params" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    again = bench.train()
    assert again.returncode == 1
    assert "DATA_LOSS" in again.stdout


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("hbm", "device_out_of_memory"), ("disk_full", "disk_full"), ("shapes", "step_failed")],
)
def test_an_ordered_failure_is_diagnosed_as_the_real_one_would_be(
    bench: Bench, fault: str, reason: str
) -> None:
    bench.done(install.install_script(bench.recipe, bench.layout))
    bench.done(scripts.to_maxtext_script(bench.recipe, bench.layout))
    bench.order(fault=fault, at="train:3")
    failed = bench.train()
    assert outcome.diagnose("train", failed.stdout.splitlines(), failed.returncode).reason == reason


def as_float32(tensors: dict[str, Stored]) -> dict[str, Stored]:
    return {name: tensor.as_float32() for name, tensor in tensors.items()}


def without_one(tensors: dict[str, Stored]) -> dict[str, Stored]:
    return {name: tensor for name, tensor in tensors.items() if name != TELLING}


def with_a_nan(tensors: dict[str, Stored]) -> dict[str, Stored]:
    bits = tensors[TELLING].bits()
    bits[7] = 0x7FC0
    return tensors | {TELLING: tensors[TELLING].with_bits(bits)}


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        (None, "weights_unmoved", "the training changed nothing"),
        (with_a_nan, "verification_failed", "1 values are NaN or infinite, in 1 of 21 tensors"),
        (without_one, "verification_failed", f"1 of 21 tensors are missing: {TELLING}"),
        (as_float32, "verification_failed", "is F32, not BF16"),
    ],
    ids=["unmoved", "nan", "missing", "dtype"],
)
def test_a_model_that_nobody_could_use_fails_its_conversion(
    bench: Bench, change: Callable[[dict[str, Stored]], dict[str, Stored]] | None, reason: str, says: str
) -> None:
    bench.done(install.install_script(bench.recipe, bench.layout))
    bench.done(scripts.to_maxtext_script(bench.recipe, bench.layout))
    bench.train()
    final = Path(bench.layout.actor_checkpoints) / str(STEPS) / "model_params"
    trained, base = final / "model.safetensors", Path(bench.layout.base_checkpoint) / "model.safetensors"
    weights = base.read_bytes() if change is None else content(change(read(trained)))
    trained.write_bytes(weights)
    digests = json.loads((final / "_METADATA").read_text(encoding="utf-8"))
    digests["model.safetensors"] = hashlib.sha256(weights).hexdigest()
    (final / "_METADATA").write_text(json.dumps(digests), encoding="utf-8")
    script = scripts.to_huggingface_script(bench.recipe, bench.layout)
    for _ in range(2):  # a result that did not pass its checks is none the next time either
        failed = bench.run(script)
        error = outcome.diagnose("convert_to_huggingface", failed.stdout.splitlines(), failed.returncode)
        assert (failed.returncode, error.reason) == (1, reason)
        assert says in error.message


def test_a_setting_that_maxtext_does_not_know_is_refused(bench: Bench) -> None:
    bench.done(install.install_script(bench.recipe, bench.layout))
    python = bench.home / bench.layout.python
    refused = bench.run(f"{python} -m {commands.TRAIN_RL} learning_rat=1")
    assert refused.returncode == 1
    assert outcome.diagnose("train", refused.stdout.splitlines(), 1).reason == "recipe_invalid"


def test_another_image_is_refused(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(image.IMAGE, "windows")
    with pytest.raises(ValueError, match="maxtext and stand_in"):
        image.environment(cloud.settings)
