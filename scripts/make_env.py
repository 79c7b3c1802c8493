#!/usr/bin/env python3
"""Write .env for docker-compose.yaml: fresh secrets, and the four connections as Airflow reads them.

    python3 scripts/make_env.py --project my-project --ssh-key nightshift_ed25519 --google-key key.json

Two Hugging Face tokens are taken from HF_TOKEN and HF_READ_TOKEN or asked for: one that publishes and stays with
Airflow, and one of type Read for the VM. They never are arguments, which others could see.
Needs nothing but Python's standard library, and never overwrites a file.
"""

from __future__ import annotations

import argparse
import base64
import getpass
import json
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[1]
#: Where docker-compose.yaml mounts GOOGLE_KEY_FILE.
KEY_IN_CONTAINER = "/run/nightshift/google-key.json"


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with `NAME=…` lines set to `values`, each in single quotes.

    Raises ValueError for a name that the template lacks and for a value that single quotes cannot hold.
    """
    for name, value in values.items():
        if "'" in value or "\n" in value:
            msg = f"{name} must hold neither a quote nor a line end"
            raise ValueError(msg)
        lines = template.split("\n")
        places = [number for number, line in enumerate(lines) if line.startswith(f"{name}=")]
        if len(places) != 1:
            msg = f"the template has {len(places)} lines {name}=, not 1"
            raise ValueError(msg)
        lines[places[0]] = f"{name}='{value}'"
        template = "\n".join(lines)
    return template


def connections(
    project: str, ssh_user: str, private_key: str, token: str, vm_token: str, *, with_key_file: bool
) -> dict[str, str]:
    """Return the values of AIRFLOW_CONN_*; without a key file Google's default credentials are used.

    `token` publishes; `vm_token` goes to the VM and may only read.
    """
    google = {"project": project} | ({"key_path": KEY_IN_CONTAINER} if with_key_file else {})
    ssh = {"private_key": private_key}
    return {
        "AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT": json.dumps({
            "conn_type": "google_cloud_platform",
            "extra": google,
        }),
        "AIRFLOW_CONN_NIGHTSHIFT_SSH": json.dumps({
            "conn_type": "ssh",
            "login": ssh_user,
            "port": 22,
            "extra": ssh,
        }),
        "AIRFLOW_CONN_NIGHTSHIFT_HUGGINGFACE": json.dumps({"conn_type": "generic", "password": token}),
        "AIRFLOW_CONN_NIGHTSHIFT_HUGGINGFACE_VM": json.dumps({"conn_type": "generic", "password": vm_token}),
    }


def fresh_secrets() -> dict[str, str]:
    """Return the secrets that an installation makes for itself."""
    return {
        "FERNET_KEY": base64.urlsafe_b64encode(os.urandom(32)).decode(),
        **{name: secrets.token_hex(32) for name in ("POSTGRES_PASSWORD", "JWT_SECRET", "API_SECRET_KEY")},
        "AIRFLOW_ADMIN_PASSWORD": secrets.token_urlsafe(18),
    }


def main() -> None:
    """Read the arguments and write the file, readable by its owner alone."""
    parser = argparse.ArgumentParser(description="Write .env for docker-compose.yaml.")
    parser.add_argument("--project", required=True, help="Google Cloud project id")
    parser.add_argument("--ssh-key", required=True, type=Path, help="private key without a passphrase")
    parser.add_argument("--ssh-user", default="nightshift", help="login on the VM")
    parser.add_argument(
        "--google-key", type=Path, help="service account key; none: the machine's own account"
    )
    parser.add_argument("--output", type=Path, default=ROOT / ".env")
    args = parser.parse_args()

    private_key = args.ssh_key.read_text()
    if "PRIVATE KEY-----" not in private_key:
        parser.error(f"{args.ssh_key} is no private key: give the file without .pub")
    if args.google_key is not None and not args.google_key.is_file():
        parser.error(f"there is no file {args.google_key}")
    if args.output.exists():
        parser.error(f"{args.output} exists: move it away first, since its FERNET_KEY may still be needed")
    token = os.environ.get("HF_TOKEN") or getpass.getpass("Hugging Face token that publishes: ")
    vm_token = os.environ.get("HF_READ_TOKEN") or getpass.getpass(
        "Hugging Face token of type Read, for the VM: "
    )
    values = {
        "AIRFLOW_UID": str(os.getuid()),
        "GOOGLE_KEY_FILE": str(args.google_key.resolve()) if args.google_key else "/dev/null",
        **fresh_secrets(),
        **connections(
            args.project,
            args.ssh_user,
            private_key,
            token,
            vm_token,
            with_key_file=args.google_key is not None,
        ),
    }
    text = fill((ROOT / ".env.example").read_text(), values)
    with os.fdopen(os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    sys.stdout.write(f"Wrote {args.output}. Log in as admin; the password is AIRFLOW_ADMIN_PASSWORD there.\n")


if __name__ == "__main__":
    main()
