"""Recipes are read from YAML: good ones whole, bad ones with every problem at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nightshift.errors import RecipeError
from nightshift.recipe import Recipe, RecipeFault, load_all, load_recipe, parse_recipe
from nightshift.tpu.provisioning import sent_run_duration

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "include" / "recipes"

GOOD = """\
name: night
tpu:
  zones: [us-east5-b]
  provisioning: {model: SPOT}
export: {bucket: some-bucket}
publish: {enabled: false}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "night.yaml")
    return [
        line.removeprefix("  - ") for line in caught.value.message.splitlines() if line.startswith("  - ")
    ]


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_recipe_that_says_only_what_it_must_has_the_tutorials_values() -> None:
    recipe = parse_recipe(GOOD, "night.yaml")
    assert recipe.model.name == "llama3.1-8b-Instruct"
    assert recipe.model.export_name == "llama3.1-8b"
    assert recipe.tpu.machine_type == "ct6e-standard-8t"
    assert recipe.tpu.boot_disk_gb == 200
    assert recipe.tpu.image_family == "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    assert recipe.software.apt_packages == ("build-essential", "cmake", "ninja-build")
    assert (recipe.training.num_batches, recipe.training.num_test_batches) == (50, 10)
    assert recipe.schedule.cron == "0 1 * * *"
    assert recipe.chips == 8


def test_every_recipe_in_the_repository_is_good() -> None:
    loaded = load_all(RECIPES)
    assert [entry.name for entry in loaded if isinstance(entry, Recipe)] == ["llama31-8b-gsm8k", "rehearsal"]
    assert not [str(entry.error) for entry in loaded if isinstance(entry, RecipeFault)]


def test_the_recipes_begin_with_the_reference_to_their_schema() -> None:
    for path in RECIPES.glob("*.yaml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# yaml-language-server: $schema=recipe.schema.json"


def test_the_rehearsal_uses_what_the_local_cloud_has() -> None:
    settings = pytest.importorskip("localcloud.settings")
    recipe = load_recipe(RECIPES / "rehearsal.yaml")
    assert recipe.tpu.project == settings.PROJECT
    assert recipe.tpu.zones == (settings.ZONE,)
    assert recipe.tpu.provisioning.model == "RESERVATION_BOUND"
    assert recipe.tpu.provisioning.reservation == settings.RESERVATION
    assert recipe.export.bucket == settings.BUCKET
    assert recipe.publish.repo is not None
    assert recipe.publish.repo.partition("/")[0] == settings.HUB_NAMESPACE
    assert recipe.schedule.cron is None


def test_all_problems_are_told_at_once_with_line_value_and_what_to_write() -> None:
    text = """\
name: Night Run
training:
  num_batchs: 50
  num_generations: 1
  maxtext:
    grpo_beta: 0.1
tpu:
  zones: [us-east5-c]
  machine_type: ct6e-standard-8
  provisioning: {model: SPOT}
export: {bucket: gs://x}
publish: {}
"""
    told = problems(text)
    assert told == [
        "line 1: name = 'Night Run': must be lower-case letters, digits and single hyphens: write 'night-run'",
        "line 3: training.num_batchs = 50: is an unknown key; did you mean num_batches?",
        "line 4: training.num_generations = 1: is out of bounds: write 2 or more "
        "(Completions sampled for each prompt (the group of GRPO).)",
        "line 6: training.maxtext.grpo_beta = 0.1: is no setting of MaxText 0.2.3; did you mean rl.grpo_beta?",
        "line 8: tpu.zones.0 = 'us-east5-c': has no TPU v6e: write one of asia-northeast1-b, europe-west4-a, "
        "us-central1-b, us-east1-d, us-east5-a, us-east5-b, us-south1-ai1b; did you mean us-east5-b?",
        "line 9: tpu.machine_type = 'ct6e-standard-8': is no single-VM TPU v6e machine type: write one of "
        "ct6e-standard-1t, ct6e-standard-4t, ct6e-standard-8t; did you mean ct6e-standard-8t?",
        "line 11: export.bucket = 'gs://x': does not have the right form: write e.g. my-project-nightshift "
        "(Cloud Storage bucket, without gs://.)",
        "line 12: publish.repo = None: is missing: write <namespace>/<name>, or publish.enabled: false",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: night", "name: night\nname: day", "name: stands here a second time (first in line 1)"),
        (
            "  zones: [us-east5-b]",
            "  zones: [us-east5-b]\n  zones: x",
            "tpu.zones: stands here a second time",
        ),
        ("{bucket: some-bucket}", "&a {bucket: b-b}\nschedule: *a", "schedule: is a YAML alias"),
        ("export: {bucket: some-bucket}", "", "export: is missing: write it"),
        ("{bucket: some-bucket}", "some-bucket", "has the wrong type: write a mapping"),
        ("model: SPOT", "model: SPTO", "model 'SPTO' is unknown; did you mean SPOT?"),
        ("{model: SPOT}", "{}", "has no model: write model: and one of STANDARD"),
        ("{model: SPOT}", "{model: RESERVATION_BOUND}", "tpu.provisioning.reservation: is missing"),
        (
            "{model: SPOT}",
            "{model: SPOT, reservation: r}",
            "tpu.provisioning.reservation = 'r': is an unknown key",
        ),
        ("{model: SPOT}", "{model: FLEX_START}", "tpu.zones.0 = 'us-east5-b': has no TPU v6e by FLEX_START"),
        ("{model: SPOT}", "{model: SPOT, max_run_duration: 5}", "is out of bounds: write 30 or more"),
        ("{enabled: false}", "{repo: me/GSM8K-Llama}", "must have a name that begins with 'Llama'"),
        (
            "name: night",
            "name: night\nschedule: {cron: '0 25 * * *'}",
            "is no cron expression of five fields",
        ),
        (
            "name: night",
            "name: night\nschedule: {cron: '* * * * * *'}",
            "is no cron expression of five fields",
        ),
        ("name: night", "name: night\nschedule: {cron: '0 1 30 2 *'}", "never happens"),
        (
            "name: night",
            "name: night\ntraining: {maxtext: {num_epoch: 0}}",
            "training.num_batches = 50: comes to 0 training steps",
        ),
        (
            "name: night",
            "name: night\ntraining: {maxtext: {train_fraction: 1.0e+308}}",
            "training.num_batches = 50: comes to inf training steps",
        ),
        ("name: night", "name: night\nschedule: {timezone: Europe/Berln}", "did you mean Europe/Berlin?"),
        (
            "name: night",
            "name: night\nmodel: {name: llama3.1-8b-instruct}",
            "did you mean llama3.1-8b-Instruct?",
        ),
        (
            "name: night",
            "name: night\nmodel: {export_name: qwen3-8b}",
            "is another architecture than model.name",
        ),
        (
            "name: night",
            "name: night\nmodel: {revision: '-x'}",
            "does not have the right form: write e.g. main",
        ),
        ("name: night", "name: night\nsoftware: {maxtext: 0.2.4}", "write '0.2.3'"),
        ("name: night", "name: night\nsoftware: {apt_packages: ['a;b']}", "software.apt_packages.0 = 'a;b'"),
        (
            "name: night",
            "name: night\ntraining: {num_batches: true}",
            "has the wrong type: write a whole number",
        ),
        (
            "name: night",
            "name: night\ntraining: {num_batches: '50'}",
            "has the wrong type: write a whole number",
        ),
        (
            "name: night",
            "name: night\ntraining: {learning_rate: true}",
            "must be a number, not true or false",
        ),
        ("name: night", "name: night\ntraining: {learning_rate: .nan}", "training.learning_rate = nan"),
        (
            "name: night",
            "name: night\ntraining: {rollout_data_parallelism: -1}",
            "rollout_tensor_parallelism cannot both be -1",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(old: str, new: str, expected: str) -> None:
    told = problems(changed(old, new))
    assert len(told) == 1, told
    assert expected in told[0]


def test_zones_are_kept_in_the_order_in_which_they_are_to_be_tried() -> None:
    text = changed(
        "zones: [us-east5-b]", "zones:\n    - us-east5-b\n    - asia-northeast1-b\n    - us-east5-a"
    )
    assert parse_recipe(text, "night.yaml").tpu.zones == ("us-east5-b", "asia-northeast1-b", "us-east5-a")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zone: us-east5-a", "tpu.zone = 'us-east5-a': is a list now: write zones: [us-east5-a]"),
        ("zone: us-east5-c", "tpu.zone = 'us-east5-c': is a list now: write zones: [us-east5-b]"),
        ("zone: [us-east5-a]", "tpu.zone = ['us-east5-a']: is a list now: write zones: [us-east5-b]"),
        ("zones: us-east5-a", "tpu.zones = 'us-east5-a': must be a list: write zones: [us-east5-a]"),
        (
            "zones: us-east5-b, us-east5-a",
            "tpu.zones = 'us-east5-b, us-east5-a': must be a list: write zones: [us-east5-b, us-east5-a]",
        ),
    ],
)
def test_a_zone_that_is_no_list_is_told_how_to_be_written(line: str, expected: str) -> None:
    assert problems(changed("zones: [us-east5-b]", line)) == [f"line 3: {expected}"]


def test_the_former_key_does_not_hide_what_else_is_wrong() -> None:
    told = problems(
        changed("zones: [us-east5-b]", "zone: us-east5-b\n  machine_typ: x\n  zones: [us-east5-z]")
    )
    assert [line.partition(" = ")[0] for line in told] == [
        "line 3: tpu.zone",
        "line 4: tpu.machine_typ",
        "line 5: tpu.zones.0",
    ]


@pytest.mark.parametrize(
    ("zones", "provisioning", "expected"),
    [
        (
            "[]",
            "{model: SPOT}",
            ["line 3: tpu.zones = []: names no zone: write one at least, e.g. zones: [us-east5-b]"],
        ),
        ("null", "{model: SPOT}", ["line 3: tpu.zones = None: has the wrong type: write a list"]),
        ("[1]", "{model: SPOT}", ["line 3: tpu.zones.0 = 1: has the wrong type: write a text"]),
        (
            "[us-east5-b, us-east5-a, us-east5-b]",
            "{model: SPOT}",
            [
                "line 3: tpu.zones.2 = 'us-east5-b': stands here a second time: write each zone once (first in place 1)"
            ],
        ),
        (
            "[us-east5-b, us-east5-d, us-east5-z]",
            "{model: SPOT}",
            [
                "line 3: tpu.zones.1 = 'us-east5-d': has no TPU v6e",
                "line 3: tpu.zones.2 = 'us-east5-z': has no TPU v6e",
            ],
        ),
        (
            "[us-east5-b, us-east5-a, us-central1-b]",
            "{model: FLEX_START}",
            [
                "line 3: tpu.zones.0 = 'us-east5-b': has no TPU v6e by FLEX_START",
                "line 3: tpu.zones.2 = 'us-central1-b': has no TPU v6e by FLEX_START",
            ],
        ),
    ],
)
def test_every_zone_is_checked_and_named(zones: str, provisioning: str, expected: list[str]) -> None:
    text = changed("[us-east5-b]", zones).replace("{model: SPOT}", provisioning)
    told = problems(text)
    assert len(told) == len(expected)
    for line, start in zip(told, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("model", ["ON_DEMAND_RESERVATION", "RESERVATION_BOUND"])
def test_a_reservation_takes_one_zone(model: str) -> None:
    reserved = changed("{model: SPOT}", f"{{model: {model}, reservation: my-tpus}}")
    assert parse_recipe(reserved, "night.yaml").tpu.zones == ("us-east5-b",)
    assert problems(reserved.replace("[us-east5-b]", "[us-east5-b, us-east5-a]")) == [
        "line 3: tpu.zones = ['us-east5-b', 'us-east5-a']: are 2 zones, but a reservation lies in one: write only the "
        "zone of 'my-tpus', e.g. zones: [us-east5-b], or a provisioning model without a reservation"
    ]


@pytest.mark.parametrize(
    ("written", "allowed"), [("", 3), ("max_recoveries: 0", 0), ("max_recoveries: 20", 20)]
)
def test_a_recipe_says_how_many_vms_a_run_may_lose(written: str, allowed: int) -> None:
    text = changed("  zones:", f"  {written}\n  zones:")
    assert parse_recipe(text, "night.yaml").tpu.max_recoveries == allowed


@pytest.mark.parametrize("bad", ["-1", "21", "'3'", "true", "null"])
def test_a_number_of_recoveries_that_makes_no_sense_is_refused(bad: str) -> None:
    (told,) = problems(changed("  zones:", f"  max_recoveries: {bad}\n  zones:"))
    assert told.startswith("line 3: tpu.max_recoveries = ")


def test_the_default_limits_of_the_steps_fit_into_the_vms_default_life() -> None:
    recipe = parse_recipe(GOOD, "night.yaml")
    assert recipe.timeouts.on_vm_seconds == 480 * 60
    # Not 8 hours, which they would fill to the second: the time between two steps counts too.
    assert sent_run_duration(recipe.tpu.provisioning) == 9 * 3600


@pytest.mark.parametrize(
    ("provisioning", "timeouts", "refused"),
    [
        ("{model: SPOT, max_run_duration: 28800}", "{}", None),  # 480 min, to the second
        (
            "{model: SPOT, max_run_duration: 28799}",
            "{}",
            "line 4: tpu.provisioning.max_run_duration = 28799: is 479.983 min, but the limits of the steps on the VM "
            "add up to 480 min (boot 20 + install 90 + to_maxtext 60 + restore 10 + train 180 + to_huggingface 60 + "
            "export 60): Compute Engine would delete the VM under a step that is still within its limit. Write "
            "28800 or more, or lower timeouts",
        ),
        ("{model: SPOT}", "{restore: 20, train: 230}", None),
        (
            "{model: SPOT}",
            "{restore: 20, train: 230.01}",
            "line 4: tpu.provisioning.max_run_duration = 32400: is 540 min, but the limits of the steps on the VM add "
            "up to 540.017 min (boot 20 + install 90 + to_maxtext 60 + restore 20 + train 230.01 + to_huggingface 60 + "
            "export 60): Compute Engine would delete the VM under a step that is still within its limit. Write "
            "32401 or more, or lower timeouts",
        ),
        ("{model: SPOT}", "{queue: 5000, publish: 5000, delete: 5000}", None),  # not the VM's time
        ("{model: SPOT, max_run_duration: null}", "{train: 5000}", None),
        (
            "{model: RESERVATION_BOUND, reservation: r, send_max_run_duration: false, max_run_duration: 60}",
            "{}",
            None,
        ),
    ],
)
def test_a_vm_must_outlive_the_limits_of_its_steps(
    provisioning: str, timeouts: str, refused: str | None
) -> None:
    text = changed("{model: SPOT}", provisioning) + f"timeouts: {timeouts}\n"
    if refused is None:
        assert parse_recipe(text, "night.yaml").name == "night"
    else:
        assert problems(text) == [refused]


def test_a_value_that_looks_like_a_secret_is_not_shown() -> None:
    told = problems(changed("name: night", "name: night\ntoken: hf_abcdefghijklmnopqrst"))
    assert told == [
        "line 2: token = (not shown): is an unknown key: known are name, description, schedule, model, dataset, "
        "training, conversion, tpu, software, export, gate, publish, timeouts"
    ]


def test_a_number_without_a_dot_is_read_as_the_number_that_was_meant() -> None:
    recipe = parse_recipe(
        changed("name: night", "name: night\ntraining: {learning_rate: 3e-6}"), "night.yaml"
    )
    assert recipe.training.learning_rate == 3e-6


def test_the_repository_of_another_model_follows_from_its_name() -> None:
    recipe = parse_recipe(changed("name: night", "name: night\nmodel: {name: qwen3-8b}"), "night.yaml")
    assert recipe.model.repo == "Qwen/Qwen3-8B"
    assert recipe.model.export_name == "qwen3-8b"


def test_a_file_that_is_no_yaml_is_refused_with_the_place() -> None:
    with pytest.raises(RecipeError, match=r"no valid YAML(.|\n)*line 2"):
        parse_recipe("name: night\n  - x: [", "night.yaml")


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_called_empty(text: str) -> None:
    assert problems(text) == ["the file: is empty: write the recipe's sections"]


def test_a_tab_is_named_as_what_yaml_forbids() -> None:
    with pytest.raises(
        RecipeError, match=r"line 2, column 1; YAML forbids tabs for indentation: write spaces"
    ):
        parse_recipe("training:\n\tnum_batches: 3\n", "night.yaml")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-11-31", "cannot be read as a date (day is out of range for month)"),
        ("!!timestamp abc", "cannot be read as a date"),
        ("!!int abc", "cannot be read as a whole number"),
        ("!!int ''", "cannot be read as a whole number"),
        ("!!float abc", "cannot be read as a number"),
        ("1" + ":59" * 400 + ".5", "cannot be read as a number"),
        ("!!bool abc", "cannot be read as true or false"),
        ("9" * 5000, "cannot be read as a whole number"),
        ("0x" + "f" * 5000, "is too large a number"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_value_that_yaml_cannot_read_is_a_problem_of_its_line(value: str, expected: str) -> None:
    told = problems(changed("name: night", f"name: night\ndataset:\n  revision: {value}"))
    assert len(told) == 1
    assert told[0].startswith("line 3: dataset.revision = ")
    assert expected in told[0]


def test_a_key_that_yaml_cannot_read_is_a_problem_of_its_line() -> None:
    assert problems(changed("name: night", "name: night\n2026-11-31: x"))[0].startswith("line 2: 2026-11-31")


def test_a_secret_that_yaml_cannot_read_is_not_shown() -> None:
    secret = "hf_abcdefghijklmnopqrst"
    assert secret not in "".join(problems(changed("name: night", f"name: night\ntoken: !!int {secret}")))


def test_a_file_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RecipeError, match="nest"):
        parse_recipe("\n".join("  " * depth + "a:" for depth in range(1500)), "night.yaml")


@pytest.mark.parametrize("text", ["- a\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert problems(text)[0].endswith("must be a mapping of the recipe's sections")


def test_one_broken_recipe_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: [", encoding="utf-8")
    (tmp_path / "b.yaml").write_text(GOOD, encoding="utf-8")
    (tmp_path / "c.yml").mkdir()
    (tmp_path / "d.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "e.yaml").write_text(changed("name: night", "name: 2026-11-31"), encoding="utf-8")
    (tmp_path / "f.yaml").symlink_to(tmp_path / "nothing")
    (tmp_path / "g.yaml").write_text(
        "\n".join("  " * depth + "a:" for depth in range(1500)), encoding="utf-8"
    )
    (tmp_path / "notes.txt").write_text("no recipe", encoding="utf-8")
    loaded = load_all(tmp_path)
    assert [entry.name for entry in loaded if isinstance(entry, Recipe)] == ["night"]
    faults = {entry.path.name: str(entry.error) for entry in loaded if isinstance(entry, RecipeFault)}
    assert list(faults) == ["a.yaml", "c.yml", "d.yaml", "e.yaml", "f.yaml", "g.yaml"]
    for name, text in faults.items():
        assert str(tmp_path / name) in text


def write_twins(folder: Path, *files: str) -> tuple[list[str], dict[str, str]]:
    """Return the loaded recipes' descriptions (their files' names) and the text of each file's fault."""
    for file in files:
        (folder / file).write_text(f"{GOOD}description: {file}\n", encoding="utf-8")
    loaded = load_all(folder)
    faults = {entry.path.name: str(entry.error) for entry in loaded if isinstance(entry, RecipeFault)}
    return [entry.description for entry in loaded if isinstance(entry, Recipe)], faults


def test_a_copy_does_not_take_the_dag_of_the_file_that_is_called_after_the_recipe(tmp_path: Path) -> None:
    loaded, faults = write_twins(tmp_path, "a-copy.yaml", "night.yaml", "z-copy.yaml")
    assert loaded == ["night.yaml"]
    assert list(faults) == ["a-copy.yaml", "z-copy.yaml"]
    for text in faults.values():
        assert "the name of 3 recipes (a-copy.yaml, night.yaml, z-copy.yaml): night.yaml keeps it" in text


@pytest.mark.parametrize("files", [("a.yaml", "b.yaml"), ("night.yaml", "night.yml")])
def test_of_twins_that_nothing_tells_apart_none_is_used(tmp_path: Path, files: tuple[str, str]) -> None:
    loaded, faults = write_twins(tmp_path, *files)
    assert loaded == []
    assert list(faults) == list(files)
    for text in faults.values():
        assert f"({', '.join(files)}): none of them is used" in text


def test_a_missing_recipe_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_both_recipes_are_read_in_a_fresh_process_in_well_under_a_second() -> None:
    code = (
        "import time; from pathlib import Path; from nightshift.recipe import load_all\n"
        "start = time.process_time(); load_all(Path('include/recipes')); print(time.process_time() - start)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "plugins")},
        capture_output=True,
        text=True,
        check=True,
    )
    # About 0.03 s of processor time when written; five times the room for a slow machine.
    assert float(ran.stdout) < 0.15
