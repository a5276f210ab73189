"""Pages in a Chromium that playwright drives: pointer, keys, what a page asks for, how it looks.

`driven` is the fixture. A test that takes it stands in tests/SKIPS.md: without a browser it skips,
or fails if CRATE_BROWSER=required.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chromium import found, lacking, require
from crate_interp.stats.verdicts import SHOWN

WIDTHS, SCHEMES, HEIGHT = (390, 1280), ("light", "dark"), 900
LEAST_CONTRAST = 4.5
_OWN = ("file:", "data:", "blob:", "about:")  # addresses that leave nothing

_OVERFLOW = Path(__file__).with_name("overflow.js").read_text()

# The contrast of every visible text with its ground, by the formula of WCAG 2.
_CONTRAST = """least => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const parse = colour => {  // any CSS colour as [red, green, blue, alpha]
    if (!known.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, below) => below.map((v, i) => i < 3 ? top[i] * top[3] + v * (1 - top[3]) : 1);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const dark = matchMedia('(prefers-color-scheme: dark)').matches
    && getComputedStyle(document.documentElement).colorScheme.includes('dark');
  const isSvg = element => element.ownerSVGElement != null;
  const opacity = element => {
    let share = 1;
    for (let e = element; e; e = e.parentElement) share *= +getComputedStyle(e).opacity;
    return share;
  };
  const shapeUnder = element => {  // the last shape drawn before an SVG text that holds its middle
    const box = element.getBoundingClientRect(), x = (box.left + box.right) / 2,
      y = (box.top + box.bottom) / 2;
    const holds = shape => {
      const b = shape.getBoundingClientRect();
      return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom
        && shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
    };
    const shapes = [...element.ownerSVGElement.querySelectorAll('rect, circle, ellipse')];
    const fills = shapes.filter(holds).map(shape => getComputedStyle(shape).fill);
    return fills.filter(fill => fill !== 'none').map(parse).filter(fill => fill[3] > 0).at(-1);
  };
  const onPicture = element => {  // nothing tells the colours of a picture below a text
    const box = element.getBoundingClientRect(), x = (box.left + box.right) / 2,
      y = (box.top + box.bottom) / 2;
    return [...element.ownerSVGElement.querySelectorAll('image')].some(picture => {
      const b = picture.getBoundingClientRect();
      return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom;
    });
  };
  const ground = element => {
    const layers = [];
    if (isSvg(element)) layers.push(shapeUnder(element) ?? [0, 0, 0, 0]);
    for (let e = element; e; e = e.parentElement)
      if (!isSvg(e)) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below),
      dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const wrong = new Map();
  const look = (element, text) => {
    const box = element.getBoundingClientRect();
    const shown = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!shown || box.width <= 1 || box.height <= 1 || element.closest(':disabled')) return;
    if (isSvg(element) && onPicture(element)) return;
    const style = getComputedStyle(element), below = ground(element);
    const [r, g, b, a] = parse(isSvg(element) ? style.fill : style.color);
    const pair = [light(over([r, g, b, a * opacity(element)], below)), light(below)];
    const ratio = (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    if (ratio < least)
      wrong.set(`${element.tagName.toLowerCase()}.${element.getAttribute('class') ?? ''}`,
        `contrast ${ratio.toFixed(2)}: ${JSON.stringify(text.trim().slice(0, 40))}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    if (node.data.trim() && !['SCRIPT', 'STYLE', 'TITLE'].includes(node.parentElement.tagName))
      look(node.parentElement, node.data);
  }
  for (const field of document.querySelectorAll('select, textarea, input'))
    if (!['range', 'checkbox', 'radio', 'color', 'hidden'].includes(field.type))
      look(field, String(field.value));
  return [...wrong].map(([place, words]) => `${place} ${words}`);
}"""


# A page says its answer in few words, shows something high up, and one sign for each verdict.
_ORDER = """([words, highest, signs]) => {
  const answer = document.querySelector('.finding p')?.innerText.trim() ?? '', wrong = [];
  const count = answer.split(/\\s+/).filter(word => /\\w/.test(word)).length;
  if (!count || count > words) wrong.push(`its answer has ${count} words: ${answer}`);
  const large = element => {
    const box = element.getBoundingClientRect();
    return element.checkVisibility() && box.width > 80 && box.height > 30;
  };
  const pictures = 'main :is(svg, img, canvas, table, .tiles, .cards, #atoms, #over, .light)';
  const shown = [...document.querySelectorAll(pictures)].filter(large);
  const top = Math.min(...shown.map(element => element.getBoundingClientRect().top + scrollY));
  if (!(top <= highest)) wrong.push(`its first picture begins at ${Math.round(top)} px`);
  for (const sign of document.querySelectorAll(':is(.sign, .marks) > :is(b, button)')) {
    const kind = ['good', 'bad'].find(name => sign.classList.contains(name)) ?? '';
    const words = `${sign.textContent} ${kind}`;
    if (!signs.includes(words)) wrong.push(`a verdict looks like this: ${words}`);
  }
  for (const strip of document.querySelectorAll('.wide:has(.strip)'))
    if (strip.scrollWidth > strip.clientWidth + 1) wrong.push('a verdict is cut');
  return wrong;
}"""
MOST_WORDS, HIGHEST = 20, 300
SIGNS = [f"{shown.mark} {shown.kind}" for shown in SHOWN.values()]


@dataclass
class Opened:
    """A page in a browser. asked: addresses outside of it. wrong: complaints of its scripts."""

    page: Any
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def launched() -> Iterator[Any]:
    """A running Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def driven():
    """A running Chromium; what takes it skips or fails without Chromium or playwright."""
    if importlib.util.find_spec("playwright") is None:
        lacking("there is no playwright: pip install playwright")
    require()
    with launched() as browser:
        yield browser


@contextmanager
def opened(
    browser: Any,
    page: Path | str,
    width: int = 1200,
    scheme: str = "light",
    *,
    height: int = HEIGHT,
    touch: bool = False,
    scripts: bool = True,
) -> Iterator[Opened]:
    """A file, or the text of a page, in a window of its own; no request leaves it."""
    options = {"viewport": {"width": width, "height": height}, "java_script_enabled": scripts}
    context = browser.new_context(color_scheme=scheme, has_touch=touch, **options)
    shown = Opened(context.new_page())

    def meet(route: Any) -> None:
        if route.request.url.startswith(_OWN):
            return route.continue_()
        shown.asked.append(route.request.url)
        return route.abort()

    context.route("**/*", meet)
    shown.page.on("websocket", lambda socket: shown.asked.append(socket.url))
    shown.page.on("pageerror", lambda error: shown.wrong.append(str(error)))
    bad = ("error", "warning")
    shown.page.on("console", lambda m: shown.wrong.append(m.text) if m.type in bad else None)
    if isinstance(page, Path):
        shown.page.goto(page.resolve().as_uri())
    else:
        shown.page.set_content(page)
    yield shown
    context.close()


def drawn(page: Any, script: str = "true") -> None:
    """Waits until the explorer has drawn what was chosen last, and then for a condition."""
    page.evaluate(
        "async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); }"
    )
    for _ in range(100):
        if page.evaluate(
            f"() => Boolean(document.getElementById('readout').textContent && {script})"
        ):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it never came to {script}")


def overflow(page: Any) -> list[str]:
    """Returns what is wider than the window; an empty list is right."""
    return page.evaluate(_OVERFLOW)


def disorder(browser: Any, path: Path, still: bool = True) -> list[str]:
    """Returns what a reader meets too late: a long answer, a low picture.

    still: whether the page must show a picture without scripts too.
    """
    wrong = []
    for scripts in (True, False)[: 1 + still]:
        with opened(browser, path, WIDTHS[-1], scripts=scripts) as shown:
            shown.page.wait_for_timeout(300)
            found_wrong = shown.page.evaluate(_ORDER, [MOST_WORDS, HIGHEST, SIGNS])
            wrong += [f"{'' if scripts else 'without scripts '}{words}" for words in found_wrong]
    return wrong


def low_contrast(page: Any, least: float = LEAST_CONTRAST) -> list[str]:
    """Returns the visible texts whose contrast with their ground is too low, one of each kind."""
    return page.evaluate(_CONTRAST, least)


def scrolled(page: Any) -> None:
    """Scrolls to the end and back, so that what waits to be seen is drawn."""
    page.evaluate(
        """async () => {
          for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight) {
            scrollTo(0, y);
            await new Promise(requestAnimationFrame);
          }
          scrollTo(0, 0);
        }"""
    )


def looked_over(browser: Any, path: Path, pictures: Path | None = None) -> list[str]:
    """Returns what is wrong with a page at both widths in both schemes: "390 dark: ...".

    It is what sticks out, texts that are hard to read, requests and complaints of scripts.
    pictures: a folder for screenshots of whole pages, NAME-390-dark.png.
    """
    found_wrong = disorder(browser, path)
    for width in WIDTHS:
        with opened(browser, path, width) as shown:
            for scheme in SCHEMES:
                shown.page.emulate_media(color_scheme=scheme)
                scrolled(shown.page)
                asked = [f"asked for {url}" for url in shown.asked]
                wrong = overflow(shown.page) + low_contrast(shown.page) + asked + shown.wrong
                found_wrong += [f"{width} {scheme}: {words}" for words in wrong]
                if pictures:
                    picture = pictures / f"{path.stem}-{width}-{scheme}.png"
                    shown.page.screenshot(path=picture, full_page=True)
    return found_wrong
