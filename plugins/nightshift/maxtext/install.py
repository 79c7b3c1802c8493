"""The script that makes MaxText's environment on the VM, and reads what it installed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from nightshift.maxtext.logs import PACKAGES_BEGIN, PACKAGES_END
from nightshift.maxtext.scripts import PRELUDE, fingerprint, run_python, text_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nightshift.names import VmLayout
    from nightshift.recipe.model import Recipe

UV_VERSION = "0.13.9"
UV_INSTALLER = f"https://astral.sh/uv/{UV_VERSION}/install.sh"

_NO_NETWORK = "the VM needs an external IP (tpu.external_ip) or Cloud NAT in its subnetwork"
_APT = (
    "as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get -o DPkg::Lock::Timeout=600 "
    "-o APT::Update::Error-Mode=any"
)


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
        'export VIRTUAL_ENV="$PWD/$venv" PATH="$PWD/$venv/bin:$PATH"\n',
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
        f"retry {_APT} update || fail no_network {shlex.quote(f'apt-get update failed: {_NO_NETWORK}')}\n",
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
