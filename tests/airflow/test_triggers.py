"""Triggers: what of them lies in the database."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk._shared.module_loading import import_string
from airflow.sdk.serde import deserialize, serialize
from nightshift import names
from nightshift.airflow.paths import RECIPES
from nightshift.airflow.triggers.remote_job import RemoteJobTrigger
from nightshift.airflow.triggers.vm_ready import VmReadyTrigger
from nightshift.recipe import load_recipe
from nightshift.tpu import lease
from nightshift.tpu.bodies import InstanceSpec, instance_body

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

RECIPE = load_recipe(RECIPES / "rehearsal.yaml")
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== somebody"


def remote_job() -> RemoteJobTrigger:
    return RemoteJobTrigger(
        job_id="run.train.17",
        address="10.0.0.2",
        host_keys=["ssh-ed25519 AAAA"],
        ssh_conn_id="nightshift_ssh",
        project="p",
        zone="us-east5-b",
        instance="a-run",
        instance_id="17",
        attempt=1,
        offset=4711,
        total_steps=32,
    )


def vm_ready() -> VmReadyTrigger:
    expires = datetime(2027, 1, 1, tzinfo=UTC)
    requests = [
        lease.LeaseRequest(
            run="a-run",
            recipe=RECIPE.name,
            zone=zone,
            body=instance_body(
                InstanceSpec(
                    name="a-run",
                    project="p",
                    zone=zone,
                    machine_type=RECIPE.tpu.machine_type,
                    provisioning=RECIPE.tpu.provisioning,
                    labels=names.labels(RECIPE.name, "a-run", installation="tests", expires=expires),
                    dag_id=names.dag_id(RECIPE.name),
                    run_id="manual__1",
                    ssh_user="nightshift",
                    ssh_public_key=PUBLIC_KEY,
                )
            ),
        )
        for zone in ("us-east5-b", "us-east5-a")
    ]
    return VmReadyTrigger(
        project="p",
        requests=[asdict(request) for request in requests],
        discard="4711",
        queue_seconds=9000.0,
        boot_seconds=1200.0,
    )


@pytest.fixture(params=[remote_job, vm_ready], ids=["remote_job", "vm_ready"])
def trigger(request: pytest.FixtureRequest) -> BaseTrigger:
    made: BaseTrigger = request.param()
    return made


def test_a_trigger_comes_out_of_the_database_as_it_went_in(trigger: BaseTrigger) -> None:
    path, kwargs = trigger.serialize()
    stored = json.dumps(serialize(kwargs))
    arguments: Any = deserialize(json.loads(stored))
    twin = import_string(path)(**arguments)
    assert type(twin) is type(trigger)
    assert twin.serialize() == (path, kwargs)


def test_a_trigger_carries_no_secret(trigger: BaseTrigger) -> None:
    stored = json.dumps(serialize(trigger.serialize()[1])).lower()
    for word in ("private", "hf_", "password", "token", "begin openssh"):
        assert word not in stored, word


def test_a_remote_job_is_named_by_its_vms_incarnation() -> None:
    # After a clear the new execute() may run before the old on_kill: what is killed must not be the new job.
    assert names.job_id("run", "train", "17") == remote_job().job_id
    assert names.job_id("run", "train", "18") != remote_job().job_id
