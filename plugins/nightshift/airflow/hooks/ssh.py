"""The SSH connection that every TPU VM is reached with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import asyncssh
from airflow.providers.common.compat.connection import get_async_connection
from airflow.sdk import BaseHook

from nightshift.errors import ConfigurationRefused
from nightshift.names import SSH_CONNECTION
from nightshift.remote.job import SshTarget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from airflow.sdk import Connection

# It tells of every packet at INFO, and a task's log is for people.
logging.getLogger("asyncssh").setLevel(logging.WARNING)

DEFAULT_USER = "nightshift"
DEFAULT_PORT = 22


class VmSshHook(BaseHook):
    """A connection of type `ssh`: its login, port and private key serve for all VMs; its host is not used.

    The key stands in the extra as the ssh provider writes it: `private_key` (text) or `key_file` (a path on the
    worker), with `private_key_passphrase` where it has one.

    :param ssh_conn_id: the connection.
    """

    conn_name_attr = "ssh_conn_id"
    default_conn_name = SSH_CONNECTION

    def __init__(self, ssh_conn_id: str = SSH_CONNECTION) -> None:
        super().__init__()
        self.ssh_conn_id = ssh_conn_id

    def target(self, address: str, host_keys: Sequence[str]) -> SshTarget:
        """Return how to reach the VM at `address`, which has to show one of `host_keys`."""
        return _target(self.get_connection(self.ssh_conn_id), address, host_keys)

    async def async_target(self, address: str, host_keys: Sequence[str]) -> SshTarget:
        """Return the same from the triggerer's event loop."""
        return _target(await get_async_connection(self.ssh_conn_id), address, host_keys)

    def username(self) -> str:
        """Return the user that the key is installed for on the VM."""
        return _username(self.get_connection(self.ssh_conn_id))

    def public_key(self) -> str:
        """Return the public half in OpenSSH's format.

        Raises ConfigurationRefused when the connection holds no usable key.
        """
        connection = self.get_connection(self.ssh_conn_id)
        key = asyncssh.import_private_key(_private_key(connection))
        return str(key.export_public_key().decode().strip())


def _username(connection: Connection) -> str:
    return connection.login or DEFAULT_USER


def _private_key(connection: Connection) -> str:
    extra = connection.extra_dejson
    text = extra.get("private_key")
    if not text and (path := extra.get("key_file")):
        text = _read(connection, path)
    if not text:
        raise ConfigurationRefused(
            f"Connection {connection.conn_id!r} holds no SSH key",
            next_step=f"put the private key's text into extra.private_key of connection {connection.conn_id}",
        )
    try:
        key = asyncssh.import_private_key(text, passphrase=extra.get("private_key_passphrase"))
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise ConfigurationRefused(
            f"The SSH key of connection {connection.conn_id!r} cannot be read: {error}",
            next_step="use an OpenSSH or PEM private key, and extra.private_key_passphrase if it has one",
        ) from error
    return str(key.export_private_key().decode())


def _read(connection: Connection, path: Path | str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationRefused(
            f"Connection {connection.conn_id!r} names key_file {path}, which cannot be read: {error.strerror}",
            next_step="use a path that exists on every worker and triggerer, or extra.private_key",
        ) from error


def _target(connection: Connection, address: str, host_keys: Sequence[str]) -> SshTarget:
    return SshTarget(
        host=address,
        port=connection.port or DEFAULT_PORT,
        username=_username(connection),
        private_key=_private_key(connection),
        host_keys=tuple(host_keys),
    )
