/* The dashboard: shows the current state and applies updates that the server pushes.

   Messages: `whole` has everything; `change` has the changed panels (markup made by the server), timeline increments
   (as timeline.mjs takes them; with `anew` they replace everything) and the rest. */
import {offer} from "./changes.mjs";
import {byId} from "./dom.mjs";
import {showNotes} from "./notes.mjs";
import {showPanels} from "./panels.mjs";
import {retell, tell} from "./stories.mjs";
import {follow} from "./stream.mjs";
import {Timeline} from "./timeline.mjs";

/** @param {Event} event */
const on = (event) => /** @type {Element} */ (event.target);

/** @type {Timeline | null} */
let timeline = null;

const time = (data, anew) => {
  byId("p-timeline").hidden = !data && !timeline;
  if (!data) return;
  if (!timeline) {
    const place = byId("timeline");
    let clicked = false;
    // Selecting marks by keyboard opens nothing; Enter does.
    place.addEventListener("pointerup", (event) => { clicked = on(event).matches("canvas"); }, {capture: true});
    place.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && timeline?.picked && on(event).matches(".rt-view")) story(timeline.picked);
    });
    const story = (mark) => tell("mark", String(mark[6]));
    const picked = (mark) => {
      if (clicked) story(mark);
      clicked = false;
    };
    timeline = new Timeline(place, data, {picked});
    window.trimtabTimeline = {first: timeline};  // for tests and consoles
    return;
  }
  if (anew) {
    timeline.tracks.clear();
    timeline.marks = [];
    timeline.moves = [];
    timeline.end = 0;
  }
  timeline.add(data);
};

const rest = (data) => {
  showNotes(data);
  if (data.changes) offer(data.changes);
};

const whole = (data) => {
  byId("title").textContent = data.title || "trimtab";
  document.title = `${data.title || "trimtab"} · dashboard`;
  showPanels(data.panels, true);
  time(data.timeline, true);
  rest(data);
};

const changed = (data) => {
  if (data.whole) { whole(data.whole); return; }
  showPanels(data.panels);
  if (data.timeline) time(data.timeline, data.timeline.anew);
  rest(data);
  retell();
};

document.addEventListener("click", (event) => {
  const button = /** @type {HTMLElement | null} */ (on(event).closest("button[data-kind]"));
  if (button) tell(button.dataset.kind || "", button.dataset.name || "");
});

follow((what, data) => (what === "whole" ? whole : changed)(data));
