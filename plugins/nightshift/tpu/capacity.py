"""Get a TPU VM from the first of several zones that has one.

`Search` takes one look at a time and says how long to wait until the next; it never sleeps itself, so the triggerer
can wait for hundreds of runs without a thread for each. `wait_ready` is the same for a caller that may block.

What makes it safe to repeat, whoever died in the middle:

- All state is in Compute Engine. A new Search finds the run's instance by its labels, and an insert whose instance
  is not visible yet among the zone's operations. Only when there is neither, anything is asked for.
- An insert without a clear answer is repeated in the same zone under the same request id. That id is made from the
  last insert of the name that is over, so what has failed is never replayed.
- One zone at a time: the next one is asked when the last insert is known to have failed.
- Before a VM counts as ready, the run must have no other; of several the oldest that is RUNNING stays.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nightshift.errors import (
    AccessDenied,
    BootTimedOut,
    CapacityUnavailable,
    CloudUnavailable,
    ConfigurationRefused,
    NightshiftError,
    QueueTimedOut,
    TransientError,
    VmLost,
)
from nightshift.tpu.classify import AlreadyExists, OperationFailed
from nightshift.tpu.lease import DONE, GOING, OVER, RUNNING, Ready, by_preference, is_ours, locate
from nightshift.tpu.loss import explain_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nightshift.tpu.api import ComputeApi, Instance
    from nightshift.tpu.lease import LeaseRequest, Limits

_REQUESTS: Final = uuid.uuid5(uuid.NAMESPACE_URL, "nightshift:compute-request")
_FIRST: Final = "first"
_QUEUED: Final = frozenset({"PENDING", "PROVISIONING"})  # PENDING: Flex-start waits for capacity

#: How often an insert may get no clear answer (503, timeout) while every look shows that nothing came of it, before
#: that counts as the zone's answer: a zone that is full says 503 too.
UNANSWERED_LIMIT: Final = 4
#: The longest pause, in seconds, while the API does not answer.
LONGEST_SILENCE: Final = 60.0
#: A phase that has lasted for n seconds is looked at every n / PATIENCE seconds, within these bounds (in polls).
PATIENCE: Final = 20.0
SLOWEST: Final = 5.0
#: The longest time, in seconds, that a blocking wait sleeps without asking whether the VM is still wanted.
STOP_CHECK: Final = 5.0


class NoLongerWanted(Exception):
    """No error: whoever wanted the VM does not want it any more. Nothing more is asked for."""


@dataclass(frozen=True)
class Backoff:
    """Pauses, in seconds, once every zone has said no: they double from `first` to `longest`, less a random part."""

    first: float = 30.0
    longest: float = 300.0

    def pause(self, rounds: int, jitter: random.Random) -> float:
        """Return the pause after so many rounds (0: the first), between a half and the whole of its length."""
        return jitter.uniform(0.5, 1.0) * min(self.longest, self.first * 2.0 ** min(rounds, 16))


@dataclass
class _Claim:
    """What the search holds on to.

    :param operation: the insert that is not yet known to be over.
    :param instance_id: once the instance has been seen.
    """

    request: LeaseRequest
    operation: str | None
    instance_id: str | None
    since: float
    seen: str = "asked for, and not to be seen yet"


def request_uuid(run: str, zone: str, attempt: str, after: str) -> str:
    """Return the request id of one insert: the same arguments ask for the same VM only once.

    :param after: the name of the last insert that is over.
    """
    return str(uuid.uuid5(_REQUESTS, "\0".join((run, zone, attempt, after))))


def wait_ready(
    api: ComputeApi,
    requests: Sequence[LeaseRequest],
    *,
    limits: Limits,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    jitter: random.Random | None = None,
    on_change: Callable[[str], None] = lambda _line: None,
    discard: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
    poll_seconds: float = 5.0,
) -> Ready:
    """Repeat `Search.look` until the VM is ready. Parameters and errors are those of Search.

    :param sleep: called with seconds between two looks.
    """
    search = Search(
        api,
        requests,
        limits=limits,
        clock=clock,
        jitter=jitter,
        on_change=on_change,
        discard=discard,
        stopped=stopped,
        poll_seconds=poll_seconds,
    )
    while True:
        found = search.look()
        if isinstance(found, Ready):
            return found
        while found > 0 and not stopped():
            pause = min(found, STOP_CHECK)
            sleep(pause)
            found -= pause


class Search:
    """The search for one VM. Not to be used by two threads at once.

    :param requests: one per zone, in the order in which they are asked. An instance of the run that is there already
        decides in which zone the search goes on.
    :param clock: a monotonic clock, in seconds.
    :param jitter: the random source of the back-off.
    :param on_change: gets a line for the log whenever something changed.
    :param discard: id of an instance that is of no use any more and has to be gone before another is asked for.
    :param stopped: whether the VM is not wanted any more; asked before everything that changes something.
    :param poll_seconds: between two looks while something is going on; longer phases are looked at less often.
    :param waited: seconds that count against `limits.queue` already.
    """

    def __init__(
        self,
        api: ComputeApi,
        requests: Sequence[LeaseRequest],
        *,
        limits: Limits,
        clock: Callable[[], float],
        jitter: random.Random | None = None,
        on_change: Callable[[str], None] = lambda _line: None,
        discard: str | None = None,
        stopped: Callable[[], bool] = lambda: False,
        poll_seconds: float = 5.0,
        backoff: Backoff = Backoff(),
        waited: float = 0.0,
    ) -> None:
        if not requests:
            raise ValueError("a search needs at least one zone")
        self._api = api
        self._requests = tuple(requests)
        self._zones = tuple(request.zone for request in requests)
        self._run = requests[0].run
        self._installation = requests[0].installation
        self._limits = limits
        self._clock = clock
        self._jitter = jitter or random.SystemRandom()
        self._on_change = on_change
        self._discard = discard
        self._stopped = stopped
        self._poll = poll_seconds
        self._backoff = backoff
        self._began = clock() - waited
        self._claim: _Claim | None = None
        self._next = 0  # index of the zone that is asked next
        self._rounds = 0
        self._not_before = clock()
        self._answers: dict[str, str] = {}
        self._over: dict[str, str] = {}  # zone → the last insert there that is over
        self._booting: tuple[str, float] | None = None  # instance id, and since when
        self._alone: str | None = None  # id of the instance beside which the run has no other
        self._unanswered = 0
        self._silences = 0
        self._told = ""
        #: Every instance of the run that this search has met, by id: also one that was lost before it was ready.
        self.met: dict[str, Instance] = {}
        #: The ids of those that it has deleted, because they were of no use or one too many.
        self.removed: set[str] = set()

    def look(self) -> Ready | float:
        """Take one look, do what follows from it, and return the VM, or after how many seconds to look again.

        Raises QueueTimedOut, BootTimedOut, NoLongerWanted, and what cannot be helped by waiting or by another zone
        (QuotaExceeded, AccessDenied, ConfigurationRefused). A service that does not answer is waited for.
        """
        try:
            found = self._step()
        except CloudUnavailable as error:
            self._silences += 1
            self._tell(error.message)
            found = min(LONGEST_SILENCE, self._poll * 2.0 ** min(self._silences, 16))
        else:
            self._silences = 0
        if isinstance(found, Ready):
            return found
        return max(0.0, min(found, self._time_left()))

    def no_answer(self, error: NightshiftError) -> None:
        """Note that a ready VM does not let us in yet. Raises once `limits.boot` is over.

        :param error: of the last knock: BootTimedOut is raised for HostUnreachable; AccessDenied is raised as it is,
            for a key that was refused all the time would be refused by the next VM as well.
        """
        claim = self._claim
        if claim is None or self._booting is None:
            return
        lasted = self._clock() - self._booting[1]
        if lasted < self._limits.boot:
            return
        where = f"{claim.request.zone}/{claim.request.name}"
        billed = f"instance {where} ({claim.request.machine_type}) until it is deleted"
        if isinstance(error, AccessDenied):
            raise AccessDenied(error.message, next_step=error.next_step, billed=billed)
        raise BootTimedOut(
            f"{where} is RUNNING, but has not answered by SSH for {lasted:.0f} s "
            f"(limit {self._limits.boot:.0f} s); last: {error.message}",
            next_step="Look at the serial console, and whether a firewall rule lets port 22 through from here.",
            billed=billed,
        )

    def _step(self) -> Ready | float:
        while True:
            self._check_wanted()
            if self._claim is None:
                if (rest := self._not_before - self._clock()) > 0:
                    return rest
                if self._survey():
                    return self._poll
                if self._claim is None:
                    return self._ask()
            found = self._follow(self._claim)
            if found is not None:
                return found

    def _survey(self) -> bool:
        """Find what the run has already, and claim it; return whether something has to go first."""
        found = locate(self._api, self._run, self._zones, installation=self._installation)
        by_zone = {request.zone: request for request in self._requests}
        living = [item for item in found if self._is_of_use(item)]
        keep = next(iter(by_preference(living)), None)
        others = [item for item in found if item is not keep]
        if others:
            self._remove(others)
            return True
        if keep is not None:
            self._claim = _Claim(by_zone[keep.zone], None, keep.instance_id, self._clock())
            return False
        for request in self._requests:
            inserts = self._api.inserts_of(request.zone, request.name)
            # A list may be older than what we know of our own operation.
            known = self._over.get(request.zone)
            if under_way := [item for item in inserts if item.status != DONE and item.name != known]:
                self._claim = _Claim(request, under_way[0].name, None, self._clock())
                return False
            if inserts:
                self._over.setdefault(request.zone, inserts[0].name)
        return False

    def _is_of_use(self, instance: Instance) -> bool:
        return (
            instance.status not in OVER
            and instance.zone in self._zones
            and instance.machine_type == self._requests[0].machine_type
            and instance.instance_id != self._discard
        )

    def _remove(self, instances: Sequence[Instance]) -> None:
        named = ", ".join(f"{item.zone}/{item.name} (was {item.status})" for item in instances)
        self._tell(f"deleting first: {named}")
        for instance in instances:
            if instance.status in GOING:
                continue
            self._check_wanted()
            self.removed.add(instance.instance_id)
            try:
                self._api.delete_instance(instance.zone, instance.name)
            except TransientError as error:
                # The next look shows whether it is going all the same, and asks again if not.
                self._tell(error.message)

    def _ask(self) -> float:
        """Ask for an instance in the next zone that does not say no at once."""
        while (rest := self._not_before - self._clock()) <= 0:
            request = self._requests[self._next]
            if self._waited() >= self._limits.queue:
                raise self._queue_timed_out()
            self._check_wanted()
            after = self._over.get(request.zone, _FIRST)
            request_id = request_uuid(request.run, request.zone, request.attempt, after)
            try:
                operation = self._api.insert_instance(request.zone, request.body, request_id=request_id)
            except CapacityUnavailable as error:
                self._refused(request, error.message)
            except AlreadyExists:
                return self._taken(request)
            except CloudUnavailable as error:
                self._unanswered += 1
                if self._unanswered < UNANSWERED_LIMIT:
                    raise
                self._refused(request, error.message)
            else:
                self._unanswered = 0
                self._claim = _Claim(request, operation, None, self._clock())
                self._tell(f"{request.zone}/{request.name}: asked for {request.machine_type}")
                return self._poll
        return rest

    def _taken(self, request: LeaseRequest) -> float:
        """Find out who has the name: another process of the run, an earlier request, or a stranger."""
        instance = self._api.get_instance(request.zone, request.name)
        if instance is not None:
            self._check_ours(instance)
        self._tell(f"{request.zone}/{request.name}: asked for already")
        return self._poll

    def _check_ours(self, instance: Instance) -> None:
        if is_ours(instance, self._run, self._installation):
            return
        raise ConfigurationRefused(
            f"{instance.zone}/{instance.name} exists and is not an instance of run {self._run} "
            f"(labels {dict(instance.labels)}); it was not touched",
            next_step="Delete or rename it, or give the recipe another name.",
        )

    def _follow(self, claim: _Claim) -> Ready | float | None:
        """Look at what was claimed; None: the claim is lost, go on at once."""
        request = claim.request
        # The operation is looked at before the instance: the other way round, an insert that ends in between
        # would look like an instance that vanished.
        if claim.operation is not None:
            try:
                is_over = self._api.wait_operation(request.zone, claim.operation, timeout=0)
            except (CapacityUnavailable, VmLost, OperationFailed) as error:
                self._over[request.zone] = claim.operation
                self._refused(request, error.message)
                return None
            except AlreadyExists:
                # Two inserts were under way, and the other one was faster.
                self._over[request.zone] = claim.operation
                self._claim = None
                return self._taken(request)
            if is_over:
                self._over[request.zone] = claim.operation
                claim.operation = None
        instance = self._api.get_instance(request.zone, request.name)
        if instance is None:
            if claim.operation is not None:
                return self._pause(claim, "asked for, and not to be seen yet")
            self._vanished(claim)
            return None
        self._check_ours(instance)
        self.met[instance.instance_id] = instance
        claim.instance_id = instance.instance_id
        if not self._is_of_use(instance):
            self._claim = None
            return self._poll
        return self._progress(claim, instance)

    def _vanished(self, claim: _Claim) -> None:
        request = claim.request
        loss = claim.instance_id and explain_loss(
            self._api, self._run, request.zone, request.name, claim.instance_id
        )
        said = loss.error.message if loss else "the instance was made and is gone again"
        self._refused(request, said)

    def _progress(self, claim: _Claim, instance: Instance) -> Ready | float:
        if instance.status in _QUEUED:
            return self._pause(claim, f"{instance.status}: waiting for capacity")
        if self._booting is None or self._booting[0] != instance.instance_id:
            self._booting = (instance.instance_id, self._clock())
            claim.since = self._clock()
        if instance.status != RUNNING:
            return self._pause(claim, instance.status)
        host_keys = tuple(self._api.host_keys(instance.zone, instance.name))
        if not host_keys or instance.address is None:
            return self._pause(claim, "RUNNING, no SSH host keys published yet")
        if self._alone != instance.instance_id:
            found = locate(self._api, self._run, self._zones, installation=self._installation)
            if any(item.instance_id != instance.instance_id for item in found):
                self._claim = None
                return 0.0
            self._alone = instance.instance_id
        self._tell(f"{instance.zone}/{instance.name}: ready at {instance.address}")
        return Ready(instance, host_keys)

    def _pause(self, claim: _Claim, seen: str) -> float:
        claim.seen = seen
        self._tell(f"{claim.request.zone}/{claim.request.name}: {seen}")
        lasted = self._clock() - claim.since
        return min(self._poll * SLOWEST, max(self._poll, lasted / PATIENCE))

    def _refused(self, request: LeaseRequest, answer: str) -> None:
        """Note a zone's answer, and turn to the next one: at once, or after the last one when the pause is over."""
        if self._claim is not None and self._booting is not None:
            if self._claim.instance_id == self._booting[0]:
                # What has booted was not waited for: its time is not the queue's.
                self._began += self._clock() - self._booting[1]
            self._booting = None
        self._claim = None
        self._unanswered = 0
        self._answers[request.zone] = answer
        self._tell(f"{request.zone}/{request.name}: {answer}")
        self._next = (self._zones.index(request.zone) + 1) % len(self._zones)
        if self._next == 0:
            pause = self._backoff.pause(self._rounds, self._jitter)
            self._rounds += 1
            self._not_before = self._clock() + pause
            self._tell(
                f"run {self._run}: no {request.machine_type} in {', '.join(self._zones)}; asking again in "
                f"{pause:.0f} s (waited {self._waited():.0f} of {self._limits.queue:.0f} s)"
            )

    def _waited(self) -> float:
        return self._clock() - self._began

    def _time_left(self) -> float:
        """Return the seconds to the limit of what is going on. Raises when they are over."""
        claim = self._claim
        if claim is None or self._booting is None or claim.instance_id != self._booting[0]:
            left = self._limits.queue - self._waited()
            if left <= 0:
                raise self._queue_timed_out()
            return left
        lasted = self._clock() - self._booting[1]
        if lasted >= self._limits.boot:
            where = f"{claim.request.zone}/{claim.request.name}"
            raise BootTimedOut(
                f"{where}: not ready {lasted:.0f} s after its boot began "
                f"(limit {self._limits.boot:.0f} s); last: {self._told}",
                next_step="Look at the serial console. RUNNING without host keys: is the organization policy "
                "constraints/compute.disableGuestAttributesAccess in force?",
                billed=f"instance {where} ({claim.request.machine_type}) until it is deleted",
            )
        return self._limits.boot - lasted

    def _queue_timed_out(self) -> QueueTimedOut:
        claim, billed = self._claim, ""
        if claim is not None:
            self._answers[claim.request.zone] = claim.seen
            billed = (
                f"{claim.request.zone}/{claim.request.name}, should it still be made before it is deleted"
            )
        answers = "; ".join(f"{zone}: {self._answers.get(zone, 'not asked')}" for zone in self._zones)
        return QueueTimedOut(
            f"run {self._run}: no {self._requests[0].machine_type} after {self._waited():.0f} s "
            f"(limit {self._limits.queue:.0f} s). The last answers: {answers}",
            next_step="Name more zones in tpu.zones, take a reservation or FLEX_START, or raise timeouts.queue in "
            "the recipe.",
            billed=billed,
        )

    def _check_wanted(self) -> None:
        if self._stopped():
            raise NoLongerWanted(f"the VM of run {self._run} is not wanted any more")

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._on_change(line)
            self._told = line
