"""The script that makes MaxText's environment on the VM, and reads what it installed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from nightshift.maxtext.logs import PACKAGES_BEGIN, PACKAGES_END
from nightshift.maxtext.scripts import PRELUDE, activate, fingerprint, run_python, text_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nightshift.names import VmLayout
    from nightshift.recipe.model import Recipe

UV_VERSION = "0.13.9"
UV_INSTALLER = f"https://astral.sh/uv/{UV_VERSION}/install.sh"

_NO_NETWORK = "the VM needs an external IP (tpu.external_ip) or Cloud NAT in its subnetwork"
# A changed configuration file is a question that DEBIAN_FRONTEND does not answer: dpkg then fails, having no terminal.
_APT = (
    "as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a LC_ALL=C apt-get -o DPkg::Lock::Timeout=600 "
    "-o APT::Update::Error-Mode=any -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)

# systemd-logind empties a user's part of /dev/shm when the last session ends (RemoveIPC, on by default), and every
# checkpoint lies there. A user who lingers never logs out.
_KEEP_MEMORY = """\
as_root loginctl enable-linger "$(id -un)" ||
  fail memory 'loginctl enable-linger failed: systemd-logind would empty /dev/shm between two steps'
"""

# SSH answers while cloud-init still rewrites apt's sources.
_AWAIT_CLOUD_INIT = """\
if command -v cloud-init >/dev/null; then
  timeout 300 cloud-init status --wait >/dev/null || say "cloud-init has not ended well: going on without it"
fi
"""

# DPkg::Lock::Timeout is about dpkg's lock only: apt-get (2.4) gives up at once when another one, such as the image's
# own at its first boot, holds the lock of the package lists.
_UPDATE_LISTS = f"""\
update_package_lists() {{
  local said deadline=$((SECONDS + 600))
  said=$(mktemp)
  until {_APT} update 2>&1 | tee "$said"; do
    if ! grep -q 'Could not get lock' "$said" || [ "$SECONDS" -ge "$deadline" ]; then
      rm -f "$said"
      return 1
    fi
    say "another apt-get holds the package lists: waiting for it"
    sleep 5
  done
  rm -f "$said"
}}
"""


def read_lock(recipe: Recipe, folder: Path) -> str | None:
    """Return the text of the recipe's lock file, or None when it names none.

    :param folder: include/vm/.

    Raises OSError when the file cannot be read.
    """
    name = recipe.software.lock
    return None if name is None else (folder / name).read_text(encoding="utf-8")


def install_script(recipe: Recipe, layout: VmLayout, lock_text: str | None = None) -> str:
    """Return the script that installs system packages, uv, Python and MaxText, and checks the result.

    :param lock_text: what `read_lock` returned.

    Raises ValueError when the recipe names a lock file and its text is not given, or the other way round.
    """
    software = recipe.software
    if (software.lock is None) != (lock_text is None):
        given = "no" if lock_text is None else "a"
        msg = f"software.lock is {software.lock!r}, but {given} lock text was given"
        raise ValueError(msg)
    venv = layout.venv
    inputs = fingerprint(software.model_dump(mode="json"), lock_text, recipe.chips, UV_VERSION)
    return "".join([
        PRELUDE,
        'as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }\n',
        'export PATH="$HOME/.local/bin:$PATH"\n',
        _KEEP_MEMORY,
        f"venv={shlex.quote(venv)}\n",
        f"inputs={inputs}\n",
        'if is_complete "$venv" "$inputs"; then\n',
        '  say "the environment is already complete: $venv"\n',
        _print_packages(venv),
        "  exit 0\n",
        "fi\n",
        # The marker goes first: from here on the environment is not what it says.
        'rm -f "$venv.complete"\n',
        _system_packages(recipe),
        _uv_and_python(recipe),
        f'uv venv --clear --python {shlex.quote(software.python)} --seed "$venv"\n',
        activate(layout),
        _maxtext(recipe, layout, lock_text),
        # Packages added with --no-deps (vLLM, Tunix) do not always agree with what MaxText resolved,
        # upstream too: the imports and the devices below decide, not the metadata.
        'uv pip check || say "warning: the packages\' own requirements disagree, see above"\n',
        run_python(layout.python, "check_environment.py", [software.maxtext, str(recipe.chips)]),
        'uv pip freeze > "$venv.packages.tmp"\n',
        'mv "$venv.packages.tmp" "$venv.packages"\n',
        'mark_complete "$venv" "$inputs"\n',
        _print_packages(venv),
        'say "the environment is complete: $venv"\n',
    ])  # fmt: skip


def installed_packages(log: Iterable[str]) -> tuple[str, ...]:
    """Return the packages (name==version) that the install step's log lists, sorted as uv wrote them."""
    packages: list[str] = []
    listing = False
    for raw in log:
        line = raw.strip()
        if line == PACKAGES_BEGIN:
            listing, packages = True, []
        elif line == PACKAGES_END:
            listing = False
        elif listing and line:
            packages.append(line)
    return tuple(packages)


def _print_packages(venv: str) -> str:
    packages = shlex.quote(f"{venv}.packages")
    return f"echo {shlex.quote(PACKAGES_BEGIN)}\ncat {packages}\necho {shlex.quote(PACKAGES_END)}\n"


def _system_packages(recipe: Recipe) -> str:
    software = recipe.software
    if not software.apt_upgrade and not software.apt_packages:
        return 'say "no system packages are asked for"\n'
    lines = [
        'say "system packages"\n',
        _AWAIT_CLOUD_INIT,
        _UPDATE_LISTS,
        f"retry update_package_lists || fail no_network {shlex.quote(f'apt-get update failed: {_NO_NETWORK}')}\n",
    ]
    if software.apt_upgrade:
        lines.append(
            f"retry {_APT} upgrade -y --fix-missing || fail apt 'apt-get upgrade failed, see above'\n"
        )
    if software.apt_packages:
        listing = shlex.join(software.apt_packages)
        lines.append(f"retry {_APT} install -y {listing} || fail apt 'apt-get install failed, see above'\n")
    return "".join(lines)


def _uv_and_python(recipe: Recipe) -> str:
    python = shlex.quote(recipe.software.python)
    message = shlex.quote(f"{UV_INSTALLER} cannot be downloaded: {_NO_NETWORK}")
    return "".join([
        "if ! command -v uv >/dev/null; then\n",
        f'  say "installing uv {UV_VERSION}"\n',
        "  installer=$(mktemp)\n",
        f'  retry curl -LsSf --max-time 120 {UV_INSTALLER} -o "$installer" || fail no_network {message}\n',
        '  env UV_INSTALL_DIR="$HOME/.local/bin" INSTALLER_NO_MODIFY_PATH=1 sh "$installer"\n',
        '  rm -f "$installer"\n',
        "fi\n",
        f"uv python find {python} >/dev/null 2>&1 || retry uv python install {python} || fail no_network ",
        f"{shlex.quote(f'Python {recipe.software.python} cannot be downloaded: {_NO_NETWORK}')}\n",
    ])  # fmt: skip


def _maxtext(recipe: Recipe, layout: VmLayout, lock_text: str | None) -> str:
    software = recipe.software
    failed = "fail packages 'uv could not install MaxText, see above'"
    lines = [f"say {shlex.quote(f'installing MaxText {software.maxtext}')}\n"]
    if lock_text is not None:
        lock = f"{layout.venv}.lock"
        lines.append(text_file(lock, lock_text))
        lines.append(f"retry uv pip install --no-deps -r {shlex.quote(lock)} || {failed}\n")
    else:
        requirement = software.requirement.replace("{maxtext}", software.maxtext)
        arguments = shlex.join([requirement, f"--resolution={software.resolution}"])
        lines.append(f"retry uv pip install {arguments} || {failed}\n")
    if software.extra_deps:
        lines.append("say 'vLLM, tpu-inference and Tunix from source: this says nothing for many minutes'\n")
        lines.append("retry install_tpu_post_train_extra_deps || fail packages ")
        lines.append("'install_tpu_post_train_extra_deps failed, see above'\n")
    return "".join(lines)
