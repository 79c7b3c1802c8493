"""The local cloud's daemon: Compute Engine, the Hub, Cloud Storage and the VMs on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx

from localcloud import ports, processes
from localcloud.webserver import server

if TYPE_CHECKING:
    import socket

    from localcloud.settings import Settings

log = logging.getLogger(__name__)

LOG_FILE = "daemon.log"
HUB_FAULTS = "/_localcloud/faults"


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then end every VM, child process and port.

    Raises AlreadyRunning, PortTaken, or what keeps one of the services from starting.
    """
    # Every child carries the mark by which `localcloud down` finds what a killed daemon has left.
    os.environ["LOCALCLOUD_STATE"] = str(settings.state_dir)
    os.environ["LOCALCLOUD_PORT"] = str(settings.port)
    with processes.claim(settings):
        logging.basicConfig(
            filename=settings.state_dir / LOG_FILE,
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("asyncssh").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        try:
            asyncio.run(_serve(settings))
        except BaseException:
            log.exception("the local cloud ends")
            raise


async def _serve(settings: Settings) -> None:
    # These load an SSH server and two web applications: time that `localcloud status` need not spend.
    from localcloud.compute.app import ComputeCloud
    from localcloud.hub.app import create_app
    from localcloud.storage import StorageServer
    from localcloud.vm.image import environment
    from localcloud.vm.runtime import VmRuntime

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async def hub_fault(order: dict[str, Any] | None) -> object:
        async with httpx.AsyncClient(base_url=settings.hub_endpoint, trust_env=False) as client:
            answer = await (
                client.delete(HUB_FAULTS) if order is None else client.post(HUB_FAULTS, json=order)
            )
            if answer.is_error:
                raise ValueError(f"The Hub refuses the order: {answer.text}")
            return answer.json()

    async with AsyncExitStack() as stack:
        compute_socket = ports.bind(settings.port, "Compute Engine")
        stack.callback(compute_socket.close)
        hub_socket = ports.bind(settings.port + 2, "the Hub")
        stack.callback(hub_socket.close)

        storage = StorageServer(settings)
        await storage.start()
        stack.push_async_callback(storage.stop)

        await _start(stack, create_app(settings), hub_socket, "the Hub")
        cloud = ComputeCloud(
            settings, VmRuntime(settings), environment=environment(settings), hub_fault=hub_fault
        )
        stack.push_async_callback(cloud.close)
        await _start(stack, cloud.app, compute_socket, "Compute Engine")
        await cloud.start()
        cloud.ready = True
        log.info(
            "ready: %s %s %s", settings.compute_endpoint, settings.storage_endpoint, settings.hub_endpoint
        )
        await stop.wait()
        log.info("ending")
    log.info("ended")


async def _start(stack: AsyncExitStack, app: object, listener: socket.socket, name: str) -> None:
    """Serve an application until the stack is unwound. Raises RuntimeError when it does not start."""
    web = server(app)
    task = asyncio.create_task(web.serve(sockets=[listener]), name=name)

    async def end() -> None:
        web.should_exit = True
        await task

    stack.push_async_callback(end)
    while not web.started:
        if task.done():
            await task
            raise RuntimeError(f"{name} did not start; see {LOG_FILE}.")
        await asyncio.sleep(0.01)
