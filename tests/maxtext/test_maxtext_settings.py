"""What MaxText itself knows decides which settings and models a recipe may name."""

from __future__ import annotations

import pytest
import yaml
from nightshift.maxtext import settings
from nightshift.recipe.model import Training


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rl.grpo_beta", 0.04),
        ("rl.grpo_beta", 1),
        ("rl.grpo_beta", "4e-2"),  # how YAML 1.1 reads 4e-2
        ("rl.loss_algo", "gspo-token"),
        ("rl.epsilon_high", None),
        ("debug.rl", False),
        ("weight_dtype", "float32"),
        ("math_verify_num_procs", 1),
        ("max_target_length", 2048),
        ("stop_strings", ["</answer>"]),
        ("vllm_additional_config", {"a": 1}),
        ("hbm_utilization_vllm", 0.5),
    ],
)
def test_a_setting_that_maxtext_has_is_accepted(key: str, value: object) -> None:
    assert settings.extra_problem(key, value, "training", "llama3.1-8b-Instruct") is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("grpo_beta", 0.1, "did you mean rl.grpo_beta?"),
        ("max_target_lenght", 5, "did you mean max_target_length?"),
        ("rl", {"grpo_beta": 1}, "write its parts with a dot (rl.degenerate_group_masking"),
        ("no_such_thing_at_all", 1, "is no setting of MaxText 0.2.3"),
        ("rl.grpo_beta", "high", "must be number (MaxText's default: 0.08)"),
        ("rl.loss_algo", "ppo", "must be one of grpo, gspo-token"),
        ("debug.rl", "no", "must be true or false"),
        ("max_target_length", True, "must be whole number"),
        ("max_target_length", 1.5, "must be whole number"),
        ("max_target_length", [1], "cannot be a list or a mapping"),
        ("max_target_length", None, "cannot be null"),
        ("num_batches", 3, "write training.num_batches"),
        ("rl.num_generations", 3, "write training.num_generations"),
        ("scan_layers", True, "write conversion.scan_layers"),
        ("run_name", "x", "is set by Nightshift"),
        ("hf_access_token", "x", "the token comes from the Hugging Face connection"),
        ("reasoning_start_token", "${oc.env:HF_TOKEN}", "may not contain '${'"),
        ("stop_strings", ["${oc.env:HF_TOKEN}"], "may not contain '${'"),
        ("base_emb_dim", 5, "is part of llama3.1-8b-Instruct's architecture (4096)"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_what_to_write(
    key: str, value: object, expected: str
) -> None:
    problem = settings.extra_problem(key, value, "training", "llama3.1-8b-Instruct")
    assert problem is not None
    assert expected in problem


def test_a_conversion_does_not_know_the_settings_of_a_training() -> None:
    problem = settings.extra_problem("rl.grpo_beta", 0.1, "conversion")
    assert problem is not None
    assert "is no setting" in problem
    reserved = settings.extra_problem("hardware", "tpu", "conversion")
    assert reserved is not None
    assert "is set by Nightshift" in reserved


def test_only_models_that_can_go_all_the_way_are_supported() -> None:
    models = settings.supported_models()
    assert models["llama3.1-8b-Instruct"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert models["llama3.1-8b"] == "meta-llama/Llama-3.1-8B"
    assert "default" not in models
    assert "llama2-7b" not in models  # MaxText trains it, but has no conversion for it
    assert "qwen3-1.7b" not in models  # has a configuration, but no repository


def test_every_table_of_settings_names_real_ones() -> None:
    known = settings.known_settings("training")
    assert [key for key in settings.RECIPE_FIELDS if key not in known] == []
    assert [key for key in settings.RESERVED if key not in known] == []


def test_the_defaults_of_the_recipe_are_those_of_rl_yml_where_the_tutorial_says_nothing() -> None:
    path = settings.package_folder() / "configs" / "post_train" / "rl.yml"
    rl = yaml.safe_load(path.read_text(encoding="utf-8"))
    training = Training()
    assert training.batch_size == rl["batch_size"]
    assert training.num_generations == rl["rl"]["num_generations"]
    assert training.learning_rate == float(rl["learning_rate"])
    assert training.checkpoint_period == rl["checkpoint_period"]


def test_a_shorter_schedule_than_the_training_is_refused_and_a_longer_one_kept() -> None:
    with pytest.raises(ValueError, match="ends the learning rate's schedule before the 50 training steps"):
        Training.model_validate({"maxtext": {"learning_rate_schedule_steps": 20}})
    assert Training.model_validate({"maxtext": {"learning_rate_schedule_steps": 80}}).steps == 50


def test_the_number_of_steps_counts_what_train_rl_counts() -> None:
    training = Training.model_validate({
        "num_batches": 10,
        "maxtext": {"rl.num_iterations": 2, "num_epoch": 3, "train_fraction": 0.5},
    })
    assert training.steps == 30
