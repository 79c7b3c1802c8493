"""The steps' scripts do nothing twice, start afresh after a crash, and quote what they are given."""

from __future__ import annotations

import dataclasses
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nightshift.errors import BaselineTooLow
from nightshift.maxtext import commands, logs, outcome, scripts
from nightshift.names import BucketLayout
from nightshift.recipe import Recipe, load_recipe

from tests.maxtext.vm_stand_in import LocalLayout, Machine

if TYPE_CHECKING:
    from localcloud.handle import LocalCloud

RECIPES = Path(__file__).parents[2] / "include" / "recipes"
ON_VM = Path(scripts.__file__).parent / "on_vm"
EVENTS = Path(__file__).parent / "data" / "events.out.tfevents.1796134698.vm"
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
BUCKET = BucketLayout("a-bucket", "a-prefix", "a-run")
DATA_COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RECIPES / "rehearsal.yaml")


@pytest.fixture
def layout(tmp_path: Path, recipe: Recipe) -> LocalLayout:
    return LocalLayout(recipe.model.name, COMMIT, recipe.software.maxtext, "a-run", memory=tmp_path / "shm")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "home")


def with_settings(recipe: Recipe, section: str, **values: object) -> Recipe:
    data = recipe.model_dump(mode="json")
    data[section].update(values)
    return Recipe.model_validate(data)


def test_the_base_model_is_converted_once(machine: Machine, recipe: Recipe, layout: LocalLayout) -> None:
    script = scripts.to_maxtext_script(recipe, layout)
    assert machine.run(script).code == 0
    calls = machine.calls()
    assert [call[1] for call in calls] == [recipe.model.repo, commands.TO_MAXTEXT]
    assert calls[0] == ["-", recipe.model.repo, COMMIT, commands.source_folder(layout)]
    assert calls[1] == commands.to_maxtext_argv(recipe, layout)[1:]
    again = machine.run(script)
    assert again.code == 0
    assert "already in MaxText's format" in again.output
    assert machine.calls() == []


@pytest.mark.parametrize("step", ["to_maxtext", "train", "to_huggingface"])
def test_maxtext_finds_its_environment_activated(
    machine: Machine, recipe: Recipe, layout: LocalLayout, step: str
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    Path(layout.actor_checkpoints, "32").mkdir(parents=True)
    venv = machine.home / "maxtext_venv"
    (venv / "bin/python3").write_text('#!/bin/sh\necho "$VIRTUAL_ENV $PATH" > "$HOME/seen"; exit 3\n')
    made = {
        "to_maxtext": scripts.to_maxtext_script(recipe, layout),
        "train": scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET),
        "to_huggingface": scripts.to_huggingface_script(recipe, layout),
    }
    assert machine.run(made[step]).code == 3
    environment, path = (machine.home / "seen").read_text().split()
    assert environment == str(venv)
    assert path.startswith(f"{venv}/bin:")


def test_other_settings_convert_again_into_a_fresh_folder(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    machine.run(scripts.to_maxtext_script(recipe, layout))
    stale = Path(layout.mt_format) / "stale"
    stale.touch()
    machine.calls()
    changed = with_settings(recipe, "conversion", scan_layers=False)
    assert machine.run(scripts.to_maxtext_script(changed, layout)).code == 0
    assert machine.modules() == ["to_maxtext"]
    assert not stale.exists()


def test_a_conversion_that_crashed_is_made_again_from_nothing(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    script = scripts.to_maxtext_script(recipe, layout)
    assert machine.run(script, FAIL="3").code == 3
    assert (Path(layout.mt_format) / "half").exists()
    machine.calls()
    assert machine.run(script).code == 0
    assert machine.modules() == ["to_maxtext"]  # the download was complete
    assert not (Path(layout.mt_format) / "half").exists()


def test_a_download_that_failed_is_made_again(machine: Machine, recipe: Recipe, layout: LocalLayout) -> None:
    script = scripts.to_maxtext_script(recipe, layout)
    assert machine.run(script, FAIL_SCRIPT="1").code == 1
    machine.calls()
    assert machine.run(script).code == 0
    assert machine.modules() == ["-", "to_maxtext"]


def test_a_training_without_its_base_checkpoint_says_what_has_to_run(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    ran = machine.run(scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET))
    assert ran.code == 1
    assert "error[no_checkpoint]: no base checkpoint" in ran.output
    assert "clear the failed task" in outcome.diagnose("train", ran.output.splitlines(), ran.code).next_step


def test_a_training_is_run_once_and_then_only_tells_its_numbers(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    first = machine.run(script)
    assert first.code == 0
    calls = machine.calls()
    folder = commands.dataset_folder(layout, DATA_COMMIT)
    assert calls[0] == ["-", "openai/gsm8k", "main", DATA_COMMIT, folder, "train=64", "test=16"]
    assert calls[1] == commands.train_argv(recipe, layout, DATA_COMMIT)[1:]
    again = machine.run(script)
    assert again.code == 0
    assert machine.calls() == []
    assert "the training is already complete" in again.output
    for output in (first.output, again.output):
        log = logs.summarize(output.splitlines())
        assert log.pre is not None
        assert log.post is not None
        assert (log.pre.correct, log.post.correct) == (1, 13)


def test_a_training_that_resumes_still_tells_the_first_baseline(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    assert machine.run(script, FAIL="137").code == 137  # not tee's
    machine.calls()
    resumed = machine.run(script, CORRECT="12")
    assert resumed.code == 0
    assert machine.modules() == ["train_rl"]
    log = logs.summarize(resumed.output.splitlines())
    assert log.pre is not None
    assert log.pre.correct == 1


def test_the_step_metrics_become_part_of_the_trainings_log(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, EVENTS=str(EVENTS))
    assert ran.code == 0
    kept = Path(scripts.train_log(layout)).read_text(encoding="utf-8")
    for text in (ran.output, kept):
        log = logs.summarize(text.splitlines())
        assert [point.step for point in log.metrics] == list(range(1, 13))
        assert log.metrics[7].values["reward"] == 0.89375
    assert "reader of the step metrics" not in ran.output


@pytest.mark.parametrize("code", ["0", "3"])
@pytest.mark.parametrize("reader", ["exit 1", "kill -9 $$", "trap '' TERM; sleep 0.7; exit 1"])
def test_a_reader_of_the_step_metrics_that_breaks_changes_nothing_for_the_training(
    machine: Machine, recipe: Recipe, layout: LocalLayout, reader: str, code: str
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, READER=reader, FAIL=code.replace("0", ""))
    assert ran.code == int(code)
    assert "the reader of the step metrics ended early; the training does not need it" in ran.output
    assert logs.summarize(ran.output.splitlines()).pre is not None


def test_a_recipe_without_a_floor_has_no_watcher_of_the_baseline(recipe: Recipe, layout: LocalLayout) -> None:
    assert recipe.gate.min_accuracy_before == 0
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    assert "baseline_below_floor" not in script
    assert "floor_watcher" not in script


def test_a_baseline_below_the_floor_ends_the_training_and_says_why(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    floored = with_settings(recipe, "gate", min_accuracy_before=0.5)
    script = scripts.train_script(floored, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, CORRECT="7", UNTIL="/nonexistent/for/ever")
    assert ran.code == 143
    error = outcome.diagnose("train", ran.output.splitlines(), ran.code)
    assert type(error) is BaselineTooLow
    assert "0.438 (7 of 16) is below gate.min_accuracy_before, 0.5" in error.message
    assert "ended early" not in ran.output
    assert logs.summarize(Path(scripts.train_log(layout)).read_text().splitlines()).post is None


def test_the_floor_is_for_what_this_attempt_measures(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    machine.run(scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET), CORRECT="1", FAIL="3")
    log, judged = scripts.train_log(layout), machine.home / "judged"
    # The training goes on until the watcher has said something.
    copier = f"trap 'exit 0' TERM; until grep -q min_accuracy_before {log}; do sleep 0.05; done; touch {judged}; wait"
    floored = with_settings(recipe, "gate", min_accuracy_before=0.5)
    script = scripts.train_script(floored, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, CORRECT="8", COPIER=copier, UNTIL=str(judged))
    assert ran.code == 0, ran.output
    assert "0.500 (8 of 16): not below gate.min_accuracy_before, 0.5" in ran.output


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_watcher_of_the_baseline_that_breaks_changes_nothing_for_the_training(
    machine: Machine, recipe: Recipe, layout: LocalLayout, code: str
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    floored = with_settings(recipe, "gate", min_accuracy_before=0.5)
    script = scripts.train_script(floored, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, WATCHER="exit 1", FAIL=code.replace("0", ""))
    assert ran.code == int(code)
    assert "the watcher of the baseline ended early; the training does not need it" in ran.output


@pytest.mark.parametrize("code", ["0", "3"])
@pytest.mark.parametrize("copier", ["exit 1", "kill -9 $$", "trap '' TERM; sleep 0.7; exit 1"])
def test_a_copier_that_breaks_changes_nothing_for_the_training(
    machine: Machine, recipe: Recipe, layout: LocalLayout, copier: str, code: str
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, COPIER=copier, FAIL=code.replace("0", ""))
    assert ran.code == int(code)
    assert "nightshift: the copier of the checkpoints broke: they may be on this VM only" in ran.output


def test_a_training_that_hangs_is_not_waited_for_when_the_copier_is_dead(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    # The training goes on until the file is there that its completion rule waits for.
    assert machine.run(script, COPIER="kill -9 $$", UNTIL=layout.checkpoints_safe).code == 0


def test_an_earlier_attempts_checkpoints_are_not_taken_for_this_ones(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    safe = Path(layout.checkpoints_safe)
    safe.parent.mkdir(parents=True)
    safe.touch()
    copier = (
        f'[ -e {safe} ] || touch "$HOME/gone"; touch {safe}; trap "exit 0" TERM; while :; do sleep 0.1; done'
    )
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    assert machine.run(script, COPIER=copier, UNTIL=str(safe)).code == 0
    assert (machine.home / "gone").exists()


def test_the_training_ends_when_its_last_checkpoint_is_copied(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    begun, copied = machine.home / "begun", machine.home / "copied"
    copier = f"trap 'sleep 1; touch {copied}; exit 0' TERM; touch {begun}; while :; do sleep 0.05; done"
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, COPIER=copier, UNTIL=str(begun))
    assert ran.code == 0
    assert copied.exists()
    assert "copier" not in ran.output


def test_the_copier_has_the_least_claim_to_processor_and_disk(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    said = machine.home / "said"
    copier = f"{{ nice; ionice -p $$; }} > {said}.tmp; mv {said}.tmp {said}; exit 0"
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    assert machine.run(script, COPIER=copier, UNTIL=str(said)).code == 0
    assert said.read_text().splitlines() == ["19", "idle"]


def test_a_complete_training_makes_sure_that_its_checkpoint_is_copied(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout)
    script = scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET)
    ran = machine.run(script, COPIER='echo "$@"; exit 1')
    assert ran.code == 0
    assert f"--prefix {BUCKET.checkpoints} " in ran.output
    assert ran.output.splitlines()[-2].endswith(" --ended")
    assert "they may be on this VM only" in ran.output


def test_a_training_goes_over_to_another_vm(
    machine: Machine, recipe: Recipe, layout: LocalLayout, tmp_path: Path, cloud: LocalCloud
) -> None:
    bucket = BucketLayout(cloud.bucket, f"test-{uuid.uuid4().hex[:8]}", "a-run")
    emulator = {"STORAGE_EMULATOR_HOST": cloud.storage_endpoint}
    trained(machine, recipe, layout, bucket, **emulator)
    other = Machine.create(tmp_path / "other-home")
    there = dataclasses.replace(layout, memory=tmp_path / "other-shm")
    Path(there.base_checkpoint).mkdir(parents=True)
    restored = other.run(scripts.restore_script(there, bucket), **emulator)
    assert restored.code == 0, restored.output
    assert "checkpoint 32 is restored" in restored.output
    assert (Path(there.actor_checkpoints) / "32/model_params/weights").read_text() == "weights\n"
    ran = other.run(scripts.train_script(recipe, there, DATA_COMMIT, bucket), CORRECT="12", **emulator)
    assert "the training is already complete" in ran.output
    log = logs.summarize(ran.output.splitlines())
    assert log.pre is not None
    assert log.pre.correct == 1


def trained(
    machine: Machine, recipe: Recipe, layout: LocalLayout, bucket: BucketLayout = BUCKET, **env: str
) -> None:
    Path(layout.base_checkpoint).mkdir(parents=True)
    assert machine.run(scripts.train_script(recipe, layout, DATA_COMMIT, bucket), **env).code == 0
    machine.calls()


def test_the_last_finished_checkpoint_is_converted_once(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout)
    script = scripts.to_huggingface_script(recipe, layout)
    ran = machine.run(script)
    assert ran.code == 0
    calls = machine.calls()
    assert calls[1] == commands.to_huggingface_argv(recipe, layout, f"{layout.actor_checkpoints}/32")[1:]
    arguments = [commands.source_folder(layout), layout.hf_trained, "bfloat16"]
    assert calls[2:] == [
        ["-u", f".nightshift/programs/{name}", *arguments]
        for name in ("finish_export.py", "compare_weights.py")
    ]
    again = machine.run(script)
    assert again.code == 0
    assert "step 32 is already in the Hugging Face format" in again.output
    assert machine.calls() == []
    for output in (ran.output, again.output):
        assert logs.weights(output.splitlines()) == {
            "tensors": 21,
            "tensors_moved": 20,
            "relative_norm": 0.025,
        }


def test_the_programs_about_an_export_find_each_other(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout)
    machine.run(scripts.to_huggingface_script(recipe, layout))
    folder = machine.home / ".nightshift/programs"
    for name in ("model_folder.py", "finish_export.py", "compare_weights.py"):
        assert (folder / name).read_text("utf-8") == (ON_VM / name).read_text("utf-8")


def test_an_export_that_another_releases_checks_passed_is_made_again(
    machine: Machine, recipe: Recipe, layout: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(machine, recipe, layout)
    machine.run(scripts.to_huggingface_script(recipe, layout))
    machine.calls()
    other = tmp_path / "on_vm"
    shutil.copytree(ON_VM, other)
    with (other / "model_folder.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    monkeypatch.setattr(scripts, "_ON_VM", other)
    assert machine.run(scripts.to_huggingface_script(recipe, layout)).code == 0
    assert machine.modules() == ["to_huggingface", "finish_export.py", "compare_weights.py"]


def test_an_export_that_did_not_pass_its_checks_is_made_again(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout)
    machine.run(scripts.to_maxtext_script(recipe, layout))
    machine.calls()
    script = scripts.to_huggingface_script(recipe, layout)
    assert machine.run(script, FAIL_SCRIPT="1").code == 1
    assert machine.modules() == ["to_huggingface", "finish_export.py"]
    unmoved = machine.run(script, UNMOVED="1")
    assert unmoved.code == 1  # not tee's
    failure = outcome.diagnose("convert_to_huggingface", unmoved.output.splitlines(), unmoved.code)
    assert failure.reason == "weights_unmoved"
    assert machine.modules() == ["to_huggingface", "finish_export.py", "compare_weights.py"]
    assert machine.run(script).code == 0
    assert machine.modules() == ["to_huggingface", "finish_export.py", "compare_weights.py"]


def test_the_files_beside_an_export_do_not_become_part_of_it(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout)
    machine.run(scripts.to_huggingface_script(recipe, layout))
    assert [path.name for path in Path(layout.hf_trained).iterdir()] == ["config.json"]


def test_a_training_that_ended_early_is_not_exported(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    trained(machine, recipe, layout, LAST="20")
    ran = machine.run(scripts.to_huggingface_script(recipe, layout))
    assert ran.code == 1
    assert "error[early_end]: the last checkpoint is step 20 of 32" in ran.output
    assert machine.calls() == []


def test_nothing_is_exported_before_the_training(
    machine: Machine, recipe: Recipe, layout: LocalLayout
) -> None:
    ran = machine.run(scripts.to_huggingface_script(recipe, layout))
    assert ran.code == 1
    assert "error[no_checkpoint]" in ran.output


def test_the_saved_steps_are_listed(machine: Machine, recipe: Recipe, layout: LocalLayout) -> None:
    assert logs.latest_step(machine.run(scripts.list_steps_script(layout)).output) is None
    trained(machine, recipe, layout)
    listing = machine.run(scripts.list_steps_script(layout))
    assert listing.output == "9\n32\n"
    assert logs.latest_step(listing.output) == 32


@pytest.mark.parametrize(
    "hostile", ["'; touch pwned; '", '"; touch pwned; "', "$(touch pwned)", "`touch pwned`", "a\\"]
)
def test_a_hostile_setting_reaches_maxtext_as_a_value(
    machine: Machine, recipe: Recipe, layout: LocalLayout, hostile: str
) -> None:
    extras = {**recipe.training.maxtext, "reasoning_start_token": hostile}
    changed = with_settings(recipe, "training", maxtext=extras)
    trained(machine, changed, layout)
    Path(layout.actor_checkpoints, "32").rename(Path(layout.actor_checkpoints, "31"))
    machine.run(scripts.train_script(changed, layout, DATA_COMMIT, BUCKET))
    word = next(word for word in machine.calls()[-1] if word.startswith("reasoning_start_token="))
    assert word == f"reasoning_start_token={commands.value_text(hostile)}"
    assert not (machine.home / "pwned").exists()


def test_no_script_holds_or_prints_a_token(recipe: Recipe, layout: LocalLayout, machine: Machine) -> None:
    for script in (
        scripts.to_maxtext_script(recipe, layout),
        scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET),
        scripts.to_huggingface_script(recipe, layout),
    ):
        assert "$HF_TOKEN" not in script
        assert not re.search(r"\bset -\w*x|\benv\b|\bprintenv\b", script)
    Path(layout.base_checkpoint).mkdir(parents=True)
    ran = machine.run(
        scripts.train_script(recipe, layout, DATA_COMMIT, BUCKET), HF_TOKEN="hf_sentinelsentinel"
    )
    assert "sentinel" not in ran.output
    assert "sentinel" not in str(machine.calls())


def test_a_text_that_would_end_its_own_heredoc_is_refused() -> None:
    with pytest.raises(ValueError, match="holds the line"):
        scripts.text_file("x", "a\nNIGHTSHIFT_END\nrm -rf /\n")
