"""Preflight: everything that can be found wrong before a TPU is billed, in one report.

Each check is a small function; one that fails never hides another. The report goes to the task's log as a
table, and to the reader as one error that carries every problem.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from nightshift.errors import (
    CapacityUnavailable,
    CloudUnavailable,
    ConfigurationRefused,
    NightshiftError,
    PreflightFailed,
)
from nightshift.hub import access
from nightshift.hub.errors import vm_token_advice
from nightshift.names import HUB_VM_CONNECTION
from nightshift.tpu.bodies import PUBLIC_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from huggingface_hub import HfApi

    from nightshift.export.storage import Storage
    from nightshift.hub.errors import RetryPolicy
    from nightshift.tpu.api import ComputeApi

_MAIN = "main"  # the branch that a client reads when no revision is named
_DETAIL_WIDTH = 100
_RESERVATION_ON_ITS_WAY = frozenset({"CREATING", "UPDATING"})


@dataclass(frozen=True)
class Finding:
    """What one check found.

    :param check: what was checked, in a few words.
    :param detail: the fact found, or the reason why it is wrong.
    :param next_step: what to do about it; empty when all is well.
    :param error: class of the error that the check met, when it met one.
    :param transient: the check could not be made now, which says nothing about the thing.
    :param warning: the run can start, but somebody should know of `detail`.
    """

    check: str
    ok: bool
    detail: str
    next_step: str = ""
    error: str = ""
    transient: bool = False
    warning: bool = False

    @property
    def state(self) -> str:
        """What the report's table calls it: ok, WARNING, UNKNOWN or PROBLEM."""
        if self.ok:
            return "WARNING" if self.warning else "ok"
        return "UNKNOWN" if self.transient else "PROBLEM"


@dataclass(frozen=True)
class Resolved:
    """What the recipe's names mean tonight; None where a check could not tell. Rows are counts."""

    model_revision: str | None = None
    dataset_revision: str | None = None
    train_rows: int | None = None
    eval_rows: int | None = None


@dataclass(frozen=True)
class Report:
    """All findings of a preflight, in the order of the checks."""

    findings: tuple[Finding, ...]
    resolved: Resolved = field(default_factory=Resolved)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are not well."""
        return tuple(finding for finding in self.findings if not finding.ok)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with which the run can start, but of which somebody should know."""
        return tuple(finding for finding in self.findings if finding.ok and finding.warning)

    def render(self) -> str:
        """Return the findings as an aligned table for a log: state, check, detail; the next step below it."""
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            texts = _wrapped(finding.detail)
            if finding.next_step and (finding.warning or not finding.ok):
                texts += [
                    f"{'-> ' if first else '   '}{line}" for first, line in _numbered(finding.next_step)
                ]
            for number, text in enumerate(texts):
                head = f"{finding.state:<7}  {finding.check:<{width}}" if number == 0 else " " * (width + 9)
                lines.append(f"{head}  {text}".rstrip())
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise when anything is wrong.

        :raises PreflightFailed: at least one real problem; the message carries all of them.
        :raises CloudUnavailable: nothing is known to be wrong, but something could not be asked now.
        """
        if not self.problems:
            return
        text = "".join(
            f"\n- {problem.check}: {problem.detail}"
            + (f"\n  Next: {problem.next_step}" if problem.next_step else "")
            for problem in self.problems
        )
        count = f"{len(self.problems)} of {len(self.findings)} checks"
        if all(problem.transient for problem in self.problems):
            raise CloudUnavailable(
                f"{count} could not be made now; nothing is billed:{text}",
                next_step="nothing: the task is tried again",
            )
        raise PreflightFailed(
            f"{count} failed; nothing is billed:{text}",
            next_step="fix these, then clear preflight with all that follows it; other form values need a new run",
        )


def _wrapped(text: str) -> list[str]:
    return [line for part in text.splitlines() for line in textwrap.wrap(part, _DETAIL_WIDTH) or [""]]


def _numbered(text: str) -> list[tuple[bool, str]]:
    return [(number == 0, line) for number, line in enumerate(_wrapped(text))]


@dataclass(frozen=True)
class Clients:
    """How to get the clients. Making one may fail (a connection is not defined): that is a finding too.

    :param vm_hub: the Hub with the token that the VM gets.
    """

    hub: Callable[[], HfApi]
    vm_hub: Callable[[], HfApi]
    storage: Callable[[], Storage]
    compute: Callable[[], ComputeApi]


@dataclass(frozen=True)
class Request:
    """What a run needs.

    :param also_read: further model repositories that the VM reads, at the head of their main branch.
    :param data_problem: takes the rows of the training and of the evaluation split and returns why they are
        not enough, or None.
    :param prefix: folder in the bucket, below which the run writes.
    :param publish_to: Hub repository to publish to; None when nothing is published.
    :param zones: in the order in which they are tried.
    :param reservation: its name, or projects/<project>/reservations/<name> for a shared one; None without one.
    :param ssh_public_key: one line of an OpenSSH public key; None when none is configured.
    :param publish_private: the visibility that the published model is to have; None accepts either.
    """

    model: str
    model_revision: str
    dataset: str
    dataset_subset: str
    dataset_revision: str
    train_split: str
    eval_split: str
    data_problem: Callable[[int, int], str | None]
    prefix: str
    publish_to: str | None
    zones: tuple[str, ...]
    machine_type: str
    image_project: str
    image_family: str
    reservation: str | None
    ssh_public_key: str | None
    publish_private: bool | None = None
    also_read: tuple[str, ...] = ()


class _Verdict(Exception):
    """What a check says that is not simply well."""

    def __init__(self, detail: str, next_step: str) -> None:
        super().__init__(detail)
        self.detail, self.next_step = detail, next_step


class _Problem(_Verdict):
    """Something is not as the run needs it."""


class _Warning(_Verdict):
    """The run can do without it."""


def preflight(request: Request, clients: Clients, *, policy: RetryPolicy = access.READ) -> Report:
    """Make every check and return the report; raises nothing for what it finds.

    :param policy: how patiently the Hub is asked.
    """
    run = _Preflight(request, clients, policy)
    for check, function in run.checks():
        run.findings.append(_find(check, function))
    resolved = Resolved(run.model_revision, run.dataset_revision, run.train_rows, run.eval_rows)
    return Report(tuple(run.findings), resolved)


def _find(check: str, function: Callable[[], str]) -> Finding:
    try:
        return Finding(check, ok=True, detail=function())
    except _Problem as problem:
        return Finding(check, ok=False, detail=problem.detail, next_step=problem.next_step)
    except _Warning as warning:
        return Finding(check, ok=True, detail=warning.detail, next_step=warning.next_step, warning=True)
    except NightshiftError as error:
        return Finding(
            check,
            ok=False,
            detail=error.message,
            next_step=error.next_step,
            error=type(error).__name__,
            transient=error.retryable,
        )
    except Exception as error:  # noqa: BLE001  a check that breaks must not hide what the others find
        name = type(error).__name__
        return Finding(
            check,
            ok=False,
            detail=f"the check itself failed: {name}: {error}",
            next_step="read the error; a missing Airflow connection shows here as well",
            error=name,
        )


@dataclass
class _Preflight:
    request: Request
    clients: Clients
    policy: RetryPolicy
    findings: list[Finding] = field(default_factory=list)
    identity: access.Identity | None = None
    zone_states: dict[str, str | None] = field(default_factory=dict)
    model_revision: str | None = None
    dataset_revision: str | None = None
    train_rows: int | None = None
    eval_rows: int | None = None

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        """Return the checks that this run needs, by name."""
        request = self.request
        checks: list[tuple[str, Callable[[], str]]] = [
            ("Hugging Face token", self._token),
            ("token for the VM", self._vm_token),
            ("model and licence", self._model),
            ("model for the VM", self._model_on_vm),
            *((f"licence of {repo}", partial(self._also_read, repo)) for repo in request.also_read),
            ("dataset", self._dataset),
            ("dataset for the VM", self._dataset_on_vm),
            ("enough data", self._rows),
            ("bucket", self._bucket),
        ]
        if request.publish_to:
            checks.append(("publishing", self._publishing))
        if not request.zones:
            checks.append(("zone", self._no_zone))
        for zone in request.zones:
            checks.append((f"zone {zone}", partial(self._zone, zone)))
            checks.append((f"machine type in {zone}", partial(self._machine_type, zone)))
            if request.reservation:
                checks.append((f"reservation in {zone}", partial(self._reservation, zone)))
        checks += [("image", self._image), ("SSH key", self._ssh_key)]
        return checks

    def _identity(self) -> access.Identity:
        # Once: the Hub limits this question strictly.
        if self.identity is None:
            self.identity = access.identify(self.clients.hub(), policy=self.policy)
        return self.identity

    def _token(self) -> str:
        who = self._identity()
        return f"token of {who.name}, role {who.role or 'unknown'}"

    def _vm_token(self) -> str:
        who = access.identify(self.clients.vm_hub(), policy=self.policy)
        if problem := access.more_than_reads(who):
            raise _Problem(
                f"{problem}, and whatever runs on the VM could use it",
                vm_token_advice(HUB_VM_CONNECTION),
            )
        return f"token of {who.name}, which may only read"

    def _model(self) -> str:
        repo, revision = self.request.model, self.request.model_revision
        self.model_revision = access.resolve_model(self.clients.hub(), repo, revision, policy=self.policy)
        return f"{repo}@{revision} is {self.model_revision}, licence accepted"

    def _model_on_vm(self) -> str:
        repo = self.request.model
        revision = self.model_revision or self.request.model_revision
        access.resolve_model(self.clients.vm_hub(), repo, revision, policy=self.policy)
        return f"{repo}@{revision} can be read with the VM's token"

    def _also_read(self, repo: str) -> str:
        access.resolve_model(self.clients.vm_hub(), repo, _MAIN, policy=self.policy)
        return f"{repo} can be read, licence accepted"

    def _dataset(self) -> str:
        repo, revision = self.request.dataset, self.request.dataset_revision
        self.dataset_revision = access.resolve_dataset(self.clients.hub(), repo, revision, policy=self.policy)
        return f"{repo}@{revision} is {self.dataset_revision}"

    def _dataset_on_vm(self) -> str:
        repo = self.request.dataset
        revision = self.dataset_revision or self.request.dataset_revision
        access.resolve_dataset(self.clients.vm_hub(), repo, revision, policy=self.policy)
        return f"{repo}@{revision} can be read with the VM's token"

    def _rows(self) -> str:
        request = self.request
        hub = self.clients.hub()
        # An unresolved revision has its own finding; counting by its name still tells more than not counting.
        revision = self.dataset_revision or request.dataset_revision

        def count(split: str) -> int | None:
            return access.split_rows(
                hub, request.dataset, request.dataset_subset, split, revision, policy=self.policy
            )

        self.train_rows, self.eval_rows = count(request.train_split), count(request.eval_split)
        if self.train_rows is None or self.eval_rows is None:
            return "the number of rows is not to be had from this dataset's format: not checked"
        facts = f"{request.train_split} {self.train_rows} rows, {request.eval_split} {self.eval_rows} rows"
        if problem := request.data_problem(self.train_rows, self.eval_rows):
            raise _Problem(
                f"{problem} ({facts})",
                "lower num_batches or batch size in the recipe, or name a larger split",
            )
        return facts

    def _bucket(self) -> str:
        storage = self.clients.storage()
        storage.probe_writable(self.request.prefix)
        return f"gs://{storage.bucket}/{self.request.prefix.strip('/')} can be written"

    def _publishing(self) -> str:
        repo = self.request.publish_to or ""
        who = self._identity()
        if problem := access.can_write(who, repo):
            raise _Problem(
                problem, "give the connection a token with write access, or name another repository"
            )
        private = access.visibility(self.clients.hub(), repo, policy=self.policy)
        if private is None:
            return f"{who.name} may write to {repo}, which is to be created"
        is_now = "private" if private else "public"
        if self.request.publish_private not in {None, private}:
            raise _Problem(
                f"{repo} is {is_now}, the recipe says {'public' if private else 'private'}",
                "change the repository's visibility on the Hub, or the recipe",
            )
        return f"{who.name} may write to {repo}, which is {is_now}"

    def _no_zone(self) -> str:
        raise _Problem("the recipe names no zone", "name at least one in tpu.zones")

    def _zone_state(self, zone: str) -> str | None:
        if zone not in self.zone_states:
            self.zone_states[zone] = self.clients.compute().zone_status(zone)
        return self.zone_states[zone]

    def _zone(self, zone: str) -> str:
        state = self._zone_state(zone)
        if state is None:
            raise _Problem(
                f"there is no zone {zone}",
                "correct tpu.zones in the recipe; list what there is: gcloud compute zones list",
            )
        if state == "UP":
            return "UP"
        others = [other for other in self.request.zones if other != zone and self._zone_state(other) == "UP"]
        if others:
            raise _Warning(f"{zone} is {state}", f"nothing: the run can start in {', '.join(others)}")
        raise _Problem(
            f"{zone} is {state}, and no other zone of the recipe is UP",
            "add a zone to tpu.zones, or wait for the end of the outage: https://status.cloud.google.com",
        )

    def _machine_type(self, zone: str) -> str:
        machine_type = self.request.machine_type
        if not self.clients.compute().has_machine_type(zone, machine_type):
            raise _Problem(
                f"{zone} does not offer {machine_type}",
                f"list zones: gcloud compute machine-types list --filter=name={machine_type}",
            )
        return f"{machine_type} is offered"

    def _reservation(self, zone: str) -> str:
        name = self.request.reservation or ""
        status = self.clients.compute().reservation_status(zone, name)
        if status is None:
            raise _Problem(
                f"there is no reservation {name} in {zone}",
                f"list them: gcloud compute reservations list --filter=zone:{zone}",
            )
        if status in _RESERVATION_ON_ITS_WAY:
            raise CapacityUnavailable(
                f"reservation {name} is {status}, not READY yet", next_step="wait for it"
            )
        if status != "READY":
            raise _Problem(
                f"reservation {name} is {status}, not READY",
                f"see it: gcloud compute reservations describe {name} --zone={zone}",
            )
        return f"{name} is READY"

    def _image(self) -> str:
        project, family = self.request.image_project, self.request.image_family
        image = self.clients.compute().image_from_family(project, family)
        if image is None:
            raise ConfigurationRefused(
                f"there is no image of family {family} in project {project}",
                next_step=f"list them: gcloud compute images list --project={project} --no-standard-images",
            )
        return f"{image} is the newest of {family}"

    def _ssh_key(self) -> str:
        key = (self.request.ssh_public_key or "").strip()
        if not key:
            raise _Problem(
                "there is no SSH key to reach the VM with",
                "make one (ssh-keygen -t ed25519) and put the private key into the SSH connection",
            )
        if not PUBLIC_KEY.fullmatch(key):
            raise _Problem(
                "the SSH key is not one line of an OpenSSH public key",
                "give the content of a .pub file (ssh-ed25519 AAAA…)",
            )
        return f"{key.split()[0]} key is configured"
