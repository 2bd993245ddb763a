"""The style and the colours of pictures, and their atomic writing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".png"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
"""Parameters for matplotlib's `rc_context`."""
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
AMBER, SKY, PINK, BROWN, INDIGO, TEAL = "#E69F00", "#56B4E9", "#CC79A7", "#8C6D31", "#332288", "#44AA99"
COLOURS = (BLUE, ORANGE, GREEN, AMBER, SKY, PINK, BROWN, INDIGO, TEAL)
"""Colours for lines and bars, in the order of use; colour-blind readers can distinguish them, too."""


def require_format(flag: str, target: Path) -> None:
    """Raise `UserError` unless the file name that was given after `flag` is that of a PNG."""
    if target.suffix.lower() != SUFFIX:
        raise UserError(f"{flag} {target}: pictures are written as PNG: expected the name of a {SUFFIX} file")


def save(figure: Figure, target: Path) -> None:
    """Save the figure as a PNG.

    Only numbers on axes may be formulas of matplotlib. Other text may be a user's name with dollar signs.
    """
    from matplotlib.text import Text

    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = {text for axis in axes for text in (*axis.get_ticklabels(which="both"), axis.offsetText)}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text not in ticks:
            text.set_parse_math(False)
    with replacing(target) as part:
        figure.savefig(part, format="png")
