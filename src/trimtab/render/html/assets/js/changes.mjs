/* Changes that a reader may ask for, with the token: replanning, drains. */
import {byId, dialogOf, element, find} from "./dom.mjs";
import {showAnswer} from "./notes.mjs";

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

export const offer = (some) => {
  const general = some.filter((what) => what === "replan");
  byId("ask").hidden = !general.length;
  byId("ask").replaceChildren(...general.map((what) => button(what, () => ask(what, {}, ""))));
};

export const offerFor = (dialog, told) => {
  const some = (told.offers || []).filter((what) => WORDS[what]), whose = [told.kind, told.name, ...some].join(" ");
  const old = find(dialog, ".ask");
  if (old && old.dataset.whose === whose) return;
  if (old) old.remove();
  if (some.length) dialog.append(element("div", {class: "ask", "data-whose": whose}, ...some.map((what) => button(what, () => {
    dialog.close();
    ask(what, {[told.kind]: told.id || told.name}, told.name);
  }))));
};

/* No change without confirmation: the dialog says first what it does. */
const sure = (what, name) => new Promise((given) => {
  const dialog = dialogOf("token"), text = /** @type {HTMLInputElement} */ (byId("token-text"));
  const kept = sessionStorage.getItem("token") || "";
  byId("token-title").textContent = WORDS[what][0];
  byId("token-what").textContent = WORDS[what][1](name);
  byId("token-ask").hidden = Boolean(kept);
  text.value = kept;
  dialog.returnValue = "";
  dialog.addEventListener("close", () => given(dialog.returnValue === "ask" ? text.value.trim() : ""), {once: true});
  dialog.showModal();
  (kept && find(dialog, "button[value=ask]") || text).focus();
});

byId("token-leave").addEventListener("click", () => dialogOf("token").close(""));

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
  showAnswer(words);
};
