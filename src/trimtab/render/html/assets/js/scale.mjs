/* Times in words, and round times of an axis. */

/**
 * Seconds as words: `1.5 s`, `12 min 05 s`.
 * @param {number} seconds
 * @returns {string}
 */
export const words = (seconds) => {
  if (seconds < 0) return "-" + words(-seconds);
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) {
    const [factor, unit] = seconds >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${+(seconds * factor).toPrecision(3)} ${unit}`;
  }
  if (seconds < 599.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (seconds < 7199.5) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
};

/**
 * Round times between two moments, with labels in one unit.
 * @param {number} from
 * @param {number} to
 * @param {number} most ticks wanted at most
 * @returns {[number, string][]}
 */
export const ticks = (from, to, most) => {
  const least = (to - from) / Math.max(1, most);
  let step = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((s) => s >= least);
  if (least < 30 || !step) {
    const power = 10 ** Math.floor(Math.log10(least));
    step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= least * (1 - 1e-9)) || 10 * power;
  }
  const [size, unit] = step >= 3600 ? [3600, "h"] : step >= 60 ? [60, "min"] : [1, "s"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  /** @type {[number, string][]} */
  const found = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + 1e-9 * step && found.length < 400; at++) {
    const value = at * step;
    found.push([value, at === 0 ? "0" : `${(value / size).toFixed(Math.min(digits, 9))} ${unit}`]);
  }
  return found;
};

/**
 * The first of the sorted values that is more than a moment.
 * @param {ArrayLike<number>} values
 * @param {number} moment
 * @returns {number}
 */
export const firstAfter = (values, moment) => {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > moment) high = middle; else low = middle + 1;
  }
  return low;
};
