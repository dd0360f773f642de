"""Curves, where a table would hide them: an SVG beside the table of the same name in `results/`."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from _rounds import RESULTS

WIDE, HIGH = 4.4, 3.4
"""Inches of one diagram."""


def plot(file: str, *draw: Callable[[Any], None]) -> None:
    """Each of `draw` draws a diagram on axes of matplotlib's; they stand side by side.

    matplotlib is only in the environment of `make bench`: without it this says that there is no plot.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {file}: matplotlib isn't installed")
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text = io.StringIO()
    # Text as text, and the same bytes for the same figures: a result is kept in git.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shmlimit", "font.size": 9}):
        figure = Figure(figsize=(WIDE * len(draw), HIGH), layout="constrained")
        for axes, one in zip(figure.subplots(1, len(draw), squeeze=False)[0], draw, strict=True):
            one(axes)
            axes.grid(visible=True, alpha=0.3)
        figure.savefig(text, format="svg", metadata={"Date": None})
    RESULTS.mkdir(parents=True, exist_ok=True)
    small = re.sub(r"<!--.*?-->", "", text.getvalue(), flags=re.DOTALL)
    lines = [line.strip() for line in small.splitlines() if line.strip()]
    (RESULTS / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def curve(axes: Any, name: str, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """One curve."""
    axes.plot(x, y, linewidth=1.2, label=name, **style)
