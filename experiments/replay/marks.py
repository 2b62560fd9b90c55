"""Colours, markers and axes that the figures of a replay share."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from ..report.plots import COLOURS, MARKERS, SPARE_COLOURS, Style, shade

NOISE_COLOUR = "#999999"


def styles_of(estimators: Sequence[str]) -> dict[str, Style]:
    """Colour and marker of each estimator: the report's where it knows the name, else one of its own.

    Names that differ in a number at the end are shades of one hue, from light to dark.

    >>> styles = styles_of(["eqb", "histogram_100", "histogram_1000", "mine"])
    >>> [styles[name].colour for name in ("eqb", "histogram_100", "histogram_1000", "mine")]
    ['#0072b2', '#aa658b', '#663c54', '#999933']
    """
    unknown = [name for name in estimators if name not in COLOURS]
    series = {name: [other for other in unknown if _stem(other) == _stem(name)] for name in unknown}
    spare = iter(SPARE_COLOURS * (1 + len(estimators) // len(SPARE_COLOURS)))
    styles = {}
    for place, name in enumerate(estimators):
        members = series.get(name, [])
        if name in COLOURS:
            colour = COLOURS[name]
        elif len(members) == 1 or not (hue := _family_hue(name, estimators)):
            colour = next(spare)
        else:
            # the darker half: names are written in the colour
            colour = shade(hue, len(members) + members.index(name), 2 * len(members))
        styles[name] = Style(colour, MARKERS[place % len(MARKERS)])
    return styles


def _stem(name: str) -> str:
    return re.sub(r"_?\d+$", "", name)


def _family_hue(name: str, estimators: Sequence[str]) -> str | None:
    """The colour of the report's first name that begins with the same word, unless that one is here itself."""
    first = name.split("_")[0]
    known = next((known for known in COLOURS if known.split("_")[0] == first), None)
    return COLOURS[known] if known and known not in estimators else None


def stream_styles(streams: Sequence[str]) -> dict[str, Style]:
    colours = (*SPARE_COLOURS[:2], *SPARE_COLOURS[3:])
    return {
        name: Style(colours[place % len(colours)], MARKERS[place % len(MARKERS)]) for place, name in enumerate(streams)
    }


def log_scale(axis: Axis, most: int = 8) -> None:
    """Make an axis with data logarithmic, if any are positive, with about ``most`` plain numbers instead of powers."""
    if not np.isfinite(axis.get_minpos()):
        return
    axis.axes.set(**{"xscale" if axis is axis.axes.xaxis else "yscale": "log"})
    low, high = axis.get_view_interval()
    if high < 1.5 * low:
        # a single value
        low, high = low / 2, high * 2
        axis.axes.set(**{"xlim" if axis is axis.axes.xaxis else "ylim": (low, high)})
    decades = np.log10(high / low)
    choices = ((1, 1.5, 2, 3, 4, 6), (1, 2, 5), (1, 3), (1,))
    subs = next((subs for subs in choices if len(subs) * decades <= most), (1,))
    axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """A number of few characters.

    >>> _short(0.003), _short(40_000), _short(2_000_000), _short(1e-7)
    ('0.003', '40k', '2M', '1e-07')
    """
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
