"""The list filter language."""

import pytest
from localcloud.compute.errors import ApiError
from localcloud.compute.filters import compile_filter

VM = {
    "name": "night-1",
    "status": "RUNNING",
    "id": "42",
    "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/us-east5-b",
    "labels": {"managed-by": "nightshift", "run": "night-1"},
    "scheduling": {"preemptible": False},
    "networkInterfaces": [{"networkIP": "10.0.0.1"}, {"networkIP": "10.0.0.2"}],
}


@pytest.mark.parametrize(
    "expression",
    [
        None,
        "",
        "labels.managed-by=nightshift",
        'labels.managed-by="nightshift"',
        "labels.managed-by:*",
        "labels.managed-by:night*",
        "name:ight",
        "name!=night-2",
        "labels.absent!=x",
        "status eq RUNNING",
        'name eq "night-[0-9]"',
        "name ne night-2",
        '(status eq RUNNING)(name eq ".*1")',
        "labels.run=night-1 AND labels.managed-by=nightshift",
        "labels.run=night-1 labels.managed-by=nightshift",
        "status=STOPPING OR status=RUNNING",
        "(status=STOPPING OR status=RUNNING) AND NOT name=night-2",
        "zone=us-east5-b",
        "scheduling.preemptible=false",
        "networkInterfaces.networkIP=10.0.0.2",
        "id>=42",
        "id<100",
    ],
)
def test_accepts(expression: str | None) -> None:
    assert compile_filter(expression)(VM)


@pytest.mark.parametrize(
    "expression",
    [
        "labels.managed-by=other",
        "labels.absent:*",
        "labels.absent=x",
        "status ne RUNNING",
        "name eq night",  # eq is a match of the whole value
        "NOT status=RUNNING",
        "status=RUNNING AND name=night-2",
        "status=STOPPING OR name=night-2",
        "status=RUNNING (name=night-2 OR name=night-3)",
        "id>42",
    ],
)
def test_excludes(expression: str) -> None:
    assert not compile_filter(expression)(VM)


@pytest.mark.parametrize(
    "expression", ["labels.a", "(status=RUNNING", "a = ", "status=RUNNING)", "name eq [", "a b c"]
)
def test_refuses_what_it_cannot_read(expression: str) -> None:
    with pytest.raises(ApiError, match="Invalid list filter expression") as refused:
        compile_filter(expression)
    assert refused.value.code == 400
