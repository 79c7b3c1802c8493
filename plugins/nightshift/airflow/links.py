"""Buttons on a task: the VM, the run's folder in the bucket, the Hub repository.

An operator pushes an address under its link's key as soon as it knows it, so that the button works while the task
still runs; `get_link`, which Airflow calls when the task has ended, returns the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

_CONSOLE = "https://console.cloud.google.com"


class _PushedLink(BaseOperatorLink):
    """A link whose address the operator has pushed."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address that was pushed, or nothing."""
        value = BaseXCom.get_value(ti_key=ti_key, key=self.xcom_key)  # type: ignore[arg-type]
        return str(value) if value else ""


class VmLink(_PushedLink):
    """The instance in the console."""

    name = "TPU VM"


class BucketLink(_PushedLink):
    """The run's folder in the bucket."""

    name = "Bucket folder"


class HubLink(_PushedLink):
    """The repository on the Hub."""

    name = "Hub repository"


def vm_address(project: str, zone: str, name: str, endpoint: str | None) -> str:
    """Return where a person sees the instance: the console, or the resource itself on another endpoint."""
    if endpoint:
        return f"{endpoint}/compute/v1/projects/{project}/zones/{zone}/instances/{name}"
    return f"{_CONSOLE}/compute/instancesDetail/zones/{zone}/instances/{name}?project={project}"


def bucket_address(bucket: str, prefix: str, endpoint: str | None) -> str:
    """Return where a person sees the folder: the console, or its listing on another endpoint."""
    if endpoint:
        return f"{endpoint}/storage/v1/b/{bucket}/o?prefix={prefix}/"
    return f"{_CONSOLE}/storage/browser/{bucket}/{prefix}"


def hub_address(endpoint: str, repo: str) -> str:
    """Return the repository's page."""
    return f"{endpoint}/{repo}"
