"""Styles that tell the lines of a picture apart, also without colour."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, safe for colour blindness
MARKERS = "osD^vP*"
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (2, 1)), (0, (9, 2, 3, 2)))  # dotted lines are reference levels

Style = dict[str, str | float | tuple[int, tuple[int, ...]]]  # what matplotlib's `plot` takes


def colour_and_marker(number: int) -> Style:
    """Colour and marker of a line by its number: both cycle, and no two of 49 lines agree in both."""
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def dashes_and_width(number: int) -> Style:
    """Dashes and width (points) of a line by its number: no two of 14 lines agree in both."""
    return {"linestyle": DASHES[number % 7], "linewidth": (1.8, 1.0)[number // 7 % 2]}
