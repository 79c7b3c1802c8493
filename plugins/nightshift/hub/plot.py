"""The plot beside the model card: reward and KL of each training step.

A PNG, because the Hub's cards do not show every SVG. Its ground is white and opaque, so that it reads the same on the
Hub's light and dark pages.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from nightshift.ledger.record import MetricPoint

#: A metric's name in the record → its name in the plot, from top to bottom.
PLOTTED = {"reward": "reward", "kl": "KL"}

_COLOURS = {"reward": "#1f5fbf", "kl": "#b3541e"}
_GREY = "#57606a"
_WIDTH, _HEIGHTS, _DPI = 7.2, {"reward": 2.7, "kl": 1.6}, 150  # inches, inches, dots per inch
_FEW = 60  # steps, up to which each is marked with a dot
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 9,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.6,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def training_plot(points: Sequence[MetricPoint]) -> tuple[bytes, tuple[str, ...]] | None:
    """Return a PNG of a training's metrics and what it shows (values of `PLOTTED`), or None without a reward.

    The same points give the same bytes with the same matplotlib. Values that are not finite are left out.
    """
    series = {metric: _finite(points, metric) for metric in PLOTTED}
    shown = [metric for metric in PLOTTED if series[metric]]
    if "reward" not in shown:
        return None
    with _matplotlib_without_traces():
        import matplotlib.style
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, sum(_HEIGHTS[metric] for metric in shown)), layout="constrained")
        panels = figure.subplots(
            len(shown),
            sharex=True,
            squeeze=False,
            gridspec_kw={"height_ratios": [_HEIGHTS[metric] for metric in shown]},
        )
        for metric, panel in zip(shown, panels[:, 0], strict=True):
            _draw(panel, metric, series[metric])
            panel.margins(x=0.02)
        figure.align_ylabels()
        panels[-1, 0].set_xlabel("training step")
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        content = io.BytesIO()
        # Without the program's name, which has the version in it.
        figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": None})
    return content.getvalue(), tuple(PLOTTED[metric] for metric in shown)


def _finite(points: Sequence[MetricPoint], metric: str) -> list[tuple[int, float]]:
    return [
        (point.step, value)
        for point in sorted(points, key=lambda point: point.step)
        if (value := point.values.get(metric)) is not None and math.isfinite(value)
    ]


def _draw(panel: Axes, metric: str, series: list[tuple[int, float]]) -> None:
    steps, values = zip(*series, strict=True)
    few = len(series) <= _FEW
    panel.plot(
        steps,
        values,
        color=_COLOURS[metric],
        linewidth=1.4 if few else 0.8,
        marker="o" if few else "",
        markersize=3,
    )
    panel.set_ylabel(PLOTTED[metric])


@contextlib.contextmanager
def _matplotlib_without_traces() -> Iterator[None]:
    """Keep the first import of matplotlib from writing its list of fonts to the home folder.

    A worker's home may be read-only, and a user's settings there would change the plot.
    """
    name = "MPLCONFIGDIR"
    if name in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nightshift-plot-") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
