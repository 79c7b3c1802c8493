"""Stand-in for train_rl: evaluates, counts steps, saves checkpoints, evaluates again; resumes at the newest one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from localcloud_stand_in import checkpoints, control, settings
from localcloud_stand_in.logging import log
from localcloud_stand_in.metrics import EventFile


def main() -> None:
    """Train."""
    given = settings.parse(sys.argv[1:], config="post_train/rl.yml")
    folder = Path(given["base_output_directory"]) / str(given["run_name"])
    actor = folder / "checkpoints" / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    last = given["num_batches"] * given["rl"]["num_iterations"]
    log("train_rl.py:498", "Creating RL cluster...")
    weights, state = checkpoints.read_item(Path(given["load_parameters_path"]))
    if newest := checkpoints.latest(actor):
        weights, state = checkpoints.read_item(actor / str(newest) / "model_params")
        log("checkpoint_manager.py:231", f"Restored params from step: {newest} in 0.042 seconds")
    per_batch = given["eval_batch_size"] if given["eval_batch_size"] > 0 else given["batch_size"]
    questions = given["num_test_batches"] * per_batch
    _evaluate("Pre", state["steps"], last, questions)
    log("train_rl.py:720", "Starting RL training...")
    events = EventFile(folder / "tensorboard")
    for step in range(state["steps"] + 1, last + 1):
        place = f"train:{step}"
        orders = control.reach(place)
        control.fail_if_ordered(orders, place)
        time.sleep(orders.step_seconds)
        weights = checkpoints.trained(weights, state)
        loss = 0.05 / step
        log(
            "peft_trainer.py:488",
            f"Train step {step} training loss: {loss:f}  - training perplexity: {1 + loss:f}",
        )
        events.step(step, loss)
        if step % given["checkpoint_period"] == 0 or step == last:
            saved = checkpoints.save(actor, step, weights, given["max_num_checkpoints_to_keep"])
            log("checkpoint_manager.py:1990", f"Finished saving checkpoint (finalized tmp dir) to `{saved}`.")
    log("train_rl.py:735", "RL Training Completed Successfully!")
    _evaluate("Post", state["steps"], last, questions)
    if control.strikes(control.read(), "hang_at_exit", "exit"):
        while True:  # as the pool of math_verify does
            time.sleep(1)


def _evaluate(which: str, steps: int, last: int, questions: int) -> None:
    """Say how many answers are right: 1 of 16 before, 13 of 16 when all steps were trained, and as many in between."""
    right = round((1 + 12 * steps / last) / 16 * questions)
    share = f"{100 * right / questions:g}"
    log(
        "train_rl.py:716",
        f"{which} RL Training: corr={right}, total={questions}, accuracy={share}%, partial_accuracy={share}%, "
        f"format_accuracy={share}%, mean_reward={right / questions:.4f}",
        severity="W",
    )


if __name__ == "__main__":
    main()
