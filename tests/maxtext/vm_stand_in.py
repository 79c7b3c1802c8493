"""A stand-in for MaxText's environment on a VM: a home folder whose programs only note that they were called.

What the scripts do around MaxText (markers, order, exit codes, quoting) is bash, and runs for real here. MaxText itself
runs for real in the rehearsal.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nightshift.names import VmLayout

_PYTHON = r"""#!/bin/bash
# Notes its arguments, one call a line, and makes what the real program would leave.
set -eu
stdin=""
[ "$1" != "-" ] || stdin=$(cat)
case "$stdin" in
  *tfevents*)  # the reader beside train_rl runs for real, unless it is to break
    [ -z "${READER:-}" ] || exec bash -c "$READER"
    exec @PYTHON@ "$@" <<< "$stdin" ;;
  *baseline_below_floor*)  # and so does the watcher of the baseline
    [ -z "${WATCHER:-}" ] || exec bash -c "$WATCHER"
    exec @PYTHON@ "$@" <<< "$stdin" ;;
esac
case "$*" in
  *copy_checkpoints.py*)  # the copier too, where there is a bucket; else one that copies nothing
    [ -z "${COPIER:-}" ] || exec bash -c "$COPIER" copier "$@"
    [ -z "${STORAGE_EMULATOR_HOST:-}" ] || exec @PYTHON@ "$@"
    case "$*" in *--ended*) exit ;; esac
    trap 'exit 0' TERM; while :; do sleep 0.05; done ;;
  *restore_checkpoints.py*) exec @PYTHON@ "$@" ;;
esac
printf '%q ' "$@" >> "$HOME/calls"; echo >> "$HOME/calls"
value() { local word; for word in "${@:2}"; do case "$word" in "$1="*) echo "${word#*=}";; esac; done; }
case "$*" in
  *finish_export.py*) [ -z "${FAIL_SCRIPT:-}" ] || exit "$FAIL_SCRIPT" ;;
  *compare_weights.py*)
    echo 'nightshift: weights {"tensors": 21, "tensors_moved": 20, "relative_norm": 0.025}'
    [ -z "${UNMOVED:-}" ] || { echo "nightshift: error[unmoved]: no value differs" >&2; exit 1; } ;;
  *to_maxtext*)
    target=$(value base_output_directory "$@"); mkdir "$target"
    [ -z "${FAIL:-}" ] || { touch "$target/half"; exit "$FAIL"; }
    mkdir -p "$target/0/items" ;;
  *train_rl*)
    echo "Pre RL Training: corr=${CORRECT:-1}, total=16, accuracy=6.25%, partial_accuracy=6.25%, format_accuracy=6.25%"
    actor="$(value base_output_directory "$@")/$(value run_name "$@")/checkpoints/actor"
    mkdir -p "$actor/9/model_params" "$actor/${LAST:-32}.orbax-checkpoint-tmp-7" "$actor/../../tensorboard"
    if [ -n "${EVENTS:-}" ]; then
      cp "$EVENTS" "$actor/../../tensorboard"
      for _ in {1..400}; do  # the real one runs long enough for its metrics to be read
        ! grep -q "metrics step=12" "$actor/../../../"*.log || break
        sleep 0.05
      done
    fi
    for _ in {1..200}; do [ -n "${UNTIL:-}" ] && [ ! -e "$UNTIL" ] || break; sleep 0.05; done
    [ -z "${UNTIL:-}" ] || [ -e "$UNTIL" ] || exit 99
    [ -z "${FAIL:-}" ] || exit "$FAIL"
    mkdir -p "$actor/${LAST:-32}/model_params"
    echo weights > "$actor/${LAST:-32}/model_params/weights"
    echo "Post RL Training: corr=13, total=16, accuracy=81.25%, partial_accuracy=81.25%, format_accuracy=100.0%" ;;
  *to_huggingface*)
    target=$(value base_output_directory "$@"); mkdir "$target"; touch "$target/config.json" ;;
  *)
    case "$stdin" in *snapshot_download*) mkdir -p "$4" ;; esac
    [ -z "${FAIL_SCRIPT:-}" ] || exit "$FAIL_SCRIPT" ;;
esac
""".replace("@PYTHON@", shlex.quote(sys.executable))

_TOOL = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >> "$HOME/calls"; echo >> "$HOME/calls"
case " ${FAILING:-} " in *" $(basename "$0") "*) exit 7 ;; esac
case "$(basename "$0") $*" in
  "uv venv"*) mkdir -p maxtext_venv ;;
  "uv pip freeze"*) echo "jax==0.10.1"; echo "maxtext==0.2.3" ;;
  sudo*) exec "$@" ;;
  env*) shift 2; while [[ "$1" == *=* ]]; do shift; done; exec "$@" ;;
esac
"""


@dataclass(frozen=True)
class LocalLayout(VmLayout):
    """The VM's layout, with another folder in the place of /dev/shm."""

    memory: Path = field(default=Path("/nonexistent"), kw_only=True)

    @property
    def root(self) -> str:
        """The model's folder."""
        return f"{self.memory}/{self.model_name}"


@dataclass(frozen=True)
class Ran:
    """How a script ended."""

    code: int
    output: str


@dataclass(frozen=True)
class Machine:
    """A home folder with programs that only take notes."""

    home: Path

    @classmethod
    def create(cls, home: Path, *tools: str) -> Machine:
        """Make the home folder with MaxText's interpreter and the named tools."""
        programs = {home / "maxtext_venv/bin/python3": _PYTHON}
        programs |= {home / ".local/bin" / tool: _TOOL for tool in tools}
        for path, text in programs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
        return cls(home)

    def run(self, script: str, **env: str) -> Ran:
        """Run a script as the agent does: by `bash -euo pipefail` in the home folder."""
        path = self.home / "script.sh"
        path.write_text(script, encoding="utf-8")
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", str(path)],
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout)

    def calls(self) -> list[list[str]]:
        """Return the calls since the last look, each as its words."""
        path = self.home / "calls"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        return [shlex.split(line.replace("$'", "'")) for line in lines]

    def modules(self) -> list[str]:
        """Return what was run since the last look: MaxText's modules, our programs, "-" for a script sent along."""
        separators = {"-m": ".", "-u": "/"}
        return [
            call[1].rpartition(separators[call[0]])[2] if call[0] in separators else call[0]
            for call in self.calls()
        ]
