/* Panels whose markup the server makes. */
import {find} from "./dom.mjs";

/** @type {Record<string, string>} */
const seen = {};

/**
 * Shows a panel; keyboard focus and scroll position are kept.
 * @param {string} name
 * @param {string} html
 */
const shown = (name, html) => {
  const place = find(document, `[data-panel="${name}"]`);
  if (!place || seen[name] === html) return;
  seen[name] = html;
  const active = /** @type {HTMLElement | null} */ (document.activeElement), inside = place.contains(active) ? active : null;
  const region = find(place, ".scroll");
  const at = region ? [region.scrollTop, region.scrollLeft] : null;
  place.innerHTML = html;
  const panel = /** @type {HTMLElement | null} */ (place.closest(".panel"));
  if (panel) panel.hidden = !html;
  const again = find(place, ".scroll");
  if (again && at) [again.scrollTop, again.scrollLeft] = at;
  if (!inside) return;
  const {kind, name: subject} = inside.dataset;
  const buttons = /** @type {NodeListOf<HTMLElement>} */ (place.querySelectorAll(`[data-kind="${kind}"]`));
  const same = kind && [...buttons].find((button) => button.dataset.name === subject);
  (same || again || place).focus({preventScroll: true});
};

/**
 * Shows these panels; with `all`, panels that are not among them are hidden.
 * @param {Record<string, string> | undefined} some
 * @param {boolean} all
 */
export const showPanels = (some = {}, all = false) => {
  for (const name of all ? Object.keys(seen).filter((known) => !(known in some)) : []) {
    shown(name, "");
    const panel = document.getElementById(`p-${name}`);
    if (panel) panel.hidden = true;
  }
  for (const [name, html] of Object.entries(some)) shown(name, html);
};
