"""Publishes an export from the bucket and tells what that took: run by test_publish_size.py, never imported.

Arguments: the addresses of Cloud Storage and the Hub, the bucket's name, the folder in it, the repository. Prints a
JSON object: "idle" and "peak" resident bytes of this process, and "disk", the most bytes in temporary files.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from huggingface_hub import HfApi
from nightshift.export.manifest import Manifest
from nightshift.export.storage import Storage, storage_client
from nightshift.hub.publish import publish

if TYPE_CHECKING:
    from nightshift.export.manifest import FileEntry

SAMPLE_SECONDS = 0.01
_process = psutil.Process()


class Watch:
    """Looks at the process's memory and its temporary files, again and again."""

    def __init__(self, folder: Path) -> None:
        self.peak = self.disk = 0
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, _process.memory_info().rss)
            self.disk = max(self.disk, self._bytes_on_disk())

    def _bytes_on_disk(self) -> int:
        found = 0
        for path in self._folder.rglob("*"):
            try:
                found += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue  # it has gone since it was listed
        return found


def main(storage_endpoint: str, hub_endpoint: str, bucket: str, prefix: str, repo: str) -> None:
    """Publish and print the figures."""
    storage = Storage(storage_client(None, "rehearsal-project", storage_endpoint), bucket)
    manifest = Manifest.from_json(storage.read_text(f"{prefix}/manifest.json") or "")
    api = HfApi(endpoint=hub_endpoint, token="hf_rehearsal_write")
    api.whoami()  # both clients have loaded what they need

    def fetch(entry: FileEntry, path: Path) -> None:
        storage.download(f"{prefix}/model/{entry.path}", path)

    gc.collect()
    idle = _process.memory_info().rss
    with Watch(Path(tempfile.gettempdir())) as watch:
        done = publish(
            api, repo, private=True, manifest=manifest, fetch=fetch, message=manifest.run, tag=manifest.run
        )
    figures = {"idle": idle, "peak": watch.peak, "disk": watch.disk, "commit": done.commit}
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
