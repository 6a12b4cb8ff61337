"""Colors, sizes and fonts in one place: matplotlib reads them from here, pages read them as CSS variables."""

BLUE = "#2f6db3"  # the model
RED = "#d1495b"  # the one that is selected, or wrong
GREEN = "#2a9d6f"  # right; never next to red without a mark or a word
GRAY = "#8a8f98"  # context, and the numbers of a paper
PALE = "#d5d8dc"  # what is empty, left out or given up
PALETTE = (BLUE, "#e08e2b", GREEN, RED, "#7b5ea7", "#8c6d46", "#d96fae", "#5f6670", "#a8a532", "#35a7b8")

SEQUENTIAL_MAP = "viridis"  # readable with color blindness and in grayscale
DIVERGING_MAP = "PuOr_r"  # for signed values, with limits that put 0 in its neutral middle
SHARE_MAP, SECOND_SHARE_MAP = "Blues", "Oranges"  # from white, under numbers

FIGURE_WIDTH, FIGURE_DPI = 9.0, 130  # inches, the same for all figures of a page
TITLE_POINTS, LABEL_POINTS, NOTE_POINTS = 11, 9, 8  # text in figures

# light and dark. Figures are white in both, so their text has the light colors.
PAGE_COLORS = {
    "paper": ("#fdfcfa", "#16181b"),
    "shade": ("#f3f1ec", "#1e2125"),
    "line": ("#dedad2", "#363a40"),
    "ink": ("#22262b", "#dcdad5"),
    "soft": ("#5b626b", "#a2a7ae"),
    "link": ("#1f5a9b", "#8ab8ea"),
    "right": ("#1b7350", "#5fc79b"),
    "wrong": ("#b3324a", "#f29aa6"),
    "other": ("#a84c0b", "#f0a35e"),
}
TEXT_COLORS = ("ink", "soft", "link", "right", "wrong", "other")  # their contrast to paper and shade is at least 4.5
SOFT, RIGHT, WRONG = (PAGE_COLORS[name][0] for name in ("soft", "right", "wrong"))  # of text in figures
FONTS = {
    "sans": 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif',
    "mono": 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace',  # numbers in tables
}
TEXT_SIZES = {"small": 13, "normal": 15, "large": 18, "largest": 24}  # pixels
STEP = 4  # pixels: all distances of a page are multiples of it
COLUMN = 34  # rem: 75 characters of normal size


def css_variables() -> str:
    """The table as CSS: colors for light and dark pages, fonts, sizes in rem, and widths."""
    light, dark = (";".join(f"--{name}:{pair[n]}" for name, pair in PAGE_COLORS.items()) for n in (0, 1))
    marks = {"blue": BLUE, "red": RED, "green": GREEN, "gray": GRAY}
    sizes = {name: f"{pixels / 16:g}rem" for name, pixels in TEXT_SIZES.items()}
    widths = {"step": f"{STEP / 16:g}rem", "column": f"{COLUMN}rem", "wide": f"{round(FIGURE_WIDTH * 96)}px"}
    shared = ";".join(f"--{name}:{value}" for name, value in {**marks, **FONTS, **sizes, **widths}.items())
    return f":root{{{light};{shared}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
