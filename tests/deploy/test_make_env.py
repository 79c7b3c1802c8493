"""scripts/make_env.py, run as a person runs it."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_env.py"
TOKEN = "hf_deploy_test_token"
READ_TOKEN = "hf_read_deploy_test_token"


@pytest.fixture
def ssh_key(tmp_path: Path) -> Path:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--project", "my-project", *args],
        env={**os.environ, "HF_TOKEN": TOKEN, "HF_READ_TOKEN": READ_TOKEN},
        capture_output=True,
        text=True,
        check=False,
    )


def values(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)='?(.*?)'?$", path.read_text(), re.MULTILINE))


def test_every_required_value_is_filled_in_and_the_file_is_private(tmp_path: Path, ssh_key: Path) -> None:
    output = tmp_path / ".env"
    done = run("--ssh-key", ssh_key, "--output", output)
    assert done.returncode == 0, done.stderr
    required = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yaml").read_text()))
    found = values(output)
    assert required <= {name for name, value in found.items() if value}
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert len(base64.urlsafe_b64decode(found["FERNET_KEY"])) == 32
    assert len({found[name] for name in ("POSTGRES_PASSWORD", "JWT_SECRET", "API_SECRET_KEY")}) == 3


def test_the_connections_carry_the_key_and_the_token_unchanged(tmp_path: Path, ssh_key: Path) -> None:
    output = tmp_path / ".env"
    google_key = tmp_path / "airflow.json"
    google_key.write_text("{}")
    done = run("--ssh-key", ssh_key, "--google-key", google_key, "--output", output)
    assert done.returncode == 0, done.stderr
    found = values(output)
    ssh = json.loads(found["AIRFLOW_CONN_NIGHTSHIFT_SSH"])
    assert ssh["extra"]["private_key"] == ssh_key.read_text()
    assert json.loads(found["AIRFLOW_CONN_NIGHTSHIFT_HUGGINGFACE"])["password"] == TOKEN
    assert json.loads(found["AIRFLOW_CONN_NIGHTSHIFT_HUGGINGFACE_VM"])["password"] == READ_TOKEN
    key_path = json.loads(found["AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT"])["extra"]["key_path"]
    assert f":{key_path}:ro" in (ROOT / "docker-compose.yaml").read_text()
    assert found["GOOGLE_KEY_FILE"] == str(google_key)
    assert TOKEN not in done.stdout + done.stderr
    assert READ_TOKEN not in done.stdout + done.stderr


def test_without_a_key_file_the_machines_own_credentials_are_used(tmp_path: Path, ssh_key: Path) -> None:
    output = tmp_path / ".env"
    assert run("--ssh-key", ssh_key, "--output", output).returncode == 0
    google = json.loads(values(output)["AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT"])
    assert google["extra"] == {"project": "my-project"}


def test_an_existing_file_is_left_alone(tmp_path: Path, ssh_key: Path) -> None:
    output = tmp_path / ".env"
    output.write_text("FERNET_KEY=precious\n")
    done = run("--ssh-key", ssh_key, "--output", output)
    assert done.returncode == 2
    assert "FERNET_KEY may still be needed" in done.stderr
    assert output.read_text() == "FERNET_KEY=precious\n"


def test_a_public_key_is_refused(tmp_path: Path, ssh_key: Path) -> None:
    done = run("--ssh-key", f"{ssh_key}.pub", "--output", tmp_path / ".env")
    assert done.returncode == 2
    assert "without .pub" in done.stderr
    assert not (tmp_path / ".env").exists()
