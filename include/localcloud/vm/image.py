"""The image that every VM of the local cloud boots from: what a session on it finds."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from localcloud.settings import PROJECT

if TYPE_CHECKING:
    from localcloud.settings import Settings

_HERE = Path(__file__).resolve().parent.parent

#: Stand-ins for programs that a real VM installs or that must not touch this machine.
BIN = _HERE / "image" / "bin"
#: On PYTHONPATH of the VM: makes the real MaxText run the toy model on a CPU.
SITE = _HERE / "image" / "site"
#: Another image, chosen by IMAGE: its MaxText is a fast stand-in, and nothing is downloaded.
STAND_IN = _HERE / "image" / "stand_in"
IMAGE = "LOCALCLOUD_IMAGE"
IMAGES = ("maxtext", "stand_in")
#: Has the config.json whose sizes MaxText takes for `llama3.1-8b` and `llama3.1-8b-Instruct`.
TOY_MODEL = _HERE / "toy" / "hub" / "models" / "meta-llama" / "Llama-3.1-8B-Instruct"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOOPBACK = "127.0.0.0/8,127.0.0.1,localhost"

#: How this machine reaches package indexes, which the VM shares; everything else of the host stays outside.
_INHERITED_NAMES = frozenset({
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_HTTP_TIMEOUT",
    "UV_NATIVE_TLS",
    "UV_NO_INDEX",
    "UV_OFFLINE",
    "UV_SYSTEM_CERTS",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
})
_INHERITED_PREFIXES = ("UV_INDEX", "UV_INSECURE", "PIP_", "LOCALCLOUD_MAXTEXT_")


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that every session on a VM sees; the runtime adds HOME, USER and the like.

    LOCALCLOUD_IMAGE chooses the image: `maxtext` (the default) or `stand_in`.
    Raises ValueError for another one, FileNotFoundError when there is no uv.
    """
    image = os.environ.get(IMAGE, IMAGES[0])
    if image not in IMAGES:
        raise ValueError(f"{IMAGE} is {image!r}; the images are {' and '.join(IMAGES)}")
    stand_in = image == "stand_in"
    uv = _uv()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED_NAMES or name.startswith(_INHERITED_PREFIXES)
    }
    no_proxy = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), _LOOPBACK)))
    return {
        **inherited,
        **_user_configuration(),
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        "PATH": ":".join([*([str(STAND_IN / "bin")] if stand_in else []), str(BIN), _SYSTEM_PATH]),
        "PYTHONPATH": str(STAND_IN / "site" if stand_in else SITE),
        "LOCALCLOUD_UV": uv,
        "LOCALCLOUD_PYTHON": _base_python(),
        # The stand-in needs a few packages, all of which are in the local cloud's own environment.
        **({"LOCALCLOUD_STAND_IN_PYTHON": sys.executable} if stand_in else {}),
        "LOCALCLOUD_TOY_MODEL": str(TOY_MODEL),
        "UV_CACHE_DIR": _uv_cache(uv),
        "UV_PYTHON_DOWNLOADS": "never",
        # The google-cloud-storage client is anonymous when an emulator is named; without NO_GCE_CHECK
        # google.auth still looks for a metadata server.
        "STORAGE_EMULATOR_HOST": settings.storage_endpoint,
        "TENSORSTORE_GCS_HTTP_URL": settings.storage_endpoint,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GOOGLE_CLOUD_PROJECT": PROJECT,
        "NO_GCE_CHECK": "true",
        "HF_ENDPOINT": settings.hub_endpoint,
        # With hf-xet installed the client asks for a Xet token and does not fall back when there is none.
        "HF_HUB_DISABLE_XET": "1",
        # train_rl takes whatever accelerator it finds: on the real VM the TPU, here the CPU.
        "JAX_PLATFORMS": "cpu",
    }


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise FileNotFoundError(
            f"uv is neither beside {sys.executable} nor on PATH; install requirements-dev.txt here"
        )
    return found


def _base_python() -> str:
    """Return the interpreter that this environment was made from, past all links: it finds its library."""
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    return str(Path(base).resolve())


@functools.cache
def _uv_cache(uv: str) -> str:
    """Return the host user's cache: each VM would otherwise download 1.4 GB."""
    answer = subprocess.run(
        [uv, "cache", "dir", "--color", "never"], capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def _user_configuration() -> dict[str, str]:
    """Return where uv and pip keep the host user's settings: the VM's home has none."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = {"UV_CONFIG_FILE": config / "uv" / "uv.toml", "PIP_CONFIG_FILE": config / "pip" / "pip.conf"}
    return {
        name: os.environ.get(name, str(path))
        for name, path in files.items()
        if name in os.environ or path.is_file()
    }
