/* The story of a mark, task, node or worker in a dialog. */
import {offerFor} from "./changes.mjs";
import {byId, dialogOf, element, find} from "./dom.mjs";

/** @type {[kind: string, name: string] | null} */
let reading = null;
let written = "";

const read = async (kind, name) => {
  try {
    const answer = await fetch(`/story?kind=${encodeURIComponent(kind)}&name=${encodeURIComponent(name)}`);
    return await answer.json();
  } catch {
    return {error: "the server cannot be reached"};
  }
};

export const tell = async (kind, name) => {
  reading = [kind, name];
  write(await read(kind, name));
  if (!dialogOf("story").open) dialogOf("story").showModal();
};

/* An open story is updated. */
export const retell = async () => {
  if (!dialogOf("story").open || !reading) return;
  const [kind, name] = reading;
  const told = await read(kind, name);
  if (!told.error && dialogOf("story").open && reading[0] === kind && reading[1] === name) write(told);
};

const write = (told) => {
  const text = JSON.stringify(told);
  if (text === written) return;
  written = text;
  const dialog = dialogOf("story"), table = find(dialog, ".scroll");
  byId("story-title").textContent = told.error || `${told.kind} ${told.name}`;
  byId("story-facts").replaceChildren(...(told.facts || []).flatMap(
    ([word, said]) => [element("dt", {}, word), element("dd", {}, said)]));
  const rows = (told.chapters || []).map(([at, what, why]) => element("tr", {},
    element("td", {}, at), element("th", {scope: "row"}, what), element("td", {}, why || "–")));
  byId("story-chapters").replaceChildren(...rows);
  byId("story-what").hidden = !rows.length;
  if (table) table.hidden = !rows.length;
  offerFor(dialog, told);
};
