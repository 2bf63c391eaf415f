/* The timelines of a static page, joined with its table of events. */
import {byId, element} from "./dom.mjs";
import {Timeline} from "./timeline.mjs";

for (const place of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-run-timeline]"))) {
  const data = JSON.parse(byId(place.dataset.runTimeline || "").textContent || "null");
  const row = (mark) => document.getElementById(`e${mark[6]}`);
  const picked = (mark) => {
    for (const old of document.querySelectorAll("tr.picked")) old.classList.remove("picked");
    const found = row(mark);
    if (!found) return;
    found.classList.add("picked");
    const scroll = found.closest(".scroll");
    if (scroll) scroll.scrollTop = found.offsetTop - scroll.clientHeight / 3;
  };
  const timeline = new Timeline(place, data, {picked});
  window.trimtabTimeline ??= {first: timeline};  // for tests and consoles
  for (const mark of data.marks || []) {
    const cell = row(mark)?.querySelector("td");
    if (!cell) continue;
    const button = element("button", {type: "button", class: "rt-at", title: "Show in the timeline"}, cell.textContent);
    button.addEventListener("click", () => {
      timeline.pick(mark, true);
      place.scrollIntoView({block: "nearest"});
    });
    cell.replaceChildren(button);
  }
}
