"""Runs the agent with a wall clock of its own: the real one and the seconds in `~/skew`, which may change at any time.

time.time is replaced before the agent's first line, so the supervisor, which is forked from it, has it too.
"""

import runpy
import time
from pathlib import Path

real_time = time.time
AGENT = Path(__file__).parents[2] / "plugins" / "nightshift" / "remote" / "agent.py"


def skewed_time() -> float:
    skew = Path.home() / "skew"
    return real_time() + (float(skew.read_text()) if skew.exists() else 0.0)


time.time = skewed_time
runpy.run_path(str(AGENT), run_name="__main__")
