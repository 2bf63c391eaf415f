"""What every page is looked at for in a real browser: widths, light and dark, contrast, nothing sticking out."""

from __future__ import annotations

from typing import Literal

WIDTHS = [400, 960, 1600]
SCHEMES: list[Literal["light", "dark"]] = ["light", "dark"]
ARGUMENTS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

# For each text: its colour against the nearest opaque thing painted behind it, as WCAG computes contrast.
CONTRASTS = """() => {
  const channels = (css) => (css.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (css) => {
    const [r, g, b] = channels(css).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const at = element.getBoundingClientRect();
    if (element.closest("svg")) {
      // The rectangle painted last among those that hold the text's middle.
      const [x, y] = [at.x + at.width / 2, at.y + at.height / 2];
      const under = [...element.closest("svg").querySelectorAll("rect.bar, rect.idle")].filter((rect) => {
        const box = rect.getBoundingClientRect();
        return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
      });
      if (under.length) return getComputedStyle(under[under.length - 1]).fill;
    }
    for (let up = element; up; up = up.parentElement) {
      const css = getComputedStyle(up).backgroundColor;
      if (channels(css)[3] !== 0) return css;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, title, desc, .unseen")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const [a, b] = [luminance(element.closest("svg") ? style.fill : style.color), luminance(behind(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.trim()]);
  }
  return found;
}"""

# Labels that leave the bar or the gap they stand in, and texts that leave their picture.
OUTSIDE = """() => {
  const out = [];
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect();
    if (!box.width) continue;
    const picture = text.closest("svg");
    const page = picture.getBoundingClientRect();
    const leaves = box.left < page.left - 1 || box.right > page.right + 1 || box.bottom > page.bottom + 1;
    if (leaves) out.push(text.textContent);
    if (!text.classList.contains("inside")) continue;
    const homes = [...picture.querySelectorAll("rect.bar, rect.track")].map((r) => r.getBoundingClientRect());
    const bars = [...picture.querySelectorAll("rect.bar")].map((r) => r.getBoundingClientRect());
    const holds = (r) => r.left - 0.5 <= box.left && box.right <= r.right + 0.5;
    const level = (r) => r.top < box.bottom && box.top < r.bottom;
    const meets = (r) => r.left < box.right - 0.5 && box.left + 0.5 < r.right;
    const crossed = bars.filter((r) => level(r) && meets(r));
    if (!homes.some((r) => level(r) && holds(r)) || crossed.some((r) => !holds(r))) out.push(text.textContent);
  }
  return out;
}"""
