/* Ids of the server's messages, `EPOCH-NUMBER`, and pauses between two tries to connect. */

export const FIRST_MS = 500, LATEST_MS = 15000;

/**
 * How many messages an id is after another one; NaN where the server was started anew between them.
 * @param {string} id
 * @param {string} other
 */
export const after = (id, other) => {
  const [epoch, number] = id.split("-"), [had, at] = other.split("-");
  return epoch === had ? Number(number) - Number(at) : NaN;
};

/**
 * The pause after a failed try, from the one before it.
 * @param {number} pause
 */
export const longer = (pause) => Math.min(pause * 1.7, LATEST_MS);
