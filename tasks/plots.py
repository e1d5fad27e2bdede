"""The plots of the report as inline SVG that takes its colours and its font from the page, in light and in dark."""

import io
import re
from typing import Any

import numpy as np

from schemas.reports import SplitStatistics, TokenizeReport, TrainReport

# Matplotlib draws with these stand-ins; the page's variables take their place.
INK, GRID, FIRST, SECOND = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_VARIABLES = {INK: "var(--muted)", GRID: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: the page's font, and it can be selected
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
MOST_POINTS = 400  # more can't be told apart at this width


def loss_curve(report: TrainReport) -> str:
    """Training loss by optimizer step, with the validations and the step whose adapter was kept."""
    groups = np.array_split(np.arange(len(report.curve)), min(len(report.curve), MOST_POINTS))
    steps = [report.curve[group[-1]].step for group in groups]
    losses = [float(np.mean([report.curve[index].loss for index in group])) for group in groups]

    def draw(axes: Any) -> None:
        axes.plot(steps, losses, color=FIRST, linewidth=1.2, label="training")
        axes.plot(
            [point.step for point in report.validation],
            [point.loss for point in report.validation],
            color=SECOND,
            linewidth=1.8,
            marker="o",
            markersize=4.5,
            label="validation",
        )
        axes.axvline(report.kept_step, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), label="kept adapter")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss, nats per token")
        axes.set_ylim(bottom=0)

    return _svg(draw, "Training and validation loss by optimizer step")


def length_histogram(report: TokenizeReport) -> str:
    """Rows by their length in tokens, training and held-out."""

    def bars(axes: Any, split: SplitStatistics, color: str, name: str) -> None:
        if split.rows:
            edges = np.array(split.histogram_edges)
            axes.bar(edges[:-1], split.histogram_counts, np.diff(edges) * 0.92, align="edge", color=color, label=name)

    def draw(axes: Any) -> None:
        bars(axes, report.train, FIRST, "training")
        bars(axes, report.validation, SECOND, "held out")
        axes.set_xlabel("tokens in a row")
        axes.set_ylabel("rows")

    return _svg(draw, "Rows by length in tokens")


def _svg(draw: Any, title: str) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # the salt makes the names inside the picture the same each time, and different from another picture's on the page
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        figure.legend(loc="outside upper right", ncols=3)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """The picture without what belongs to a file of its own, with the page's colours and a name for screen readers."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)  # would style the page
    body = re.sub(r' font-family: [^;"]*;', "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # figure_1, axes_1, ...: the same in each picture of the page
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, variable)
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None  # Matplotlib always writes one
    head = f'<svg class="plot" {view[0]} role="img" aria-label="{title}">'
    return head + body[body.index(">") + 1 :].rstrip()
