"""`localcloud fault …`: orders to misbehave, one subcommand each."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from localcloud.cli_options import PortOption, StateOption, cloud_at, fail, settings_of
from localcloud.handle import CloudUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from localcloud.handle import LocalCloud

faults = typer.Typer(
    no_args_is_help=True,
    help="Order a fault. preempt, host-error, expire and ssh act now; the others wait for their occasion.",
)

TimesOption = Annotated[int, typer.Option("--times", min=1, help="How often the order is carried out.")]
ZoneOption = Annotated[str | None, typer.Option("--zone", help="Only in this zone.", show_default=False)]
PathOption = Annotated[
    str, typer.Option("--path", help="Regular expression, searched in the path below /compute/v1/.")
]
MethodOption = Annotated[
    str | None, typer.Option("--method", help="GET, POST or DELETE.", show_default=False)
]


@contextmanager
def _cloud(state: Path | None, port: int | None) -> Iterator[LocalCloud]:
    try:
        yield cloud_at(settings_of(state, port))
    except CloudUnreachable as error:
        fail(str(error))


def _order(state: Path | None, port: int | None, **order: object) -> None:
    with _cloud(state, port) as cloud:
        answer = cloud.fault(**{key: value for key, value in order.items() if value is not None})
    typer.echo(json.dumps(answer, indent=2))


@faults.command()
def stockout(
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
    zone: ZoneOption = None,
    details: Annotated[bool, typer.Option("--details", help="The …_WITH_DETAILS form of the error.")] = False,
) -> None:
    """The next insert's operation ends with ZONE_RESOURCE_POOL_EXHAUSTED, and the instance is gone."""
    error = "stockout_details" if details else "stockout"
    _order(state, port, on="insert", error=error, times=times, zone=zone)


@faults.command()
def quota(
    state: StateOption = None, port: PortOption = None, times: TimesOption = 1, zone: ZoneOption = None
) -> None:
    """The next insert's operation ends with QUOTA_EXCEEDED for TPUS_PER_TPU_FAMILY."""
    _order(state, port, on="insert", error="quota", times=times, zone=zone)


@faults.command()
def insert(
    error: Annotated[
        str,
        typer.Argument(
            help="stockout, stockout_details, quota, reservation_not_ready, reservation_full, "
            "reservation_mismatch, not_ready or internal"
        ),
    ],
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
    zone: ZoneOption = None,
) -> None:
    """The next insert's operation ends with an error."""
    _order(state, port, on="insert", error=error, times=times, zone=zone)


@faults.command()
def delete(
    state: StateOption = None, port: PortOption = None, times: TimesOption = 1, zone: ZoneOption = None
) -> None:
    """The next delete's operation ends with INTERNAL_ERROR, and the instance stays."""
    _order(state, port, on="delete", error="internal", times=times, zone=zone)


@faults.command()
def http(
    code: Annotated[int, typer.Argument(min=400, max=599, help="HTTP status to answer with.")],
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
    path: PathOption = ".*",
    method: MethodOption = None,
    reason: Annotated[str, typer.Option(help="Google's reason word.")] = "backendError",
    message: Annotated[
        str | None, typer.Option(help="The message to answer with.", show_default=False)
    ] = None,
    retry_after: Annotated[
        int | None, typer.Option(help="Seconds, as Retry-After.", show_default=False)
    ] = None,
) -> None:
    """API requests are refused with an HTTP error."""
    _order(
        state,
        port,
        on="http",
        code=code,
        times=times,
        path=path,
        method=method,
        reason=reason,
        message=message,
        retry_after=retry_after,
    )


@faults.command("lost-response")
def lost_response(
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
    path: PathOption = ".*",
    method: MethodOption = None,
) -> None:
    """An API request is carried out, but the connection is cut before the answer."""
    _order(state, port, on="lost_response", times=times, path=path, method=method)


@faults.command()
def late(
    seconds: Annotated[float, typer.Argument(help="How long the next instance is shown to nobody.")],
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
) -> None:
    """The next insert is accepted, but its instance shows up late."""
    _order(state, port, on="late", seconds=seconds, times=times)


@faults.command()
def queue(
    seconds: Annotated[float, typer.Argument(help="How much longer the next instance stays PROVISIONING.")],
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
) -> None:
    """The next instance waits for capacity."""
    _order(state, port, on="queue", seconds=seconds, times=times)


@faults.command()
def boot(
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
    seconds: Annotated[float, typer.Option(help="From RUNNING to an answering SSH server.")] = 0.0,
    never: Annotated[bool, typer.Option("--never", help="SSH never answers.")] = False,
) -> None:
    """The next instance is RUNNING, but its SSH server answers late or never."""
    _order(state, port, on="boot", seconds=seconds, fail=never, times=times)


@faults.command()
def shm(
    size: Annotated[int, typer.Argument(help="Bytes that /dev/shm of the next VM can hold.")],
    state: StateOption = None,
    port: PortOption = None,
    times: TimesOption = 1,
) -> None:
    """The next VM has little memory for checkpoints."""
    _order(state, port, on="shm", bytes=size, times=times)


def _act_on_instance(on: str, text: str) -> None:
    @faults.command(on.replace("_", "-"), help=text)
    def act(
        instance: str, state: StateOption = None, port: PortOption = None, zone: ZoneOption = None
    ) -> None:
        _order(state, port, on=on, instance=instance, zone=zone)


_act_on_instance("preempt", "Take an instance away now, as a preemption does.")
_act_on_instance(
    "host_error", "Break an instance's host: it boots again (without /dev/shm) if automaticRestart is set."
)
_act_on_instance("expire", "End an instance now, as the end of its maxRunDuration does.")


@faults.command()
def ssh(
    instance: str,
    state: StateOption = None,
    port: PortOption = None,
    zone: ZoneOption = None,
    refuse: Annotated[
        float | None,
        typer.Option(help="Refuse new connections for so many seconds instead.", show_default=False),
    ] = None,
) -> None:
    """Cut all SSH connections of an instance now."""
    _order(
        state,
        port,
        on="ssh",
        instance=instance,
        zone=zone,
        kind="drop" if refuse is None else f"refuse:{refuse:g}",
    )


@faults.command()
def hub(
    order: Annotated[
        str, typer.Argument(help='The Hub\'s own order as JSON, such as \'{"on": "commit", "status": 429}\'.')
    ],
    state: StateOption = None,
    port: PortOption = None,
) -> None:
    """Pass a fault order on to the Hub."""
    try:
        parsed = json.loads(order)
    except ValueError as error:
        fail(f"The Hub's order is not JSON: {error}")
    _order(state, port, **{**parsed, "on": "hub"})


@faults.command("list")
def list_(state: StateOption = None, port: PortOption = None) -> None:
    """Show the orders that wait."""
    with _cloud(state, port) as cloud:
        waiting = cloud.status()["faults"]
    typer.echo(json.dumps(waiting, indent=2))


@faults.command()
def clear(state: StateOption = None, port: PortOption = None) -> None:
    """Forget the orders that wait."""
    with _cloud(state, port) as cloud:
        count = cloud.clear_faults()
    typer.echo(f"Forgot {count}.")
