"""The commands are the walk-through's, but for the differences that are listed here and meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from nightshift.maxtext import commands
from nightshift.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "include" / "recipes"
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
DATA_COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
RUN = "llama31-8b-gsm8k-20261201-0100-3f2a91"

MODEL = "llama3.1-8b-Instruct"
SOURCE = f"/dev/shm/{MODEL}/source/0e9e39f249a1"
DATA = f"/dev/shm/{MODEL}/data/e53f048856ff"
CHECKPOINT = f"/dev/shm/{MODEL}/post-train/{RUN}/checkpoints/actor/50"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RECIPES / "llama31-8b-gsm8k.yaml")


def differences(ours: list[str], tutorial: list[str]) -> tuple[list[str], list[str]]:
    """Return what only we pass and what only the tutorial passes; the interpreter and module must be the same."""
    assert ours[1:3] == tutorial[1:3]
    return [word for word in ours[3:] if word not in tutorial], [
        word for word in tutorial[3:] if word not in ours
    ]


def test_the_conversion_to_maxtext_is_the_tutorials(recipe: Recipe) -> None:
    tutorial = [
        "python3",
        "-m",
        "maxtext.checkpoint_conversion.to_maxtext",
        f"model_name={MODEL}",
        "hf_access_token=$HF_TOKEN",
        f"base_output_directory=/dev/shm/{MODEL}/mt-format/",
        "scan_layers=True",
        "use_multimodal=False",
        "hardware=cpu",
        "skip_jax_distributed_system=true",
        "checkpoint_storage_use_zarr3=1",
        "checkpoint_storage_use_ocdbt=1",
        "--lazy_load_tensors=False",
    ]
    layout = commands.vm_layout(recipe, RUN, COMMIT)
    ours = commands.to_maxtext_argv(recipe, layout)
    assert ours[0] == "maxtext_venv/bin/python3"
    assert differences(ours, tutorial) == (
        [
            # A folder for each model, commit and MaxText: converting into an existing one saves nothing.
            f"base_output_directory=/dev/shm/{MODEL}/mt-format/0e9e39f249a1-0.2.3",
            # The same values in another spelling.
            "skip_jax_distributed_system=True",
            "checkpoint_storage_use_zarr3=True",
            "checkpoint_storage_use_ocdbt=True",
            # The weights of one commit.
            f"--hf_model_path={SOURCE}",
        ],
        [
            "hf_access_token=$HF_TOKEN",  # read from the environment: a command line can be read by everybody
            f"base_output_directory=/dev/shm/{MODEL}/mt-format/",
            "skip_jax_distributed_system=true",
            "checkpoint_storage_use_zarr3=1",
            "checkpoint_storage_use_ocdbt=1",
        ],
    )


def test_the_training_is_the_tutorials(recipe: Recipe) -> None:
    tutorial = [
        "python3",
        "-m",
        "maxtext.trainers.post_train.rl.train_rl",
        f"model_name={MODEL}",
        f"load_parameters_path=/dev/shm/{MODEL}/mt-format//0/items",
        f"run_name={RUN}",
        f"base_output_directory=/dev/shm/{MODEL}/post-train/",
        "chips_per_vm=8",
        "num_batches=50",
        "num_test_batches=10",
        "rollout_data_parallelism=1",
        "rollout_tensor_parallelism=-1",
    ]
    layout = commands.vm_layout(recipe, RUN, COMMIT)
    ours = commands.train_argv(recipe, layout, DATA_COMMIT)
    assert ours[0] == "maxtext_venv/bin/python3"
    assert differences(ours, tutorial) == (
        [
            f"load_parameters_path=/dev/shm/{MODEL}/mt-format/0e9e39f249a1-0.2.3/0/items",
            f"base_output_directory=/dev/shm/{MODEL}/post-train",
            # rl.yml says true, which is for clusters with a Pathways proxy.
            "use_pathways=False",
            # Must be what the conversion was made with.
            "scan_layers=True",
            # Tokenizer and rows of one commit each.
            f"tokenizer_path={SOURCE}",
            "dataset_name=openai/gsm8k",
            "eval_dataset_name=openai/gsm8k",
            "hf_name=main",
            "train_split=train",
            "eval_split=test",
            f"hf_train_files={DATA}/train.parquet",
            # rl.yml's own values, said aloud: a record of the run is a record of its settings.
            "batch_size=1",
            "rl.num_generations=2",
            "learning_rate=3e-06",
            "checkpoint_period=50",
            f"hf_eval_files={DATA}/test.parquet",
            # Left out, the schedule has 150 001 steps and the learning rate never leaves its warm-up.
            "learning_rate_schedule_steps=50",
        ],
        [
            f"load_parameters_path=/dev/shm/{MODEL}/mt-format//0/items",
            f"base_output_directory=/dev/shm/{MODEL}/post-train/",
        ],
    )


def test_the_conversion_to_hugging_face_is_the_tutorials(recipe: Recipe) -> None:
    tutorial = [
        "python3",
        "-m",
        "maxtext.checkpoint_conversion.to_huggingface",
        "model_name=llama3.1-8b",
        f"load_parameters_path={CHECKPOINT}/model_params",
        f"base_output_directory=/dev/shm/{MODEL}/hf-trained/",
        "scan_layers=True",
        "use_multimodal=False",
        "weight_dtype=bfloat16",
    ]
    layout = commands.vm_layout(recipe, RUN, COMMIT)
    ours = commands.to_huggingface_argv(recipe, layout, CHECKPOINT)
    assert ours[0] == "maxtext_venv/bin/python3"
    assert differences(ours, tutorial) == (
        [
            f"base_output_directory=/dev/shm/{MODEL}/hf-trained/{RUN}",  # a folder for each run
            "skip_jax_distributed_system=True",  # else it looks for a coordinator that is not there
        ],
        [f"base_output_directory=/dev/shm/{MODEL}/hf-trained/"],
    )


def test_the_environments_are_the_tutorials(recipe: Recipe) -> None:
    layout = commands.vm_layout(recipe, RUN, COMMIT)
    training = commands.training_environment(recipe, layout)
    assert {key: value for key, value in training.items() if key.startswith("TPU_")} == {
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_WORKER_ID": "0",
        "TPU_NAME": RUN,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_TOPOLOGY": "2x4",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    assert "JAX_PLATFORMS" not in training
    assert commands.conversion_environment()["JAX_PLATFORMS"] == "cpu"
    assert commands.install_environment(recipe, layout)["UV_TORCH_BACKEND"] == "cpu"


def test_the_rehearsal_passes_its_extra_settings() -> None:
    recipe = load_recipe(RECIPES / "rehearsal.yaml")
    ours = commands.train_argv(recipe, commands.vm_layout(recipe, RUN, COMMIT), DATA_COMMIT)
    for word in (
        "num_batches=32",
        "batch_size=2",
        "eval_batch_size=16",
        "rl.num_generations=8",
        "learning_rate=0.00025",
        "learning_rate_schedule_steps=32",
        "max_prefill_predict_length=64",
        "weight_dtype=float32",
        "debug.rl=False",
        "math_verify_num_procs=1",
    ):
        assert word in ours


def test_no_setting_is_passed_twice() -> None:
    for path in RECIPES.glob("*.yaml"):
        recipe = load_recipe(path)
        layout = commands.vm_layout(recipe, RUN, COMMIT)
        for argv in (
            commands.to_maxtext_argv(recipe, layout),
            commands.train_argv(recipe, layout, DATA_COMMIT),
            commands.to_huggingface_argv(recipe, layout, CHECKPOINT),
        ):
            keys = [word.partition("=")[0] for word in argv[3:]]
            assert len(keys) == len(set(keys))


def test_a_schedule_of_its_own_is_not_overwritten(recipe: Recipe) -> None:
    training = recipe.training.model_copy(update={"maxtext": {"learning_rate_schedule_steps": 200}})
    changed = recipe.model_copy(update={"training": training})
    ours = commands.train_argv(changed, commands.vm_layout(changed, RUN, COMMIT), DATA_COMMIT)
    assert [word for word in ours if word.startswith("learning_rate_schedule_steps")] == [
        "learning_rate_schedule_steps=200"
    ]


@pytest.mark.parametrize("revision", ["main", "0e9e39f", "", "0E9E39F249A16976918F6564B8830BC894C89659"])
def test_an_unresolved_revision_is_refused(recipe: Recipe, revision: str) -> None:
    with pytest.raises(ValueError, match="no full commit hash"):
        commands.vm_layout(recipe, RUN, revision)


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, None, 1, -1, 2.5e-4, 3e-6, 1.0),
        *("bfloat16", "", "true", "null", "12", "3e-6", "a: b", "[1", "#x", "~", "a\nb", "naïve", " x "),
        *(["</answer>", "x"], {"a": [1, None]}),
    ],
)
def test_a_value_reads_back_as_what_it_was(value: object) -> None:
    text = commands.value_text(value)
    read = yaml.safe_load(text)
    if isinstance(value, float) and isinstance(read, str):
        # YAML 1.1 wants a dot in the mantissa; OmegaConf, which reads MaxText's command line, does not.
        read = float(read)
    assert read == value
    assert "\n" not in text


def test_the_rows_that_are_needed_follow_from_the_batches() -> None:
    recipe = load_recipe(RECIPES / "rehearsal.yaml")
    assert commands.expected_steps(recipe) == 32
    assert commands.rows_needed(recipe) == commands.Rows(train=64, evaluation=16)
    assert commands.data_problem(recipe, 64, 16) is None


def test_too_few_rows_are_told_with_the_number_that_would_do() -> None:
    recipe = load_recipe(RECIPES / "rehearsal.yaml").with_overrides({
        "num_batches": 50,
        "num_test_batches": 2,
    })
    problem = commands.data_problem(recipe, 64, 16)
    assert problem is not None
    assert "has 64 rows, 50 batches of 2 need 100" in problem
    assert "write training.num_batches: 32 or less" in problem
    assert "write training.num_test_batches: 1 or less" in problem


def test_smaller_batches_are_advised_where_the_rows_do_not_fill_one() -> None:
    recipe = load_recipe(RECIPES / "rehearsal.yaml").with_overrides({"batch_size": 4096})
    problem = commands.data_problem(recipe, 64, 16)
    assert problem is not None
    assert "lower training.batch_size" in problem
    assert ": 0 or less" not in problem


def test_the_token_has_to_open_the_exported_models_repository_too(recipe: Recipe) -> None:
    assert commands.hub_repositories(recipe) == (
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
    )
