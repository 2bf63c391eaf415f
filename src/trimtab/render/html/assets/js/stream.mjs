/* Messages of the server. A hidden tab holds no connection, and all visible tabs share one.

   Every message has an id; a client that reconnects sends its last id, and gets what it missed or everything anew. */
import {byId} from "./dom.mjs";
import {FIRST_MS, after, longer} from "./messages.mjs";

const LISTEN_MS = 150;
/** @type {EventSource | null} */
let stream = null;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let waiting;
let last = "", pause = FIRST_MS;
/** @type {(what: "whole" | "change", data: any) => void} */
let taken = () => {};

const link = (state, words) => {
  const place = byId("link");
  if (place.dataset.state === state && place.textContent === words) return;
  place.dataset.state = state;
  place.textContent = words;
};

const take = (what, id, text) => {
  if (id) last = id;
  taken(what, JSON.parse(text));
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
  const opened = stream = new EventSource(`/events${last ? `?after=${encodeURIComponent(last)}` : ""}`);
  opened.addEventListener("open", () => stand("live", "live"));
  opened.addEventListener("whole", heard("whole"));
  opened.addEventListener("change", heard("change"));
  opened.addEventListener("behind", () => { leave(); waiting = setTimeout(join, pause); });
  // The browser's own reconnect gives up after some responses; this one does not, and backs off.
  opened.addEventListener("error", () => {
    leave();
    stand("away", "not connected: the server cannot be reached, retrying");
    waiting = setTimeout(join, pause);
    pause = longer(pause);
  });
};

/* ---- many tabs ----
   A browser allows only a few connections per server, and further tabs would wait forever. So one visible tab holds
   the stream, chosen by a lock, and broadcasts to the others; when it closes, the next tab gets the lock. A tab that
   has missed a message fetches the whole state. */

const tabs = new BroadcastChannel("trimtab");
let letGo = () => {}, asking = false, askAgain = false;

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
  /** @type {(value?: unknown) => void} */
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

/**
 * Follows the server while the page is visible; `does` gets each message: "whole" or "change", and its data.
 * @param {(what: "whole" | "change", data: any) => void} does
 */
export const follow = (does) => {
  taken = does;
  document.addEventListener("visibilitychange", () => {
    letGo();
    if (document.hidden) link("resting", "paused while hidden");
    else look();
  });
  if (!document.hidden) look();
};
