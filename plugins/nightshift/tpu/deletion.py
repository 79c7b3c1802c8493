"""The deletion of one instance, one look at a time: what the teardown and the janitor share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nightshift.tpu.api import ComputeApi, Instance


class Deletion:
    """Asks for the deletion of exactly this instance, again where one has failed. Never sleeps."""

    def __init__(self, api: ComputeApi, instance: Instance) -> None:
        self.instance = instance
        self._api = api
        self._operation: str | None = None

    def current(self) -> Instance | None:
        """Return the instance as it is now, or None when it is gone.

        Another id under the name is another instance: this one is gone.
        """
        found = self._api.get_instance(self.instance.zone, self.instance.name)
        return found if found is not None and found.instance_id == self.instance.instance_id else None

    def is_under_way(self) -> bool:
        """Return whether it has been asked for and goes on. Raises what a failed deletion means."""
        # Taken out first: when the deletion turns out to have failed, it is asked for again.
        operation, self._operation = self._operation, None
        if operation is None or self._api.wait_operation(self.instance.zone, operation, timeout=0):
            return False
        self._operation = operation
        return True

    def ask(self) -> None:
        """Ask for it."""
        self._operation = self._api.delete_instance(self.instance.zone, self.instance.name)
