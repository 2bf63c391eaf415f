/* The dashboard: shows the current state and applies updates that the server pushes.

   Messages: `whole` has everything; `change` has the changed panels (markup made by the server), timeline increments
   (as run_timeline.js takes them; with `anew` they replace everything) and the rest. Every message has an id; a client
   that reconnects sends its last id, and gets what it missed or everything anew.

   A hidden tab holds no connection, and all visible tabs share one. */
(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const LATEST_MS = 15000, FIRST_MS = 500, LISTEN_MS = 150;
  let timeline = null, last = "", stream = null, waiting = 0, pause = FIRST_MS, seen = {};
  let noted = [], fault = "", answered = "", reading = null, written = "";

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

  /* ---- panels ---- */

  const shown = (name, html) => {
    const place = document.querySelector(`[data-panel="${name}"]`);
    if (!place || seen[name] === html) return;
    seen[name] = html;
    // Keep keyboard focus and scroll position.
    const inside = place.contains(document.activeElement) ? document.activeElement : null;
    const region = place.querySelector(".scroll");
    const at = region ? [region.scrollTop, region.scrollLeft] : null;
    place.innerHTML = html;
    const panel = place.closest(".panel");
    if (panel) panel.hidden = !html;
    const again = place.querySelector(".scroll");
    if (again && at) [again.scrollTop, again.scrollLeft] = at;
    if (!inside) return;
    const {kind, name: subject} = inside.dataset;
    const same = kind && [...place.querySelectorAll(`[data-kind="${kind}"]`)].find((button) => button.dataset.name === subject);
    (same || again || place).focus({preventScroll: true});
  };

  const panels = (some) => { for (const [name, html] of Object.entries(some || {})) shown(name, html); };

  const time = (data, anew) => {
    byId("p-timeline").hidden = !data && !timeline;
    if (!data) return;
    if (!timeline) {
      const place = byId("timeline");
      let clicked = false;
      // Selecting marks by keyboard opens nothing; Enter does.
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
    const notes = [...noted, ...(fault ? [fault] : [])].map((note) => element("li", {}, note));
    if (answered) notes.push(element("li", {class: "answer"}, answered));
    byId("notes").hidden = !notes.length;
    byId("notes").replaceChildren(...notes);
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
    retell();
  };

  /* ---- the stream ---- */

  const take = (what, id, text) => {
    if (id) last = id;
    (what === "whole" ? whole : changed)(JSON.parse(text));
  };

  const stand = (state, words) => {
    link(state, words);
    if (stream || state === "away") tabs.postMessage({link: [state, words]});
  };

  const heard = (what) => (event) => {
    pause = FIRST_MS;
    stand("live", "live");
    tabs.postMessage({what, id: event.lastEventId, text: event.data});
    take(what, event.lastEventId, event.data);
  };

  const leave = () => {
    clearTimeout(waiting);
    if (stream) stream.close();
    stream = null;
  };

  const join = () => {
    leave();
    stream = new EventSource(`/events${last ? `?after=${encodeURIComponent(last)}` : ""}`);
    stream.addEventListener("open", () => stand("live", "live"));
    stream.addEventListener("whole", heard("whole"));
    stream.addEventListener("change", heard("change"));
    stream.addEventListener("behind", () => { leave(); waiting = setTimeout(join, pause); });
    // The browser's own reconnect gives up after some responses; this one does not, and backs off.
    stream.addEventListener("error", () => {
      leave();
      stand("away", "not connected: the server cannot be reached, retrying");
      waiting = setTimeout(join, pause);
      pause = Math.min(pause * 1.7, LATEST_MS);
    });
  };

  /* ---- many tabs ----
     A browser allows only a few connections per server, and further tabs would wait forever. So one visible tab holds
     the stream, chosen by a lock, and broadcasts to the others; when it closes, the next tab gets the lock. A tab that
     has missed a message fetches the whole state. */

  const tabs = new BroadcastChannel("trimtab");
  let letGo = () => {}, asking = false, askAgain = false;

  const after = (id, other) => {
    const [epoch, number] = id.split("-"), [had, at] = other.split("-");
    return epoch === had ? Number(number) - Number(at) : NaN;
  };

  const catchUp = async () => {
    askAgain = asking;
    if (asking) return;
    asking = true;
    try {
      const answer = await fetch("/state"), id = answer.headers.get("last-event-id"), text = await answer.text();
      if (answer.ok && id && !stream && !(after(id, last) < 0)) take("whole", id, text);
    } catch { /* the tab with the stream shows that the server cannot be reached */ }
    asking = false;
    if (askAgain) catchUp();
  };

  tabs.addEventListener("message", ({data}) => {
    if (data.hello && stream) stand(byId("link").dataset.state, byId("link").textContent);
    if (stream || document.hidden) return;
    if (data.link) link(...data.link);
    if (!data.what) return;
    const further = after(data.id, last);
    if (data.what === "whole" ? !(further < 0) : further === 1) take(data.what, data.id, data.text);
    else if (!(further <= 0)) catchUp();
  });

  const look = () => {
    const left = new AbortController();
    const listens = setTimeout(() => { tabs.postMessage({hello: true}); catchUp(); }, LISTEN_MS);
    let over = () => {};
    letGo = () => {
      left.abort();
      clearTimeout(listens);
      leave();
      over();
    };
    navigator.locks.request("trimtab", {signal: left.signal}, () => new Promise((ends) => {
      clearTimeout(listens);
      over = ends;
      join();
    })).catch(() => {});  // hidden again before the lock was granted
  };

  document.addEventListener("visibilitychange", () => {
    letGo();
    if (document.hidden) link("resting", "paused while hidden");
    else look();
  });

  /* ---- stories ---- */

  const read = async (kind, name) => {
    try {
      const answer = await fetch(`/story?kind=${encodeURIComponent(kind)}&name=${encodeURIComponent(name)}`);
      return await answer.json();
    } catch {
      return {error: "the server cannot be reached"};
    }
  };

  const tell = async (kind, name) => {
    reading = [kind, name];
    write(await read(kind, name));
    if (!byId("story").open) byId("story").showModal();
  };

  /* An open story is updated. */
  const retell = async () => {
    if (!byId("story").open || !reading) return;
    const [kind, name] = reading;
    const told = await read(kind, name);
    if (!told.error && byId("story").open && reading[0] === kind && reading[1] === name) write(told);
  };

  const write = (told) => {
    const text = JSON.stringify(told);
    if (text === written) return;
    written = text;
    const dialog = byId("story");
    byId("story-title").textContent = told.error || `${told.kind} ${told.name}`;
    byId("story-facts").replaceChildren(...(told.facts || []).flatMap(
      ([word, said]) => [element("dt", {}, word), element("dd", {}, said)]));
    const rows = (told.chapters || []).map(([at, what, why]) => element("tr", {},
      element("td", {}, at), element("th", {scope: "row"}, what), element("td", {}, why || "–")));
    byId("story-chapters").replaceChildren(...rows);
    byId("story-what").hidden = dialog.querySelector(".scroll").hidden = !rows.length;
    offerFor(dialog, told);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-kind]");
    if (button) tell(button.dataset.kind, button.dataset.name);
  });

  /* ---- changes ---- */

  const WORDS = {
    replan: ["Replan", () => "The run searches for a better plan; its next decision shows the result."],
    "drain-node": ["Drain this node", (name) => `Tasks on node ${name} are checkpointed and restarted elsewhere. This cannot be undone.`],
    "drain-pool": ["Drain this pool", (name) => `Pool ${name} starts no new tasks; running tasks continue.`],
    "drain-worker": ["Drain this worker", (name) => `Worker ${name} takes no new requests; its requests continue, after the deadline on other workers.`],
    "resume-worker": ["Resume this worker", (name) => `Worker ${name} takes requests again.`],
  };

  const button = (what, does) => {
    const made = element("button", {type: "button"}, WORDS[what][0]);
    made.addEventListener("click", does);
    return made;
  };

  const offer = (some) => {
    const general = some.filter((what) => what === "replan");
    byId("ask").hidden = !general.length;
    byId("ask").replaceChildren(...general.map((what) => button(what, () => ask(what, {}, ""))));
  };

  const offerFor = (dialog, told) => {
    const some = (told.offers || []).filter((what) => WORDS[what]), whose = [told.kind, told.name, ...some].join(" ");
    const old = dialog.querySelector(".ask");
    if (old && old.dataset.whose === whose) return;
    if (old) old.remove();
    if (some.length) dialog.append(element("div", {class: "ask", "data-whose": whose}, ...some.map((what) => button(what, () => {
      dialog.close();
      ask(what, {[told.kind]: told.id || told.name}, told.name);
    }))));
  };

  /* No change without confirmation: the dialog says first what it does. */
  const sure = (what, name) => new Promise((given) => {
    const dialog = byId("token"), text = byId("token-text"), kept = sessionStorage.getItem("token") || "";
    byId("token-title").textContent = WORDS[what][0];
    byId("token-what").textContent = WORDS[what][1](name);
    byId("token-ask").hidden = Boolean(kept);
    text.value = kept;
    dialog.returnValue = "";
    dialog.addEventListener("close", () => given(dialog.returnValue === "ask" ? text.value.trim() : ""), {once: true});
    dialog.showModal();
    (kept ? dialog.querySelector("button[value=ask]") : text).focus();
  });

  byId("token-leave").addEventListener("click", () => byId("token").close(""));

  const ask = async (what, facts, name) => {
    const token = await sure(what, name);
    if (!token) return;
    let words;
    try {
      const answer = await fetch(`/change/${what}`, {method: "POST", body: JSON.stringify(facts),
        headers: {authorization: `Bearer ${token}`, "content-type": "application/json"}});
      const said = await answer.json();
      words = said.said || said.error;
      if (answer.status === 401) sessionStorage.removeItem("token");
      else sessionStorage.setItem("token", token);
    } catch {
      words = "the server cannot be reached";
    }
    byId("said").textContent = answered = words;
    lines();
  };

  if (!document.hidden) look();
})();
