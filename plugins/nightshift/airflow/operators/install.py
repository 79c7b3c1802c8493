"""MaxText's environment on the VM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightshift.airflow import paths
from nightshift.airflow.operators.remote_step import RemoteStepOperator, Work
from nightshift.export.commands import UPLOADER_ON_VM, probe_command, uploader
from nightshift.maxtext.commands import install_environment
from nightshift.maxtext.install import install_script, installed_packages, read_lock
from nightshift.maxtext.outcome import diagnose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nightshift.airflow.operators.remote_step import Site
    from nightshift.remote.client import RemoteHost


PROBE_SECONDS = 330.0  # the uploader itself is patient for 300


class InstallMaxTextOperator(RemoteStepOperator):
    """Wraps the installation: system packages, uv, Python, MaxText and its post-training dependencies."""

    step = "install_maxtext"
    timeout_key = "install"

    def work(self, site: Site, resolved: Mapping[str, Any]) -> Work:
        """Install, unless the environment is complete already."""
        recipe = site.night.recipe
        return Work(
            script=install_script(recipe, site.layout, read_lock(recipe, paths.VM_FILES)),
            env=install_environment(recipe, site.layout),
        )

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
