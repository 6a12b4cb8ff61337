"""Write a self-contained HTML page: figures and style are inside, without external files.

A page has no scripts, or one of ours, which the browser identifies by its checksum; no other is run.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from PIL import Image

from vitrail.base.errors import ConfigError
from vitrail.base.figures import VERDICT_MARKS, CaptionedFigure, FigureFolder, Verdict
from vitrail.base.files import make_folder, write_atomically
from vitrail.base.style import css_variables
from vitrail.base.text import TableCells, escape_unprintable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CSS_PIXELS_PER_INCH = 96
MIN_FIGURE_SCALE = 0.5  # of its own width; smaller text is illegible, so the figure scrolls instead
MAX_PAGE_FIGURES = 100  # of a page with a section for each
PHONE_FIGURE_WIDTH = 312  # CSS pixels available on a phone 360 wide
KEPT_CHARACTERS = (  # not printable for Python: line breaks, the emoji joiner, and all spaces of Unicode
    "\n\t\u200d\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A section of a page with a heading. Empty lines separate the paragraphs of `text`."""

    title: str
    text: str = ""
    figures: Sequence[CaptionedFigure] = ()
    table: TableCells | None = None
    preformatted: str = ""
    markup: str = ""  # HTML, in which all text is escaped


def render_page(
    title: str,
    lead: str,
    sections: Sequence[PageSection],
    *,
    script: str = "",
    style: str = "",
    progress: Callable[[int], object] | None = None,
) -> str:
    """Render the page as HTML; all text is escaped. `progress` is called with 1 after each figure.

    `script` and `style` are for the `markup` of sections.
    """
    contents = ""
    if len(sections) > 1:
        entries = (
            f'<li><a href="#section-{n}">{escape_html(each.title)}</a></li>' for n, each in enumerate(sections, 1)
        )
        contents = f'<nav aria-label="Contents"><ol>{"".join(entries)}</ol></nav>'
    bodies, figures = list[str](), 0
    for number, section in enumerate(sections, 1):
        bodies.append(render_section(section, number, figures, progress))
        figures += len(section.figures)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}{allow_script(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape_html(title)}</title>
<style>{css_variables()}{STYLESHEET}{style}</style>
</head>
<body>
<main>
<header><h1>{escape_html(title)}</h1>{render_paragraphs(lead)}{contents}</header>
{"".join(bodies)}</main>
{f"<script>{script}</script>" if script else ""}</body>
</html>
"""


def allow_script(script: str) -> str:
    """The rule that allows this script and no other."""
    checksum = b64encode(sha256(script.encode()).digest()).decode("ascii")
    return f"; script-src 'sha256-{checksum}'" if script else ""


def write_page(page: str, path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"cannot write the page as {path}; expected a name that ends in .html")
    make_folder(path.parent)
    write_atomically(path, lambda place: place.write_text(page, "utf-8"))


@dataclass(frozen=True, kw_only=True)
class FigurePage(FigureFolder):
    """Figures as sections of one page, which is written after the last of them."""

    title: str
    figures: list[CaptionedFigure] = field(default_factory=list[CaptionedFigure])

    def list_paths(self, names: Sequence[str]) -> list[Path]:
        if len(names) > MAX_PAGE_FIGURES:
            raise ConfigError(
                f"{self.path} for {len(names):,} figures; expected at most {MAX_PAGE_FIGURES} on a page: use a folder"
            )
        return [self.path]

    def save(self, figure: CaptionedFigure) -> list[Path]:
        self.figures.append(figure)
        return [self.path]

    def finish(self) -> None:
        if self.figures:
            legends = dict.fromkeys(each.legend for each in self.figures)
            sections = [PageSection(title=Path(each.name).stem, figures=[each]) for each in self.figures]
            write_page(render_page(self.title, "\n\n".join(legends), sections), self.path)


def render_section(
    section: PageSection, number: int, figures: int, progress: Callable[[int], object] | None = None
) -> str:
    """Render a section; `figures` is the number of figures before it."""
    parts = [f'<h2 id="section-{number}">{escape_html(section.title)}</h2>', render_paragraphs(section.text)]
    if section.table is not None:
        parts.append(render_table(section.table, section.title))
    if section.figures:
        rendered = list[str]()
        for n, figure in enumerate(section.figures, figures + 1):
            rendered.append(render_figure(figure, n))
            if progress is not None:
                progress(1)
        parts.append(f'<div class="figures">{"".join(rendered)}</div>')
    if section.markup:
        parts.append(section.markup)
    if section.preformatted:
        parts.append(f'<pre tabindex="0">{escape_html(section.preformatted)}</pre>')
    return f'<section aria-labelledby="section-{number}">{"".join(parts)}</section>\n'


def render_table(table: TableCells, name: str) -> str:
    heading, rows, alignments = table

    def line(cells: Sequence[str], tag: str) -> str:
        pairs = zip(cells, alignments, strict=True)
        return "".join(
            f"<{tag}{' class=r' * (alignment == 'r')}>{escape_html(cell)}</{tag.split()[0]}>"
            for cell, alignment in pairs
        )

    head = f"<thead><tr>{line(heading, 'th scope=col')}</tr></thead>" if any(heading) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escape_html(name)}" tabindex="0"><table>'
        f"{head}<tbody>{body}</tbody></table></div>"
    )


def render_figure(captioned: CaptionedFigure, number: int) -> str:
    """Render as SVG, or, if its PNG is smaller, as for photos, as WebP, which takes a tenth of the PNG."""
    figure = captioned.draw()
    width, height = (round(side * CSS_PIXELS_PER_INCH) for side in figure.get_size_inches())
    alt = f"{captioned.title.rstrip('.')}. {captioned.caption}"
    vector, raster = render_inline_svg(figure, f"figure-{number}", alt), encode_figure(figure, "png")
    if len(vector) <= 4 * len(raster) / 3:
        image = vector
    else:
        data = b64encode(convert_to_webp(raster)).decode("ascii")
        source = f"data:image/webp;base64,{data}"
        image = f'<img role="img" alt="{escape_html(alt)}" width="{width}" height="{height}" src="{source}">'
    min_width = round(width * MIN_FIGURE_SCALE)
    focusable = ' tabindex="0"' if min_width > PHONE_FIGURE_WIDTH else ""  # scrolling with the keyboard
    return (
        f'<figure id="figure-{number}" style="--own:{width}px;--least:{min_width}px">'
        f'<div class="card"{focusable}>{image}</div>'
        f"<figcaption><b>Figure {number}. {render_verdict(captioned.verdict)}"
        f"{escape_html(captioned.title.rstrip('.'))}.</b> "
        f"{escape_html(captioned.caption)}</figcaption>"
        f"</figure>"
    )


def render_verdict(verdict: Verdict) -> str:
    """A mark and a word, also for readers who do not see the color."""
    return f'<span class="{verdict}">{VERDICT_MARKS[verdict]} {verdict.capitalize()}.</span> ' if verdict else ""


def encode_figure(figure: "Figure", kind: str) -> bytes:
    """Encode a figure with text as paths, which needs no fonts, and with reproducible ids."""
    import matplotlib as mpl

    buffer = BytesIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "vitrail"}):
        figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def convert_to_webp(png: bytes) -> bytes:
    buffer = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").save(buffer, "WEBP", quality=88)
    return buffer.getvalue()


def render_inline_svg(figure: "Figure", name: str, alt: str) -> str:
    """Render a figure as inline SVG: without namespaces, comments and style, and with ids unique to the page."""
    root = ElementTree.fromstring(encode_figure(figure, "svg"))
    used = {found for each in root.iter() for value in each.attrib.values() for found in find_id_references(value)}
    for parent in list(root.iter()):
        for child in list(parent):
            if strip_namespace(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for each in root.iter():
        each.tag = strip_namespace(each.tag)
        attributes = {strip_namespace(key): value for key, value in each.attrib.items()}
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        each.attrib.clear()
        for key, value in attributes.items():
            each.set(key, f"{name}-{value}" if key == "id" else ID_REFERENCE.sub(rf"\1{name}-\2", value))
    view_box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": view_box, "role": "img", "aria-label": escape_unprintable(alt, KEPT_CHARACTERS)})
    return ElementTree.tostring(root, "unicode")


ID_REFERENCE = re.compile(r"(^#|url\(#)([^)]+)")


def find_id_references(value: str) -> list[str]:
    return [found for _, found in ID_REFERENCE.findall(value)]


def strip_namespace(name: str) -> str:
    """{http://www.w3.org/2000/svg}path → path"""
    return name.rpartition("}")[2]


def render_paragraphs(text: str) -> str:
    return "".join(f"<p>{escape_html(each.strip())}</p>" for each in re.split(r"\n\s*\n", text) if each.strip())


def escape_html(text: str) -> str:
    return escape(escape_unprintable(text, KEPT_CHARACTERS))


STYLESHEET = """
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;font:var(--normal)/1.6 var(--sans);overflow-wrap:anywhere}
main{max-width:66rem;margin:0 auto;padding:3.5rem 1rem 5rem}
header>*,section>*{max-width:var(--column);margin-left:auto;margin-right:auto}
header{margin-bottom:3.5rem}
h1{font-size:var(--largest);line-height:1.25;font-weight:600;margin-top:0;margin-bottom:1rem;text-wrap:balance}
h2{font-size:var(--large);line-height:1.3;font-weight:600;margin-top:3.5rem;margin-bottom:.75rem;padding-top:1rem;
border-top:1px solid var(--line);scroll-margin-top:.5rem;text-wrap:balance}
p{margin-top:0;margin-bottom:1em;white-space:pre-line;hyphens:auto}
header p{font-size:var(--large);color:var(--soft)}
a{color:var(--link);text-decoration-thickness:1px;text-underline-offset:.18em}
a:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--link);outline-offset:2px}
nav{line-height:1.5;border-top:1px solid var(--line);padding-top:1rem;margin-top:2rem}
nav ol{margin:0;padding-left:1.5rem;columns:15rem;column-gap:2.5rem}
nav li{break-inside:avoid;padding:.125rem 0 .125rem .25rem}
nav li::marker{color:var(--soft);font-variant-numeric:tabular-nums}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
section>.figures{max-width:none;display:grid;justify-items:center;gap:2rem;margin-top:1.75rem;margin-bottom:2rem}
figure{margin:0;min-width:0;width:100%;max-width:calc(var(--wide) + 1.5rem + 2px)}
.card{background:#fff;color:#000;color-scheme:light;border:1px solid var(--line);border-radius:6px;padding:.75rem;
overflow-x:auto}
.card svg,.card img{display:block;width:100%;height:auto;max-width:var(--own);min-width:var(--least);margin:0 auto}
.card svg{stroke-linejoin:round;stroke-linecap:butt}
figcaption{font-size:var(--small);line-height:1.5;color:var(--soft);max-width:var(--column);margin:.75rem auto 0;
white-space:pre-line}
figcaption b{color:var(--ink);font-weight:600}
.wrong{color:var(--wrong)}
.right{color:var(--right)}
.scroll{overflow-x:auto;width:fit-content;min-width:min(100%,var(--column));max-width:min(100%,64rem);
margin-top:1.25rem;margin-bottom:1.5rem}
table{border-collapse:collapse;line-height:1.5;border-top:2px solid var(--ink);border-bottom:2px solid var(--ink)}
th,td{padding:.375rem 1rem .375rem .125rem;text-align:left;vertical-align:baseline;max-width:24rem;min-width:1rem;
overflow-wrap:break-word}
th{font-weight:600;border-bottom:1px solid var(--ink);white-space:nowrap}
tbody tr+tr td{border-top:1px solid var(--line)}
.r{text-align:right;white-space:nowrap;padding-left:1rem;padding-right:.125rem}
td.r{font:var(--small)/1.5 var(--mono)}
.r+:not(.r){padding-left:1.25rem}
pre{font:var(--small)/1.5 var(--mono);background:var(--shade);border:1px solid var(--line);border-radius:6px;
padding:1rem;overflow-x:auto;overflow-wrap:normal;width:fit-content;min-width:min(100%,var(--column));
max-width:min(100%,64rem);tab-size:4}
@media (max-width:30rem){main{padding-top:2rem}.card{padding:.375rem}
h2{margin-top:2.5rem}}
@media print{html{font-size:10pt;background:#fff;color:#000}main{max-width:none;padding:0}
figure,tr,pre{break-inside:avoid}h2{break-after:avoid}
.card{border:0;padding:0;overflow:visible}.card svg,.card img{min-width:0}nav{display:none}
.scroll,pre{overflow:visible}pre{white-space:pre-wrap}@page{margin:2cm}}
"""
