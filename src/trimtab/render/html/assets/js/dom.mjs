/* Elements of the page. */

/**
 * An element of the page that is there.
 * @param {string} id
 * @returns {HTMLElement}
 */
export const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * A dialog of the page.
 * @param {string} id
 */
export const dialogOf = (id) => /** @type {HTMLDialogElement} */ (document.getElementById(id));

/**
 * The first element of a place that matches.
 * @param {ParentNode} place
 * @param {string} selector
 */
export const find = (place, selector) => /** @type {HTMLElement | null} */ (place.querySelector(selector));

/**
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Record<string, string>} attributes
 * @param {...(Node | string)} inside
 * @returns {HTMLElementTagNameMap[Name]}
 */
export const element = (name, attributes = {}, ...inside) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
};
