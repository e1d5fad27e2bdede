"""The plots of the report as inline SVG that takes its colours and its font from the page, in light and in dark."""

import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from schemas.reports import TokenizeReport, TrainReport

# Matplotlib draws with these stand-ins; the page's variables take their place.
INK, GRID, FIRST, SECOND = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_VARIABLES = {INK: "var(--muted)", GRID: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: the page's font, and it can be selected
    "font.size": 12,
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


def training_curve(report: TrainReport, validation_is_training: bool) -> str:
    """Loss by optimizer step, with the validations and the step whose adapter was kept; below it the learning rate.

    Args:
        report: what `train` left.
        validation_is_training: nothing was held out, so that the validations are over training rows.
    """
    groups = np.array_split(np.arange(len(report.curve)), min(len(report.curve), MOST_POINTS))
    steps = [report.curve[group[-1]].step for group in groups]
    losses = [float(np.mean([report.curve[index].loss for index in group])) for group in groups]
    rates = [report.curve[group[-1]].learning_rate for group in groups]

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        top.plot(steps, losses, color=FIRST, linewidth=1.2, label="training step")
        top.plot(
            [point.step for point in report.validation],
            [point.loss for point in report.validation],
            color=SECOND,
            linewidth=1.8,
            marker="o",
            markersize=4.5,
            clip_on=False,  # a point at the edge is whole
            label="all training rows" if validation_is_training else "validation",
        )
        top.axvline(report.kept_step, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), label="kept adapter")
        top.set_ylabel("loss, nats per token")
        seen = [*losses, *(point.loss for point in report.validation)]
        if min(seen) < max(seen) / 2:  # else from 0 a small fall would look like none
            top.set_ylim(bottom=0)
        bottom.plot(steps, rates, color=FIRST, linewidth=1.2)
        bottom.set_ylim(bottom=0)
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
        bottom.set_ylabel("learning rate")
        bottom.set_xlabel("optimizer step")
        figure.align_ylabels()

    return _svg(draw, "Loss and learning rate by optimizer step", height=4.3)


def length_histogram(report: TokenizeReport) -> str:
    """Records by their length in tokens, training and held-out side by side; the classes double in width."""
    splits = [(report.train, FIRST, "training")]
    if report.validation.records:
        splits.append((report.validation, SECOND, "held out"))
    edges = max((split.histogram_edges for split, _, _ in splits), key=len)
    names = [f"{low}\N{EN DASH}{high - 1}" for low, high in itertools.pairwise(edges)]
    width = 0.8 / len(splits)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (split, color, name) in enumerate(splits):
            at = np.arange(len(split.histogram_counts)) + (number - (len(splits) - 1) / 2) * width
            bars = axes.bar(at, split.histogram_counts, width * 0.94, color=color, label=name)
            axes.bar_label(bars, [count or "" for count in split.histogram_counts], padding=2, color=INK)
        axes.set_xticks(range(len(names)), names)
        axes.grid(False, axis="x")
        axes.margins(y=0.12)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("tokens in a record")
        axes.set_ylabel("records")

    return _svg(draw, "Records by length in tokens", height=3.4)


def _svg(draw: Callable[[Any], None], title: str, height: float) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # the salt makes the names inside the picture the same each time, and different from another picture's on the page
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.0, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
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
