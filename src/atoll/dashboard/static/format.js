// Formatting of values. An unknown value is a dash, never a zero.

export const UNKNOWN = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function whole(value) {
  return missing(value) ? UNKNOWN : grouped.format(value);
}

export function plain(value, digits = 3) {
  if (missing(value)) return UNKNOWN;
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : digits)));
}

function scaled(value, names, step, unit) {
  if (missing(value)) return UNKNOWN;
  let size = value;
  let prefix = 0;
  while (Math.abs(size) >= step * 0.9995 && prefix < names.length - 1) {
    size /= step;
    prefix += 1;
  }
  const digits =
    prefix === 0
      ? Number.isInteger(size) || Math.abs(size) >= 100
        ? 0
        : 1
      : Math.abs(size) >= 99.95
        ? 0
        : Math.abs(size) >= 9.995
          ? 1
          : 2;
  const text = size.toFixed(digits);
  return `${text}${names[prefix] || unit ? "\u202f" : ""}${names[prefix]}${unit}`;
}

export const compact = (value) => scaled(value, ["", "k", "M", "G", "T", "P"], 1000, "");
export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000, "");
export const rate = (value) => (missing(value) ? UNKNOWN : `${bytes(value)}/s`);

export function share(value, digits = 1) {
  if (missing(value)) return UNKNOWN;
  const text = (value * 100).toFixed(digits);
  return `${text.replace(/\.0+$/, "")}\u202f%`;
}

export function times(value) {
  return missing(value) ? UNKNOWN : `×${value.toFixed(2)}`;
}

export function duration(seconds) {
  if (missing(seconds)) return UNKNOWN;
  const s = Math.max(seconds, 0);
  if (s < 0.9995 && s > 0) return `${Math.round(s * 1000)}\u202fms`;
  if (s < 9.95) return `${s.toFixed(1).replace(/\.0$/, "")}\u202fs`;
  if (s < 119.5) return `${Math.round(s)}\u202fs`;
  if (s < 3570) return two(s, 60, "min", 1, "s");
  if (s < 86400 * 2) return two(s, 3600, "h", 60, "min");
  return two(s, 86400, "d", 3600, "h");
}

function two(seconds, large, largeName, small, smallName) {
  const all = Math.round(seconds / small);
  const per = large / small;
  const rest = all % per;
  return `${Math.floor(all / per)}\u202f${largeName}${rest ? ` ${rest}\u202f${smallName}` : ""}`;
}

/** Format a time on the run's clock: 1:02, 3:04:05, 2 d 03:04:05. */
export function runTime(at, fine = false) {
  if (missing(at)) return UNKNOWN;
  const sign = at < 0 ? "−" : "";
  const size = Math.abs(at);
  const tenths = fine ? Math.floor((size % 1) * 10 ** 1 + 1e-6) : 0;
  const s = fine ? Math.floor(size + 1e-7) : Math.round(size);
  const pad = (value) => String(value).padStart(2, "0");
  const days = Math.floor(s / 86400);
  const hours = Math.floor((s % 86400) / 3600);
  const minutes = Math.floor((s % 3600) / 60);
  const tail = `${pad(s % 60)}${fine ? `.${tenths}` : ""}`;
  if (days) return `${sign}${days}\u202fd ${pad(hours)}:${pad(minutes)}:${tail}`;
  if (hours) return `${sign}${hours}:${pad(minutes)}:${tail}`;
  return `${sign}${minutes}:${tail}`;
}

/** Format the same time as local time; null if the run has none (simulated). */
export function wallTime(at, wall0, { day = true, seconds = true } = {}) {
  if (missing(wall0) || missing(at)) return null;
  const date = new Date((wall0 + at) * 1000);
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (seconds) options.second = "2-digit";
  if (day) Object.assign(options, { day: "numeric", month: "short" });
  return date.toLocaleString("en-GB", options);
}

export function learnerList(numbers, limit = 4) {
  if (!numbers?.length) return "none";
  const first = numbers.slice(0, limit).join(", ");
  return numbers.length > limit ? `${first} and ${numbers.length - limit} more` : first;
}

export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}
