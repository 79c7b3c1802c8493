"""MaxText's environment on the VM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightshift.airflow.operators.remote_step import RemoteStepOperator
from nightshift.export.commands import UPLOADER_ON_VM, probe_command, uploader
from nightshift.maxtext.install import installed_packages
from nightshift.maxtext.outcome import diagnose

if TYPE_CHECKING:
    from nightshift.airflow.jobs import Site
    from nightshift.remote.client import RemoteHost


PROBE_SECONDS = 330.0  # the uploader itself is patient for 300


class InstallMaxTextOperator(RemoteStepOperator):
    """Wraps the installation: system packages, uv, Python, MaxText and its post-training dependencies."""

    step = "install_maxtext"

    async def figures(self, site: Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Return the packages that are installed, once it is proven that the VM will be able to export.

        Preflight can only try Airflow's own account; the VM's is another, and a training whose result cannot leave
        the VM is lost with it.
        """
        await host.put(UPLOADER_ON_VM, uploader())
        probe = await host.run(probe_command(site.layout, site.night.bucket), timeout=PROBE_SECONDS)
        output = (probe.stdout + probe.stderr).decode(errors="replace")
        if probe.exit_code:
            raise diagnose(self.step, output.splitlines(), probe.exit_code)
        self.log.info(">> %s", output.strip())
        packages = installed_packages(log.splitlines())
        self.log.info("%d packages in %s", len(packages), site.layout.venv)
        return {"freeze": list(packages), "python": site.night.recipe.software.python}
