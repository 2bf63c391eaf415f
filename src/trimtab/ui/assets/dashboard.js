/* The dashboard: shows how things stand, and takes whatever the server tells as it happens.

   Messages: `whole` has everything; `change` has what is new of panels (markup that the server made), of the timeline
   (as run_timeline.js takes it; with `anew` it replaces what is there) and of the rest. Every message
   has an id; whoever comes back says the last one it had, and is told what it missed or everything anew.

   A tab that nobody looks at holds no connection: a browser has only a few for one server, however many tabs. */
(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const LATEST_MS = 15000, FIRST_MS = 500;
  let timeline = null, last = "", stream = null, waiting = 0, pause = FIRST_MS, changes = [], seen = {};
  let noted = [], fault = "", answered = "";

  const element = (name, attributes, ...inside) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };

  const link = (state, words) => {
    const place = byId("link");
    if (place.dataset.state === state && place.textContent === words) return;
    place.dataset.state = state;
    place.textContent = words;
  };

  /* ---- what is shown ---- */

  const shown = (name, html) => {
    const place = document.querySelector(`[data-panel="${name}"]`);
    if (!place || seen[name] === html) return;
    seen[name] = html;
    // Whoever is inside of it by keyboard stays where they are, and so does what was scrolled.
    const inside = place.contains(document.activeElement) ? document.activeElement : null;
    const region = place.querySelector(".scroll");
    const at = region ? [region.scrollTop, region.scrollLeft] : null;
    place.innerHTML = html;
    const panel = place.closest(".panel");
    if (panel) panel.hidden = false;
    const again = place.querySelector(".scroll");
    if (again && at) [again.scrollTop, again.scrollLeft] = at;
    if (!inside) return;
    const {kind, name: who} = inside.dataset;
    const same = kind && [...place.querySelectorAll(`[data-kind="${kind}"]`)].find((one) => one.dataset.name === who);
    (same || again || place).focus({preventScroll: true});
  };

  const panels = (some) => { for (const [name, html] of Object.entries(some || {})) shown(name, html); };

  const time = (data, anew) => {
    byId("p-timeline").hidden = !data && !timeline;
    if (!data) return;
    if (!timeline) {
      const place = byId("timeline");
      let clicked = false;
      // Going from mark to mark by keyboard opens nothing by itself: Enter does.
      place.addEventListener("pointerup", (event) => { clicked = event.target.matches("canvas"); }, {capture: true});
      place.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && timeline.picked && event.target.matches(".rt-view")) story(timeline.picked);
      });
      const story = (mark) => tell("mark", String(mark[6]));
      const picked = (mark) => {
        if (clicked) story(mark);
        clicked = false;
      };
      timeline = trimtabTimeline.make(place, data, {picked});
      trimtabTimeline.first = timeline;
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

  const lines = () => {
    const notes = [...noted, ...(fault ? [fault] : []), ...(answered ? [answered] : [])];
    const place = byId("notes");
    place.hidden = !notes.length;
    place.replaceChildren(...notes.map((note) => element("li", {}, note)));
  };

  const rest = (data) => {
    if (data.note !== undefined) byId("said").textContent = data.note;
    if (data.fault !== undefined) fault = data.fault;
    if (data.notes) noted = data.notes;
    lines();
    if (data.changes) offer(data.changes);
  };

  const whole = (data) => {
    byId("title").textContent = data.title || "trimtab";
    document.title = `${data.title || "trimtab"} · dashboard`;
    const gone = Object.keys(seen).filter((name) => !(name in (data.panels || {})));
    for (const name of gone) {
      shown(name, "");
      const panel = byId(`p-${name}`);
      if (panel) panel.hidden = true;
    }
    panels(data.panels);
    time(data.timeline, true);
    rest(data);
  };

  const changed = (data) => {
    if (data.whole) { whole(data.whole); return; }
    panels(data.panels);
    if (data.timeline) time(data.timeline, data.timeline.anew);
    rest(data);
  };

  /* ---- the stream ---- */

  const heard = (does) => (event) => {
    if (event.lastEventId) last = event.lastEventId;
    pause = FIRST_MS;
    link("live", "live");
    does(JSON.parse(event.data));
  };

  const leave = () => {
    clearTimeout(waiting);
    if (stream) stream.close();
    stream = null;
  };

  const join = () => {
    leave();
    if (document.hidden) return;
    stream = new EventSource(`/events${last ? `?after=${encodeURIComponent(last)}` : ""}`);
    stream.addEventListener("open", () => link("live", "live"));
    stream.addEventListener("whole", heard(whole));
    stream.addEventListener("change", heard(changed));
    stream.addEventListener("behind", () => { leave(); waiting = setTimeout(join, pause); });
    // The browser's own way back stops for good after some answers; ours does not, and takes longer each time.
    stream.addEventListener("error", () => {
      leave();
      link("away", "not connected: the server is not there, trying again");
      waiting = setTimeout(join, pause);
      pause = Math.min(pause * 1.7, LATEST_MS);
    });
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { leave(); link("resting", "resting while nobody looks"); }
    else join();
  });

  /* ---- stories ---- */

  const tell = async (kind, name) => {
    let told;
    try {
      const answer = await fetch(`/story?kind=${encodeURIComponent(kind)}&name=${encodeURIComponent(name)}`);
      told = await answer.json();
    } catch {
      told = {error: "the server is not there"};
    }
    const dialog = byId("story");
    byId("story-title").textContent = told.error || `${told.kind} ${told.name}`;
    byId("story-facts").replaceChildren(...(told.facts || []).flatMap(
      ([word, said]) => [element("dt", {}, word), element("dd", {}, said)]));
    const rows = (told.chapters || []).map(([at, what, why]) => element("tr", {},
      element("td", {}, at), element("th", {scope: "row"}, what), element("td", {}, why || "–")));
    byId("story-chapters").replaceChildren(...rows);
    for (const id of ["story-what"]) byId(id).hidden = !rows.length;
    dialog.querySelector(".scroll").hidden = !rows.length;
    offerFor(dialog, told);
    if (!dialog.open) dialog.showModal();
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-kind]");
    if (button) tell(button.dataset.kind, button.dataset.name);
  });

  /* ---- asking for a change ---- */

  const WORDS = {replan: "Is the plan still right?", "drain-node": "Empty this node", "drain-pool": "Have this pool start nothing new"};

  const offer = (some) => {
    changes = some;
    const general = some.filter((one) => one === "replan");
    byId("ask").hidden = !general.length;
    byId("ask").replaceChildren(...general.map((one) => {
      const button = element("button", {type: "button"}, WORDS[one] || one);
      button.addEventListener("click", () => ask(one, {}));
      return button;
    }));
  };

  const offerFor = (dialog, told) => {
    for (const old of dialog.querySelectorAll(".ask")) old.remove();
    const what = `drain-${told.kind}`;
    if (!changes.includes(what)) return;
    const button = element("button", {type: "button"}, WORDS[what] || what);
    button.addEventListener("click", () => { dialog.close(); ask(what, {[told.kind]: told.id || told.name}); });
    dialog.append(element("div", {class: "ask"}, button));
  };

  const token = () => new Promise((given) => {
    const dialog = byId("token"), text = byId("token-text");
    text.value = sessionStorage.getItem("token") || "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => given(dialog.returnValue === "ask" ? text.value.trim() : ""), {once: true});
    dialog.showModal();
    text.focus();
  });

  const ask = async (what, facts) => {
    const kept = sessionStorage.getItem("token") || await token();
    if (!kept) return;
    let words;
    try {
      const answer = await fetch(`/change/${what}`, {method: "POST", body: JSON.stringify(facts),
        headers: {authorization: `Bearer ${kept}`, "content-type": "application/json"}});
      const said = await answer.json();
      words = said.said || said.error;
      if (answer.status === 401) sessionStorage.removeItem("token");
      else sessionStorage.setItem("token", kept);
    } catch {
      words = "the server is not there";
    }
    byId("said").textContent = answered = words;
    lines();
  };

  join();
})();
