"""The bash scripts of the steps on the VM: pure text, every value quoted.

Each script is convergent: it says so and exits 0 when its result is already there, and makes it from nothing
otherwise. A result counts as there when the marker beside it holds the fingerprint of everything that it was
made from; the marker is written last. Scripts run under `bash -euo pipefail` in the login user's home.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift.maxtext import commands
from nightshift.maxtext.logs import STEP_LINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nightshift.names import BucketLayout, VmLayout
    from nightshift.recipe.model import Recipe

_ON_VM = Path(__file__).parent / "on_vm"
_HEREDOC = "NIGHTSHIFT_END"
_PROGRAMS = ".nightshift/programs"  # below the login user's home
_CHECKPOINT_PROGRAMS = (
    "checkpoint_manifest.py",
    "checkpoint_folder.py",
    "copy_checkpoints.py",
    "restore_checkpoints.py",
)
_EXPORT_PROGRAMS = ("model_folder.py", "finish_export.py", "compare_weights.py")
#: For a program that must not slow the training: least priority, and the disk only when nobody else wants it.
_AT_LEISURE = "nice -n 19 ionice -c 3"
# These survive quoting as they are, and become shell variables.
_STEP, _LOGGED, _TRAINER = "__CHECKPOINT__", "__LOGGED__", "__TRAINER__"

#: Orbax keeps unfinished steps beside the finished ones, under names that are no plain numbers.
_LIST_STEPS = """{ ls -1 "$actor" 2>/dev/null || true; } | { grep -E '^[0-9]+$' || true; } | sort -n"""

PRELUDE = """\
say() { printf 'nightshift: %s\\n' "$*"; }
fail() { printf 'nightshift: error[%s]: %s\\n' "$1" "$2" >&2; exit 1; }
retry() {
  local attempt
  for attempt in 1 2 3; do
    if "$@"; then return 0; fi
    say "attempt $attempt of 3 failed: $*"
    sleep $((attempt * 5))
  done
  return 1
}
is_complete() { [ -e "$1" ] && [ -f "$1.complete" ] && [ "$(cat "$1.complete")" = "$2" ]; }
mark_complete() { printf '%s\\n' "$2" > "$1.complete.tmp" && mv "$1.complete.tmp" "$1.complete"; }
start_fresh() { rm -rf "$1.complete" "$1"; mkdir -p "$(dirname "$1")"; }
"""


def fingerprint(*parts: object) -> str:
    """Return a short digest of everything that a result is made from."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_python(interpreter: str, name: str, arguments: Sequence[str], *, background: bool = False) -> str:
    """Return the command that runs a file of `on_vm/` on the VM, its text sent along."""
    end = " &" if background else ""
    return f"{shlex.join([interpreter, '-', *arguments])} <<'{_HEREDOC}'{end}\n{_source(name)}{_HEREDOC}\n"


def text_file(path: str, text: str) -> str:
    """Return the command that writes a text to a file on the VM."""
    body = text if text.endswith("\n") else text + "\n"
    if _HEREDOC in body:
        msg = f"{path}: the text holds the line {_HEREDOC} that ends it in the script"
        raise ValueError(msg)
    return f"cat > {shlex.quote(path)} <<'{_HEREDOC}'\n{body}{_HEREDOC}\n"


def activate(layout: VmLayout) -> str:
    """Return the command that activates MaxText's environment, whose packages call each other's programs by name."""
    venv = shlex.quote(layout.venv)
    return f'export VIRTUAL_ENV="$PWD"/{venv} PATH="$PWD"/{venv}/bin:"$PATH"\n'


def to_maxtext_script(recipe: Recipe, layout: VmLayout) -> str:
    """Return the script that downloads the model's commit and converts it to MaxText's format."""
    target = layout.mt_format
    download = (recipe.model.repo, layout.model_revision)
    command = commands.to_maxtext_argv(recipe, layout)
    return "".join([
        PRELUDE,
        activate(layout),
        _fetch_model(recipe, layout, fingerprint(*download)),
        f"target={shlex.quote(target)}\n",
        f"inputs={fingerprint(download, command)}\n",
        'if is_complete "$target" "$inputs"; then\n',
        '  say "the base model is already in MaxText\'s format: $target"\n',
        "  exit 0\n",
        "fi\n",
        # MaxText 0.2.3 saves nothing into an existing folder, and still says "Conversion complete".
        'start_fresh "$target"\n',
        f"say {shlex.quote(f'converting {recipe.model.repo} at {layout.model_revision}')}\n",
        f"{shlex.join(command)}\n",
        f"[ -d {shlex.quote(layout.base_checkpoint)} ] || fail no_checkpoint ",
        f"{shlex.quote(f'to_maxtext ended well but left no {layout.base_checkpoint}')}\n",
        'mark_complete "$target" "$inputs"\n',
        'say "the base model is in MaxText\'s format: $target"\n',
    ])  # fmt: skip


def train_script(recipe: Recipe, layout: VmLayout, dataset_commit: str, bucket: BucketLayout) -> str:
    """Return the script that writes the dataset's commit to files and trains on them.

    The log is also kept beside the checkpoints: there a later attempt finds what this one measured at first.
    Beside train_rl run a reader of its TensorBoard files and a copier of its checkpoints. Neither can make it fail:
    how they end is only told. What they may take after the training's end is limited, by themselves: seconds for the
    reader, `copy_checkpoints.py --patience` for the last checkpoint. `layout.checkpoints_safe` is there when the
    copier is done with the final checkpoint, or cannot be waited for: then a train_rl that hangs may be ended.

    Where the recipe has a floor for the accuracy before training, a third program ends a train_rl that is below it.
    """
    final = f"{layout.actor_checkpoints}/{commands.expected_steps(recipe)}"
    copy = _run_program(layout, "copy_checkpoints.py", _copy_arguments(recipe, layout, bucket))
    return "".join([
        PRELUDE,
        activate(layout),
        f"base={shlex.quote(layout.base_checkpoint)}\n",
        '[ -d "$base" ] || fail no_checkpoint "no base checkpoint in $base"\n',
        _fetch_dataset(recipe, layout, dataset_commit),
        _put_programs(_CHECKPOINT_PROGRAMS),
        f"log={shlex.quote(train_log(layout))}\n",
        f"final={shlex.quote(final)}\n",
        f"safe={shlex.quote(layout.checkpoints_safe)}\n",
        'mkdir -p "$(dirname "$log")"\n',
        'rm -f "$safe"\n',
        f"last_copy() {{ {copy} --ended || "
        'say "the copier of the checkpoints broke: they may be on this VM only"; }\n',
        'if [ -f "$log" ]; then\n',
        "  baseline=$(grep -a -m 1 'Pre RL Training:' \"$log\" || true)\n",
        '  if [ -n "$baseline" ]; then say "measured by an earlier attempt: $baseline"; fi\n',
        "  after=$(grep -a 'Post RL Training:' \"$log\" | tail -n 1 || true)\n",
        '  if [ -d "$final" ] && [ -n "$after" ]; then\n',
        '    say "measured by an earlier attempt: $after"\n',
        '    say "the training is already complete: $final"\n',
        "    last_copy\n",
        "    exit 0\n",
        "  fi\n",
        "fi\n",
        # Taken before anything writes: what an earlier attempt measured says nothing about this one.
        'logged=$(stat -c %s "$log" 2>/dev/null || echo 0)\n' if recipe.gate.min_accuracy_before else "",
        "{\n",
        run_python(layout.python, "follow_metrics.py", _metrics_arguments(recipe, layout), background=True),
        "  follower=$!\n",
        f"  {_AT_LEISURE} {copy} &\n",
        "  copier=$!\n",
        # Should the copier break, nobody else would say that there is nothing to wait for.
        '  { tail --pid="$copier" -f /dev/null; touch "$safe"; } &\n',
        "  watcher=$!\n",
        "  code=0\n",
        _train(recipe, layout, dataset_commit),
        '  kill -TERM "$follower" "$copier" 2>/dev/null || true\n',
        '  wait "$follower" || say "the reader of the step metrics ended early; the training does not need it"\n',
        '  wait "$copier" || last_copy\n',
        '  wait "$watcher"\n',
        '  wait "$floor_watcher" || say "the watcher of the baseline ended early; the training does not need it"\n'
        if recipe.gate.min_accuracy_before
        else "",
        '  exit "$code"\n',
        '} 2>&1 | tee -a "$log"\n',
    ])  # fmt: skip


def restore_script(layout: VmLayout, bucket: BucketLayout) -> str:
    """Return the script that brings the newest complete checkpoint and the training's log back from the bucket.

    A VM that has the same step or a later one is left as it is; an empty bucket is no error.
    """
    arguments = _checkpoint_arguments(layout, bucket)
    return "".join([
        PRELUDE,
        activate(layout),
        _put_programs(_CHECKPOINT_PROGRAMS),
        f"{_run_program(layout, 'restore_checkpoints.py', arguments)}\n",
    ])  # fmt: skip


def train_log(layout: VmLayout) -> str:
    """Return the file on the VM that holds the log of every attempt at the training."""
    return f"{layout.post_train}/{layout.run}.log"


def tensorboard_folder(layout: VmLayout) -> str:
    """Return the folder of train_rl's TensorBoard files (MaxText's `tensorboard_dir`, which follows from the run)."""
    return f"{layout.post_train}/{layout.run}/tensorboard"


def to_huggingface_script(recipe: Recipe, layout: VmLayout) -> str:
    """Return the script that converts the last checkpoint, completes the folder and checks what is in it.

    What the check says of the weights is kept beside the folder, so that a result that is already there tells it too.
    """
    source, target = commands.source_folder(layout), layout.hf_trained
    command = commands.to_huggingface_argv(recipe, layout, _STEP)
    expected = commands.expected_steps(recipe)
    arguments = [source, target, recipe.conversion.weight_dtype]
    # With the programs' text: what passed the checks of another release has not passed these.
    checks = [_source(name) for name in _EXPORT_PROGRAMS]
    inputs = fingerprint(command, recipe.model.repo, layout.model_revision, arguments, checks)
    return "".join([
        PRELUDE,
        activate(layout),
        f"actor={shlex.quote(layout.actor_checkpoints)}\n",
        f"step=$({_LIST_STEPS} | tail -n 1)\n",
        '[ -n "$step" ] || fail no_checkpoint "no trained checkpoint in $actor: run the step train first"\n',
        f'[ "$step" -ge {expected} ] || fail early_end "the last checkpoint is step $step of {expected}"\n',
        'checkpoint="$actor/$step"\n',
        f"target={shlex.quote(target)}\n",
        f'inputs="{inputs}-$step"\n',
        'weights="$target.weights"\n',
        'if is_complete "$target" "$inputs"; then\n',
        '  cat "$weights"\n',
        '  say "step $step is already in the Hugging Face format: $target"\n',
        "  exit 0\n",
        "fi\n",
        _fetch_model(recipe, layout, fingerprint(recipe.model.repo, layout.model_revision)),
        _put_programs(_EXPORT_PROGRAMS),
        'start_fresh "$target"\n',
        'say "converting $checkpoint"\n',
        shlex.join(command).replace(_STEP, '"$checkpoint"'),
        "\n",
        f"{_run_program(layout, 'finish_export.py', arguments)}\n",
        f"{_run_program(layout, 'compare_weights.py', arguments)} | tee \"$weights\"\n",
        'mark_complete "$target" "$inputs"\n',
        'say "step $step is in the Hugging Face format: $target"\n',
    ])  # fmt: skip


def list_steps_script(layout: VmLayout) -> str:
    """Return the script that lists the saved steps, one a line (read by `logs.latest_step`)."""
    return f"actor={shlex.quote(layout.actor_checkpoints)}\n{_LIST_STEPS}\n"


def _train(recipe: Recipe, layout: VmLayout, dataset_commit: str) -> str:
    """Return the commands that run train_rl and leave its exit code in `code`, as part of the training's script."""
    command = shlex.join(commands.train_argv(recipe, layout, dataset_commit))
    floor = recipe.gate.min_accuracy_before
    if not floor:
        return f"  {command} || code=$?\n"
    options = {"--log": train_log(layout), "--floor": str(floor), "--offset": _LOGGED, "--pid": _TRAINER}
    arguments = [word for option in options.items() for word in option]
    watch = run_python(layout.python, "watch_baseline.py", arguments, background=True)
    return "".join([
        f"  {command} &\n",
        "  trainer=$!\n",
        watch.replace(_LOGGED, '"$logged"', 1).replace(_TRAINER, '"$trainer"', 1),
        "  floor_watcher=$!\n",
        '  wait "$trainer" || code=$?\n',
    ])  # fmt: skip


def _source(name: str) -> str:
    return (_ON_VM / name).read_text(encoding="utf-8")


def _put_programs(names: Sequence[str]) -> str:
    """Return the commands that put programs into one folder on the VM, where they find each other."""
    return f"mkdir -p {_PROGRAMS}\n" + "".join(
        text_file(f"{_PROGRAMS}/{name}", _source(name)) for name in names
    )


def _run_program(layout: VmLayout, name: str, arguments: Sequence[str]) -> str:
    return shlex.join([layout.python, "-u", f"{_PROGRAMS}/{name}", *arguments])


def _checkpoint_arguments(layout: VmLayout, bucket: BucketLayout) -> list[str]:
    options = {
        "--actor": layout.actor_checkpoints,
        "--log": train_log(layout),
        "--bucket": bucket.bucket,
        "--prefix": bucket.checkpoints,
    }
    return [word for option in options.items() for word in option]


def _copy_arguments(recipe: Recipe, layout: VmLayout, bucket: BucketLayout) -> list[str]:
    options = {
        "--safe": layout.checkpoints_safe,
        "--final": str(commands.expected_steps(recipe)),
        "--step-line": STEP_LINE,
    }
    return [*_checkpoint_arguments(layout, bucket), *(word for option in options.items() for word in option)]


def _metrics_arguments(recipe: Recipe, layout: VmLayout) -> list[str]:
    return [tensorboard_folder(layout), str(recipe.training.setting("rl.num_iterations"))]


def _fetch_model(recipe: Recipe, layout: VmLayout, inputs: str) -> str:
    folder = commands.source_folder(layout)
    arguments = [recipe.model.repo, layout.model_revision, folder]
    return "".join([
        f"source={shlex.quote(folder)}\n",
        f'if ! is_complete "$source" {inputs}; then\n',
        '  start_fresh "$source"\n',
        run_python(layout.python, "fetch_model.py", arguments),
        f'  mark_complete "$source" {inputs}\n',
        "fi\n",
    ])  # fmt: skip


def _fetch_dataset(recipe: Recipe, layout: VmLayout, dataset_commit: str) -> str:
    dataset, needed = recipe.dataset, commands.rows_needed(recipe)
    folder = commands.dataset_folder(layout, dataset_commit)
    splits = [f"{dataset.train_split}={needed.train}"]
    if dataset.repo not in commands.SPLIT_BY_MAXTEXT and dataset.eval_split != dataset.train_split:
        splits.append(f"{dataset.eval_split}={needed.evaluation}")
    arguments = [dataset.repo, dataset.subset, dataset_commit, folder, *splits]
    inputs = fingerprint(arguments)
    return "".join([
        f"data={shlex.quote(folder)}\n",
        f'if ! is_complete "$data" {inputs}; then\n',
        '  start_fresh "$data"\n',
        '  mkdir -p "$data"\n',
        run_python(layout.python, "fetch_dataset.py", arguments),
        f'  mark_complete "$data" {inputs}\n',
        "fi\n",
    ])  # fmt: skip
