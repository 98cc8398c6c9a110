// Talks to `atoll dash`: a token, plain requests, and a stream of pictures that finds its way back after every kind of end.

const SILENCE_MS = 25000; // the server says something at least every 10 s; after this long the connection is dead
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];

export class HttpError extends Error {
  constructor(status, body) {
    super(body?.error ?? `the server answers ${status}`);
    this.status = status;
    this.body = body ?? {};
  }
}

/** The token of the address bar (#token=...), kept for this tab only and taken out of the bar at once. */
export function takeToken() {
  const words = new URLSearchParams(location.hash.slice(1));
  const given = words.get("token");
  try {
    if (given) sessionStorage.setItem("atoll-token", given);
  } catch {
    // without storage it lives as long as this page
  }
  if (given) {
    words.delete("token");
    const rest = words.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  }
  try {
    return given ?? sessionStorage.getItem("atoll-token");
  } catch {
    return given;
  }
}

export class Net {
  constructor(token) {
    this.token = token;
  }

  setToken(token) {
    this.token = token;
    try {
      sessionStorage.setItem("atoll-token", token);
    } catch {
      // it lives as long as this page
    }
  }

  headers(more = {}) {
    return this.token ? { Authorization: `Bearer ${this.token}`, ...more } : more;
  }

  async answer(path, options = {}) {
    const response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
    if (response.ok) return response;
    let body = null;
    try {
      body = await response.json();
    } catch {
      // not ours: the status has to do
    }
    throw new HttpError(response.status, body);
  }

  async get(path, signal) {
    return (await this.answer(path, { headers: this.headers(), signal })).json();
  }

  async post(path, body) {
    const headers = this.headers({ "Content-Type": "application/json" });
    return (await this.answer(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  async file(path) {
    return (await this.answer(path, { headers: this.headers() })).blob();
  }

  /** Pictures of a run until `stop` is called. `hear({lost, retryAt, error})` tells how the connection is. */
  watch(index, { picture, hear }) {
    let stopped = false;
    let tries = 0;
    let abort = new AbortController();
    let wake = () => {};

    const again = async () => {
      while (!stopped) {
        abort = new AbortController();
        try {
          await this.stream(index, abort, (news) => {
            tries = 0;
            hear({ lost: false });
            picture(news);
          });
          throw new Error("the server ended the stream");
        } catch (error) {
          if (stopped) return;
          const wait = BACKOFF_MS[Math.min(tries, BACKOFF_MS.length - 1)] * (0.8 + 0.4 * Math.random());
          tries += 1;
          hear({ lost: true, error, retryAt: performance.now() + wait });
          await new Promise((resolve) => {
            wake = resolve;
            setTimeout(resolve, wait);
          });
        }
      }
    };
    const now = () => wake();
    const seen = () => document.visibilityState === "visible" && wake();
    addEventListener("online", now);
    document.addEventListener("visibilitychange", seen);
    again();
    return {
      retry: now,
      stop() {
        stopped = true;
        removeEventListener("online", now);
        document.removeEventListener("visibilitychange", seen);
        abort.abort();
        wake();
      },
    };
  }

  async stream(index, abort, picture) {
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(new Error("the server is silent")), SILENCE_MS);
    };
    alive();
    try {
      const response = await this.answer(`api/run/${index}/live`, { headers: this.headers(), signal: abort.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        const parts = (rest + value).split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) {
          const news = eventOf(part);
          if (news !== null) picture(news);
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }
}

/** The picture in one block of an event stream, or null where it is a comment or another event. */
export function eventOf(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return kind === "view" && data.length ? JSON.parse(data.join("\n")) : null;
}
