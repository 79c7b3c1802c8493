"""The reference pipeline's own commands, typed by hand with the real gcloud."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from localcloud.handle import LocalCloud
from localcloud.settings import PROJECT, ZONE

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")

TUTORIAL = [
    "--machine-type=ct6e-standard-8t",
    "--image-project=ubuntu-os-accelerator-images",
    "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "--boot-disk-size=200GB",
    "--maintenance-policy=TERMINATE",
    "--instance-termination-action=DELETE",
    "--provisioning-model=RESERVATION_BOUND",
    "--reservation-affinity=specific",
]

type Gcloud = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gcloud(cloud: LocalCloud, tmp_path: Path) -> Gcloud:
    """Run `gcloud compute …` with a home folder of its own."""
    environment = {
        **os.environ,
        **cloud.environment(),
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
    }

    def run(*arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(
            ["gcloud", "compute", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
            timeout=120,
        )
        assert (answer.returncode != 0) is fails, answer.stderr
        return answer

    return run


def ssh_options(cloud: LocalCloud, name: str) -> list[str]:
    """Return what gcloud's SSH needs where VMs cannot listen on port 22."""
    (vm,) = (vm for vm in cloud.status()["vms"] if vm["name"] == name)
    return [] if vm["ssh_port"] == 22 else [f"--ssh-flag=-p {vm['ssh_port']}"]


def test_the_tutorial_by_hand(cloud: LocalCloud, gcloud: Gcloud) -> None:
    tpu_name = "tutorial-by-hand"
    where = [f"--zone={ZONE}", f"--project={PROJECT}"]
    gcloud("instances", "create", tpu_name, *where, *TUTORIAL, "--reservation=my-reservation")
    try:
        described = json.loads(gcloud("instances", "describe", tpu_name, *where, "--format=json").stdout)
        assert described["status"] == "RUNNING"
        assert described["scheduling"]["provisioningModel"] == "RESERVATION_BOUND"
        listed = gcloud("instances", "list", "--filter", f"name={tpu_name}", "--format=value(name,status)")
        assert listed.stdout.split() == [tpu_name, "RUNNING"]

        port = ssh_options(cloud, tpu_name)
        script = "hostname; echo x > /dev/shm/mine; ls /dev/shm; echo to-stderr >&2"
        gcloud("ssh", tpu_name, *where, *port, "--command=true")  # the first time it makes a key, and says so
        answer = gcloud("ssh", tpu_name, *where, *port, f"--command={script}")
        assert answer.stdout.split() == [tpu_name, "mine"]
        assert "to-stderr" in answer.stderr
        assert not Path("/dev/shm/mine").exists()
        assert gcloud("ssh", tpu_name, *where, *port, "--command=exit 7", fails=True).returncode == 7
    finally:
        gcloud("instances", "delete", tpu_name, *where, "--quiet")
    assert gcloud("instances", "list", "--filter", f"name={tpu_name}", "--format=value(name)").stdout == ""
    gone = gcloud("instances", "describe", tpu_name, *where, fails=True)
    assert f"The resource 'projects/{PROJECT}/zones/{ZONE}/instances/{tpu_name}' was not found" in gone.stderr


def test_labels_and_metadata_change(gcloud: Gcloud) -> None:
    where = [f"--zone={ZONE}"]
    gcloud("instances", "create", "labelled", *where, "--machine-type=e2-standard-4", "--labels=a=1")
    try:
        gcloud("instances", "add-labels", "labelled", *where, "--labels=b=2")
        gcloud("instances", "add-metadata", "labelled", *where, "--metadata=key=value")
        described = json.loads(gcloud("instances", "describe", "labelled", *where, "--format=json").stdout)
        assert described["labels"] == {"a": "1", "b": "2"}
        assert described["metadata"]["items"] == [{"key": "key", "value": "value"}]
        found = gcloud("instances", "list", "--filter=labels.b=2", "--format=value(name)")
        assert found.stdout.split() == ["labelled"]
    finally:
        gcloud("instances", "delete", "labelled", *where, "--quiet")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--zone=us-east5-z"], "Unknown zone"),
        (
            ["--zone=us-east5-c", "--machine-type=ct6e-standard-8t", "--maintenance-policy=TERMINATE"],
            "does not exist in",
        ),
        ([f"--zone={ZONE}", *TUTORIAL, "--reservation=nobodys"], "does not exist"),
        (
            [
                f"--zone={ZONE}",
                "--machine-type=ct6e-standard-8t",
                "--maintenance-policy=TERMINATE",
                "--reservation-affinity=specific",
                "--reservation=my-reservation",
            ],
            "Instances consuming DENSE reservations must use provisioningModel RESERVATION_BOUND",
        ),
    ],
)
def test_a_wrong_request_is_refused(gcloud: Gcloud, arguments: list[str], words: str) -> None:
    assert words in gcloud("instances", "create", "refused", *arguments, fails=True).stderr


def test_a_stockout_is_shown(cloud: LocalCloud, gcloud: Gcloud) -> None:
    cloud.fault(on="insert", error="stockout")
    answer = gcloud(
        "instances",
        "create",
        "unlucky",
        f"--zone={ZONE}",
        *TUTORIAL,
        "--reservation=my-reservation",
        fails=True,
    )
    assert "code: ZONE_RESOURCE_POOL_EXHAUSTED" in answer.stderr
    assert "does not have enough resources available" in " ".join(answer.stderr.split())
