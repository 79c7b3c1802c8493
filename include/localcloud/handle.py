"""A local cloud as an object, for tests, the demo and the benchmark: a process, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localcloud import clients, ports, processes
from localcloud.daemon import LOG_FILE
from localcloud.settings import BUCKET, PROJECT, ZONE, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

START_TIMEOUT_S = 60.0
_POLL_S = 0.05
_INCLUDE = Path(__file__).resolve().parent.parent
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class CloudUnreachable(RuntimeError):
    """The local cloud did not start, does not answer, or refused an order; the message says why."""


@dataclass(frozen=True)
class LocalCloud:
    """A running local cloud. As a context manager it is stopped at the end; its state stays."""

    settings: Settings
    project: str = PROJECT
    zone: str = ZONE
    bucket: str = BUCKET
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def start(
        cls,
        state_dir: Path,
        port: int | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a daemon in a session of its own and return once everything answers.

        :param port: the first of four ports; free ones are looked for when it is None.
        :param environment: variables beside this process's own (LOCALCLOUD_BOOT_SECONDS and the like).
        Raises AlreadyRunning, PortTaken, or CloudUnreachable with the end of the daemon's log.
        """
        settings = Settings(Path(state_dir).absolute(), ports.free_base() if port is None else port)
        cloud = cls(settings)
        if processes.running(settings) is not None:
            raise processes.AlreadyRunning(f"A local cloud runs on {settings.state_dir} already.")
        ports.check(settings)
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        log = settings.state_dir / LOG_FILE
        python_path = os.pathsep.join(filter(None, (str(_INCLUDE), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "localcloud", "up", "--foreground"),
                    *("--state", str(settings.state_dir), "--port", str(settings.port)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": python_path,
                    **(environment or {}),
                    **clients.environment(settings),
                },
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not cloud.healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                silent = process.returncode is None
                processes.stop(settings)
                process.wait()
                what = "did not answer in time" if silent else f"ended with status {process.returncode}"
                tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
                raise CloudUnreachable(f"The local cloud {what}. The end of {log}:\n{tail}")
            time.sleep(_POLL_S)
        return replace(cloud, _process=process)

    @property
    def compute_endpoint(self) -> str:
        """Base URL of the Compute Engine API, without /compute/v1."""
        return self.settings.compute_endpoint

    @property
    def storage_endpoint(self) -> str:
        """Base URL of Cloud Storage."""
        return self.settings.storage_endpoint

    @property
    def hub_endpoint(self) -> str:
        """Base URL of the Hub."""
        return self.settings.hub_endpoint

    def environment(self) -> dict[str, str]:
        """Return the variables that point gcloud and the client libraries at this cloud."""
        return clients.environment(self.settings)

    def healthy(self) -> bool:
        """Return whether everything of this cloud answers."""
        try:
            status = self.status()
        except CloudUnreachable:
            return False
        return bool(status["ready"]) and status["state_dir"] == str(self.settings.state_dir)

    def status(self) -> dict[str, Any]:
        """Return endpoints, VMs and meter. Raises CloudUnreachable when the daemon does not answer."""
        answer: dict[str, Any] = self._control("GET", "status")
        return answer

    def calls(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the Compute Engine API calls after call number `since`."""
        answer: list[dict[str, Any]] = self._control("GET", f"calls?since={since}")
        return answer

    def fault(self, **order: object) -> dict[str, Any]:
        """Give a fault order (docs/localcloud.md lists them); return what the daemon answers.

        Raises CloudUnreachable with the daemon's reason when it refuses the order.
        """
        answer: dict[str, Any] = self._control("POST", "faults", order)
        return answer

    def clear_faults(self, zone: str | None = None) -> int:
        """Forget all waiting fault orders, or those that name a zone; return how many there were."""
        answer: dict[str, int] = self._control("DELETE", f"faults?zone={zone}" if zone else "faults")
        return answer["cleared"]

    def stop(self) -> list[str]:
        """End the daemon, its VMs and its children; return what was ended. The state stays."""
        ended = processes.stop(self.settings)
        if self._process is not None:
            self._process.wait()  # it has ended; this takes its entry out of the process table
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _control(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  always http on loopback
            f"{self.compute_endpoint}/_localcloud/{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with _NO_PROXY.open(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                text = f"HTTP {error.code}: {text[:500]}"
            raise CloudUnreachable(str(text)) from error
        except OSError as error:
            raise CloudUnreachable(
                f"No local cloud answers at {self.compute_endpoint} ({error}). Start it with `localcloud up`."
            ) from error
