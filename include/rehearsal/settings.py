"""Where the rehearsal keeps its files and listens; two checkouts with different settings run side by side."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from localcloud.settings import PROJECT
from localcloud.settings import Settings as CloudSettings
from nightshift import names

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PORT = 8899
#: Every process of a rehearsal carries this variable, so that all of them are found again.
MARKER = "NIGHTSHIFT_REHEARSAL"
WRITE_TOKEN = "hf_rehearsal_write"  # noqa: S105  known to the local Hub alone
READ_TOKEN = "hf_rehearsal_read"  # noqa: S105  likewise


@dataclass(frozen=True)
class Settings:
    """`port` is Airflow's; the local cloud has the next four, the two log servers the ones after."""

    var: Path
    port: int = DEFAULT_PORT

    @classmethod
    def from_environment(cls) -> Settings:
        """Read NIGHTSHIFT_VAR (default var) and NIGHTSHIFT_PORT (default 8899)."""
        return cls(
            var=(ROOT / os.environ.get("NIGHTSHIFT_VAR", "var")).absolute(),
            port=int(os.environ.get("NIGHTSHIFT_PORT", DEFAULT_PORT)),
        )

    @property
    def airflow_home(self) -> Path:
        """Airflow's database, configuration and logs."""
        return self.var / "airflow"

    @property
    def demo(self) -> Path:
        """What the demo writes: summary.json and the SSH key."""
        return self.var / "demo"

    @property
    def ssh_key(self) -> Path:
        """The private key of connection nightshift_ssh."""
        return self.demo / "ssh_key"

    @property
    def url(self) -> str:
        """Airflow's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cloud(self) -> CloudSettings:
        """The local cloud beside this Airflow."""
        return CloudSettings(state_dir=self.var / "localcloud", port=self.port + 1)

    def connections(self) -> dict[str, dict[str, object]]:
        """Return the four connections, which are all that differs from an installation on Google Cloud."""
        return {
            names.GOOGLE_CONNECTION: {
                "conn_type": "google_cloud_platform",
                "extra": {
                    "project": PROJECT,
                    "is_anonymous": True,
                    "compute_endpoint": self.cloud.compute_endpoint,
                    "storage_endpoint": self.cloud.storage_endpoint,
                },
            },
            names.SSH_CONNECTION: {
                "conn_type": "ssh",
                "login": "nightshift",
                "port": self.cloud.ssh_port,
                "extra": {"key_file": str(self.ssh_key)},
            },
            names.HUB_CONNECTION: {
                "conn_type": "generic",
                "host": self.cloud.hub_endpoint,
                "password": WRITE_TOKEN,
            },
            names.HUB_VM_CONNECTION: {"conn_type": "generic", "password": READ_TOKEN},
        }

    def environment(self) -> dict[str, str]:
        """Return the environment of every Airflow process."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "PYTHONDONTWRITE"))}
        airflow = {
            "CORE__DAGS_FOLDER": ROOT / "dags",
            "CORE__PLUGINS_FOLDER": ROOT / "plugins",
            "CORE__LOAD_EXAMPLES": False,
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": 4,
            # Anonymous callers are admin: only ever on loopback, only here.
            "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": True,
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "API__HOST": "127.0.0.1",
            "API__PORT": self.port,
            "API__BASE_URL": self.url,
            "API__WORKERS": 1,
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.airflow_home}/airflow.db",
            "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": 10,
            "LOGGING__WORKER_LOG_SERVER_PORT": self.port + 5,
            "LOGGING__TRIGGER_LOG_SERVER_PORT": self.port + 6,
        }
        return {
            **inherited,
            "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{inherited.get('PATH', os.defpath)}",
            "AIRFLOW_HOME": str(self.airflow_home),
            # Both: an environment that several checkouts share has the package of one of them.
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("plugins", "include")),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            MARKER: str(self.var),
            **{f"AIRFLOW__{key}": str(value) for key, value in airflow.items()},
            **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(c) for name, c in self.connections().items()},
        }
