"""A running local Hub with small seeds of its own, and real clients for it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from huggingface_hub import HfApi, constants
from localcloud.hub.app import create_app
from localcloud.hub.tokens import NO_LICENCE_TOKEN, READ_TOKEN, WRITE_TOKEN
from localcloud.settings import Settings

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "openai/gsm8k"


@dataclass
class RunningHub:
    """A Hub on a port of its own."""

    settings: Settings
    seeds: Path
    endpoint: str = ""
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.settings, seeds=self.seeds)
        config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join()

    def api(self, token: str | bool = WRITE_TOKEN) -> HfApi:
        return HfApi(endpoint=self.endpoint, token=token)

    def fault(self, **order: object) -> None:
        httpx.post(f"{self.endpoint}/_localcloud/faults", json=order).raise_for_status()

    def requests(self, since: int = 0) -> list[dict[str, object]]:
        answer = httpx.get(f"{self.endpoint}/_localcloud/requests", params={"since": since})
        return answer.raise_for_status().json()


@pytest.fixture(autouse=True)
def _client_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """Return the hub.json of a gated model and an open dataset."""
    root = tmp_path / "seeds"
    model, data = root / "model", root / "data"
    model.mkdir(parents=True)
    (data / "main").mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}\n')
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (data / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: main/train-*\n---\nQuestions.\n"
    )
    pq.write_table(pa.table({"question": ["1+1?"], "answer": ["2"]}), data / "main" / "train-00000.parquet")
    listing = {
        "repos": [
            {"kind": "model", "id": MODEL, "path": "model", "gated": "manual", "license": "llama3.1"},
            {"kind": "dataset", "id": DATASET, "path": "data", "gated": False, "license": "mit"},
        ]
    }
    (root / "hub.json").write_text(json.dumps(listing))
    return root / "hub.json"


@pytest.fixture
def hub(tmp_path: Path, seeds: Path) -> Iterator[RunningHub]:
    hub = RunningHub(Settings(state_dir=tmp_path / "state"), seeds)
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def api(hub: RunningHub) -> HfApi:
    """Return a client that may write."""
    return hub.api(WRITE_TOKEN)


@pytest.fixture(params=[READ_TOKEN, NO_LICENCE_TOKEN, False], ids=["read", "nolicence", "anonymous"])
def weak_api(hub: RunningHub, request: pytest.FixtureRequest) -> HfApi:
    """Return a client that lacks something."""
    return hub.api(request.param)


@pytest.fixture
def repo(api: HfApi) -> str:
    """Return the id of an empty model repository."""
    return api.create_repo("nightshift-rehearsal/Llama-test").repo_id


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write(name: str, content: bytes) -> Path:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return write
