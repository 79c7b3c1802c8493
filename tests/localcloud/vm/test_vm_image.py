"""What the image lays into a VM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from localcloud.settings import Settings
from localcloud.vm import image

from tests.localcloud.vm.conftest import VmLab

SHIM_CHECK = """
import sys
import localcloud_maxtext
finder = sys.meta_path[0]
spec = finder.find_spec("tunix.rl.rollout.vllm_rollout", None)
print(type(finder).__module__, spec.origin)
"""


def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, 9000)


def test_the_endpoints_are_those_of_the_cloud(tmp_path: Path) -> None:
    variables = image.environment(settings(tmp_path))
    assert variables["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:9001"
    assert variables["HF_ENDPOINT"] == "http://127.0.0.1:9002"


def test_only_what_reaches_package_indexes_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("UV_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_host")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/key.json")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = image.environment(settings(tmp_path))
    assert variables["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert variables["UV_INDEX_URL"] == "https://index.example/simple"
    assert variables["NO_PROXY"] == "intranet.example,127.0.0.0/8,127.0.0.1,localhost"
    assert {"HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(variables)


def test_every_path_that_the_image_names_is_there(tmp_path: Path) -> None:
    variables = image.environment(settings(tmp_path))
    for name in ("PYTHONPATH", "LOCALCLOUD_UV", "LOCALCLOUD_PYTHON", "LOCALCLOUD_TOY_MODEL"):
        assert Path(variables[name]).exists(), name
    for program in ("uv", "python3", "python3.12", "sudo", "apt-get", "apt", "loginctl"):
        assert os.access(image.BIN / program, os.X_OK), program


def test_uv_makes_a_seeded_312_environment_without_a_download(lab: VmLab) -> None:
    lab.start("vm")
    lab.out("vm", "uv python install 3.12 && uv venv --python 3.12 --seed venv")
    found = lab.out("vm", "venv/bin/python3 -c 'import sys; print(sys.version_info[:2], sys.prefix)'")
    assert found == f"(3, 12) {lab.specs['vm'].home}/venv"
    assert "pip" in lab.out("vm", "venv/bin/python3 -m pip --version")
    assert lab.ssh("vm", "uv python install 3.9").returncode != 0


def test_python_outside_an_environment_is_the_images_312(lab: VmLab) -> None:
    lab.start("vm")
    assert lab.out("vm", "python3 -c 'import sys; print(*sys.version_info[:2])'") == "3 12"
    assert (
        lab.out("vm", "python3.12 -c 'import sys; print(sys.executable)'")
        == image.environment(lab.settings)["LOCALCLOUD_PYTHON"]
    )


def test_apt_installs_nothing_and_says_what_is_absent(lab: VmLab) -> None:
    lab.start("vm")
    done = lab.ssh("vm", "sudo DEBIAN_FRONTEND=noninteractive apt-get -o X=1 install -y bash no-such-package")
    assert done.returncode == 0
    assert b"nothing is installed here" in done.stdout
    assert b"bash: bash is there" in done.stdout
    assert b"no-such-package is ABSENT" in done.stderr
    assert lab.out("vm", "apt update && apt upgrade -y --fix-missing").count("changes nothing here") == 2
    assert lab.ssh("vm", "apt-get purge bash").returncode == 100


def test_lingering_is_left_to_real_vms(lab: VmLab) -> None:
    lab.start("vm")
    assert "nothing to do" in lab.out("vm", 'sudo loginctl enable-linger "$(id -un)"')
    assert lab.ssh("vm", "loginctl terminate-user root").returncode == 1


def test_sudo_passes_options_and_variables_by(lab: VmLab) -> None:
    lab.start("vm")
    assert lab.out("vm", "sudo -n -u root -- sh -c 'echo $0 $1' a b") == "a b"
    assert lab.out("vm", "sudo -E X=5 sh -c 'echo $X'") == "5"


def test_google_cloud_storage_is_anonymous_at_once_on_the_vm(lab: VmLab) -> None:
    lab.start("vm")
    code = (
        "from google.cloud import storage; c = storage.Client(); print(c.project, c._connection.API_BASE_URL)"
    )
    assert (
        lab.out("vm", f"{sys.executable} -c '{code}'") == f"rehearsal-project {lab.settings.storage_endpoint}"
    )


def test_every_python_on_the_vm_has_the_shim_and_no_other_has(lab: VmLab) -> None:
    lab.start("vm")
    shown = subprocess.run(
        lab.ssh_argv("vm", "python3 -"),
        input=SHIM_CHECK.encode(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    module, origin = shown.stdout.decode().split()
    assert module == "localcloud_maxtext"
    assert Path(origin) == image.SITE / "localcloud_maxtext" / "rollout.py"
    without = lab.out("vm", "LOCALCLOUD_TOY_MODEL= python3 -c 'import sys; print(sys.meta_path[0])'")
    assert "localcloud" not in without
