/* Lines above the panels: notes, a fault, the answer to a change. */
import {byId, element} from "./dom.mjs";

/** @type {string[]} */
let noted = [];
let fault = "", answered = "";

const lines = () => {
  const notes = [...noted, ...(fault ? [fault] : [])].map((note) => element("li", {}, note));
  if (answered) notes.push(element("li", {class: "answer"}, answered));
  byId("notes").hidden = !notes.length;
  byId("notes").replaceChildren(...notes);
};

/** @param {{note?: string, fault?: string, notes?: string[]}} data */
export const showNotes = (data) => {
  if (data.note !== undefined) byId("said").textContent = data.note;
  if (data.fault !== undefined) fault = data.fault;
  if (data.notes) noted = data.notes;
  lines();
};

/**
 * Shows what became of a change.
 * @param {string} words
 */
export const showAnswer = (words) => {
  byId("said").textContent = answered = words;
  lines();
};
