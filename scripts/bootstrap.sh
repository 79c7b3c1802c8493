#!/usr/bin/env bash
# Makes .venv with Python 3.12 and everything that the lock files name. Does nothing when that is done already.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # imports take many times longer without bytecode

UV_VERSION=0.13.9
PYTHON_VERSION=3.12
stamp=.venv/.installed-$(cat requirements-dev.lock pyproject.toml scripts/bootstrap.sh | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

if command -v uv >/dev/null 2>&1; then
  uv=uv
else
  uv=.venv-uv/bin/uv
  if [ ! -x "$uv" ]; then
    say "Installing uv $UV_VERSION into .venv-uv"
    python3 -m venv .venv-uv || {
      say "python3 -m venv failed. Install it (Debian: apt install python3-venv) or install uv yourself, then try again."
      exit 1
    }
    .venv-uv/bin/python -m pip install --quiet "uv==$UV_VERSION"
  fi
fi

# pyenv's shims are on PATH but fail for versions that are not selected, so its folder is searched by name.
find_python() {
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$PYTHON_VERSION".*/bin/python"$PYTHON_VERSION"; do
    if [ -x "$candidate" ]; then echo "$candidate" && return; fi
  done
  "$uv" python find --no-python-downloads "$PYTHON_VERSION" 2>/dev/null || {
    say "No Python $PYTHON_VERSION here: uv downloads one"
    "$uv" python install "$PYTHON_VERSION" >&2
    "$uv" python find "$PYTHON_VERSION"
  }
}

python=$(find_python)
if ! .venv/bin/python -c "import sys; sys.exit(sys.version_info[:2] != (3, 12))" 2>/dev/null; then
  say "Making .venv with $python"
  "$uv" venv --quiet --clear --python "$python" .venv
fi
say "Installing what requirements-dev.lock names (about 320 packages the first time)"
"$uv" pip sync --python .venv/bin/python requirements-dev.lock
# The project itself is not installed but found: a build would leave its files outside .venv and var/.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$PWD/plugins" "$PWD/include" >"$packages/nightshift.pth"
printf '#!%s\nfrom localcloud.cli import main\n\nmain()\n' "$PWD/.venv/bin/python" >.venv/bin/localcloud
chmod +x .venv/bin/localcloud
rm -f .venv/.installed-*
touch "$stamp"
