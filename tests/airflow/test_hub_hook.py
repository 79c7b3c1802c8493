"""Which Hub token goes to the VM: one that is known to read only, or none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from nightshift import names
from nightshift.airflow.hooks.hub import HubHook
from nightshift.errors import AccessDenied
from rehearsal.settings import READ_TOKEN, WRITE_TOKEN

if TYPE_CHECKING:
    from localcloud.handle import LocalCloud


def define(monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud, **tokens: str | None) -> None:
    for conn_id, token in tokens.items():
        value = {"conn_type": "generic", "host": cloud.hub_endpoint, "password": token}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(value))


def test_the_vm_gets_the_token_of_its_own_connection(
    monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud
) -> None:
    tokens = {names.HUB_CONNECTION: WRITE_TOKEN, names.HUB_VM_CONNECTION: READ_TOKEN}
    define(monkeypatch, cloud, **tokens)
    assert HubHook().token() == WRITE_TOKEN
    assert HubHook().vm_token() == READ_TOKEN


def test_without_it_the_vm_gets_the_only_token_when_that_reads_only(
    monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud
) -> None:
    define(monkeypatch, cloud, **{names.HUB_CONNECTION: READ_TOKEN})
    assert HubHook().vm_token() == READ_TOKEN


@pytest.mark.parametrize("conn_id", [names.HUB_CONNECTION, names.HUB_VM_CONNECTION])
def test_a_token_that_may_write_never_leaves_airflow(
    monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud, conn_id: str
) -> None:
    define(monkeypatch, cloud, **{names.HUB_CONNECTION: WRITE_TOKEN, conn_id: WRITE_TOKEN})
    with pytest.raises(AccessDenied) as raised:
        HubHook().vm_token()
    assert "has the role write" in raised.value.message
    assert "connection nightshift_huggingface_vm" in raised.value.next_step
    assert WRITE_TOKEN not in str(raised.value)


def test_a_connection_without_a_token_is_named(monkeypatch: pytest.MonkeyPatch, cloud: LocalCloud) -> None:
    tokens = {names.HUB_CONNECTION: WRITE_TOKEN, names.HUB_VM_CONNECTION: None}
    define(monkeypatch, cloud, **tokens)
    with pytest.raises(AccessDenied, match="nightshift_huggingface_vm"):
        HubHook().vm_token()
