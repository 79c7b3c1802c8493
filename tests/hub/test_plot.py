"""The plot of a training."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from nightshift.hub.plot import training_plot
from nightshift.ledger.record import MetricPoint

PLUGINS = Path(__file__).parents[2] / "plugins"


def points(steps: int = 8, **metrics: float) -> list[MetricPoint]:
    values = metrics or {"reward": 0.1, "kl": 0.001}
    return [
        MetricPoint(step=step, values={name: value * step for name, value in values.items()})
        for step in range(1, steps + 1)
    ]


def size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def chunks(png: bytes) -> list[bytes]:
    found, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        found.append(png[at + 4 : at + 8])
        at += length + 12
    return found


def test_reward_and_kl_are_drawn_in_panels_of_their_own() -> None:
    both = training_plot(points())
    reward = training_plot(points(reward=0.1))
    assert both is not None
    assert reward is not None
    assert both[1] == ("reward", "KL")
    assert reward[1] == ("reward",)
    assert size(both[0])[0] == size(reward[0])[0] == 1080
    assert size(both[0])[1] > size(reward[0])[1]


def test_the_same_points_give_the_same_bytes_in_any_order_and_in_another_process() -> None:
    first = training_plot(points())
    again = training_plot(points()[::-1])
    assert first is not None
    assert first == again
    script = (
        "import sys\n"
        "from nightshift.hub.plot import training_plot\n"
        "from nightshift.ledger.record import MetricPoint\n"
        "points = [MetricPoint(step=s, values={'reward': 0.1 * s, 'kl': 0.001 * s}) for s in range(1, 9)]\n"
        "sys.stdout.buffer.write(training_plot(points)[0])\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PLUGINS)},
    )
    assert other.stdout == first[0]


def test_other_points_give_another_plot() -> None:
    assert training_plot(points()) != training_plot(points(reward=0.2, kl=0.001))


@pytest.mark.parametrize(
    "nothing",
    [[], points(loss=0.5), points(kl=0.1), [MetricPoint(step=1, values={"reward": math.nan})]],
    ids=["no steps", "only the loss", "no reward", "no number"],
)
def test_without_a_reward_there_is_no_plot(nothing: list[MetricPoint]) -> None:
    assert training_plot(nothing) is None


def test_values_that_are_no_numbers_are_left_out() -> None:
    with_gap = [*points(), MetricPoint(step=9, values={"reward": math.inf, "kl": math.nan})]
    assert training_plot(with_gap) == training_plot(points())


def test_the_file_names_no_program_and_no_time() -> None:
    made = training_plot(points())
    assert made is not None
    assert set(chunks(made[0])) <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_nothing_is_left_in_the_home_folder_or_in_the_environment(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MPLCONFIGDIR", "XDG_CACHE_HOME"}
    }
    script = (
        "import os\n"
        "from nightshift.hub.plot import training_plot\n"
        "from nightshift.ledger.record import MetricPoint\n"
        "assert training_plot([MetricPoint(step=1, values={'reward': 1.0})])\n"
        "assert 'MPLCONFIGDIR' not in os.environ\n"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={**environment, "PYTHONPATH": str(PLUGINS), "HOME": str(home), "TMPDIR": str(temporary)},
    )
    assert list(home.rglob("*")) == []
    assert list(temporary.rglob("*")) == []
