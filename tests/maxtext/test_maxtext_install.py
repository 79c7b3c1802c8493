"""The installation is the tutorial's, waits for apt, says why a download fails, and is done once."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from nightshift.maxtext import install, outcome
from nightshift.recipe import Recipe, load_recipe

from tests.maxtext.vm_stand_in import LocalLayout, Machine

RECIPES = Path(__file__).parents[2] / "include" / "recipes"
TOOLS = (
    "uv",
    "apt-get",
    "sudo",
    "env",
    "curl",
    "sleep",
    "loginctl",
    "cloud-init",
    "install_tpu_post_train_extra_deps",
)
#: Another apt-get holds the lock of the package lists for as many calls as the file `held` has bytes.
LOCKED_APT = """#!/bin/bash
if [[ "$*" == *update* && -s "$HOME/held" ]]; then
  truncate -s -1 "$HOME/held"
  echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 812 (apt-get)" >&2
  exit 100
fi
"""
LOCK = "jax==0.10.1\nmaxtext==0.2.3\n"


@pytest.fixture
def production() -> Recipe:
    return load_recipe(RECIPES / "llama31-8b-gsm8k.yaml")


@pytest.fixture
def rehearsal() -> Recipe:
    return load_recipe(RECIPES / "rehearsal.yaml")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "home", *TOOLS)


def layout(recipe: Recipe, tmp_path: Path) -> LocalLayout:
    return LocalLayout(recipe.model.name, "0" * 40, recipe.software.maxtext, "a-run", memory=tmp_path)


def commands_of(machine: Machine) -> list[str]:
    return [" ".join(call) for call in machine.calls() if call[0] not in {"env", "sudo", "sleep"}]


def test_a_production_install_runs_the_tutorials_commands(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)))
    assert ran.code == 0, ran.output
    apt = (
        "apt-get -o DPkg::Lock::Timeout=600 -o APT::Update::Error-Mode=any "
        "-o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
    )
    assert commands_of(machine) == [
        f"loginctl enable-linger {getpass.getuser()}",
        "cloud-init status --wait",
        f"{apt} update",
        f"{apt} upgrade -y --fix-missing",
        f"{apt} install -y build-essential cmake ninja-build",
        "uv python find 3.12",
        "uv venv --clear --python 3.12 --seed maxtext_venv",
        "uv pip install maxtext[tpu-post-train]==0.2.3 --resolution=lowest",
        "install_tpu_post_train_extra_deps",
        "uv pip check",
        "- 0.2.3 8",
        "uv pip freeze",
    ]
    assert install.installed_packages(ran.output.splitlines()) == ("jax==0.10.1", "maxtext==0.2.3")


def test_apt_is_told_not_to_ask(production: Recipe, tmp_path: Path) -> None:
    script = install.install_script(production, layout(production, tmp_path))
    assert "DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a LC_ALL=C apt-get" in script
    assert " -o Dpkg::Options::=--force-confold " in script


def test_a_cloud_init_that_failed_does_not_end_the_night(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)), FAILING="cloud-init")
    assert ran.code == 0, ran.output
    assert "cloud-init has not ended well" in ran.output


@pytest.mark.parametrize("calls", [1, 7])
def test_another_apt_that_holds_the_package_lists_is_waited_for(
    machine: Machine, production: Recipe, tmp_path: Path, calls: int
) -> None:
    (machine.home / ".local/bin/apt-get").write_text(LOCKED_APT, encoding="utf-8")
    (machine.home / "held").write_text("x" * calls, encoding="utf-8")
    ran = machine.run(install.install_script(production, layout(production, tmp_path)))
    assert ran.code == 0, ran.output
    assert ran.output.count("another apt-get holds the package lists") == calls


def test_an_install_fails_at_once_where_the_memory_would_not_outlive_a_session(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)), FAILING="loginctl")
    assert ran.code == 1
    assert "error[memory]" in ran.output
    assert not [call for call in commands_of(machine) if not call.startswith("loginctl")]


def test_a_complete_environment_is_left_alone_and_still_listed(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    script = install.install_script(production, layout(production, tmp_path))
    machine.run(script)
    machine.calls()
    again = machine.run(script)
    assert again.code == 0
    assert "already complete" in again.output
    assert [call[0] for call in machine.calls()] == ["loginctl"]
    assert install.installed_packages(again.output.splitlines()) == ("jax==0.10.1", "maxtext==0.2.3")


def test_other_software_is_installed_anew(machine: Machine, production: Recipe, tmp_path: Path) -> None:
    machine.run(install.install_script(production, layout(production, tmp_path)))
    machine.calls()
    data = production.model_dump(mode="json")
    data["software"]["resolution"] = "highest"
    changed = Recipe.model_validate(data)
    machine.run(install.install_script(changed, layout(changed, tmp_path)))
    assert "uv pip install maxtext[tpu-post-train]==0.2.3 --resolution=highest" in commands_of(machine)


def test_a_lock_file_is_sent_along_and_installed_as_it_is(
    machine: Machine, rehearsal: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(rehearsal, layout(rehearsal, tmp_path), LOCK))
    assert ran.code == 0, ran.output
    called = commands_of(machine)
    assert "uv pip install --no-deps -r maxtext_venv.lock" in called
    assert not [call for call in called if call.startswith("install_tpu")]
    assert (machine.home / "maxtext_venv.lock").read_text(encoding="utf-8") == LOCK


def test_no_system_packages_are_touched_when_none_are_asked_for(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    data = production.model_dump(mode="json")
    data["software"] |= {"apt_upgrade": False, "apt_packages": []}
    changed = Recipe.model_validate(data)
    assert machine.run(install.install_script(changed, layout(changed, tmp_path))).code == 0
    assert not [call for call in commands_of(machine) if call.startswith("apt-get")]


def test_a_lock_without_its_text_and_a_text_without_its_lock_are_refused(
    production: Recipe, rehearsal: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="but no lock text was given"):
        install.install_script(rehearsal, layout(rehearsal, tmp_path))
    with pytest.raises(ValueError, match="but a lock text was given"):
        install.install_script(production, layout(production, tmp_path), LOCK)


def test_the_lock_file_is_read_where_the_recipe_names_one(
    production: Recipe, rehearsal: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "rehearsal-cpu.lock").write_text(LOCK, encoding="utf-8")
    assert install.read_lock(rehearsal, tmp_path) == LOCK
    assert install.read_lock(production, tmp_path) is None


@pytest.mark.parametrize(
    ("failing", "code"), [("apt-get", "no_network"), ("install_tpu_post_train_extra_deps", "packages")]
)
def test_a_failure_says_what_failed_after_three_attempts(
    machine: Machine, production: Recipe, tmp_path: Path, failing: str, code: str
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)), FAILING=failing)
    assert ran.code == 1
    assert f"error[{code}]" in ran.output
    assert "attempt 3 of 3 failed" in ran.output
    assert not (machine.home / "maxtext_venv.complete").exists()


def test_without_a_network_the_first_download_names_cloud_nat(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)), FAILING="apt-get")
    assert "external IP (tpu.external_ip) or Cloud NAT" in ran.output
    error = outcome.diagnose("install", ran.output.splitlines(), ran.code)
    assert "did not reach the internet" in error.message
    assert error.retryable


def test_packages_that_disagree_are_a_warning_only(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    tool = machine.home / ".local/bin/uv"
    checked = tool.read_text(encoding="utf-8").replace(
        "esac\ncase", 'esac\n[ "$2" != check ] || exit 1\ncase'
    )
    tool.write_text(checked, encoding="utf-8")
    ran = machine.run(install.install_script(production, layout(production, tmp_path)))
    assert ran.code == 0, ran.output
    assert "warning: the packages' own requirements disagree" in ran.output


def test_an_environment_that_fails_its_check_is_not_complete(
    machine: Machine, production: Recipe, tmp_path: Path
) -> None:
    ran = machine.run(install.install_script(production, layout(production, tmp_path)), FAIL_SCRIPT="1")
    assert ran.code == 1
    assert not (machine.home / "maxtext_venv.complete").exists()
