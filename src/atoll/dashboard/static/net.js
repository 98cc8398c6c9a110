// HTTP client for `atoll dash`: token, requests, and a stream of status updates that reconnects after every disconnect.

const SILENCE_MS = 25000; // the server sends at least every 10 s; the connection is dead after this time
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];

export class HttpError extends Error {
  constructor(status, body) {
    super(body?.error ?? `the server replied with HTTP status ${status}`);
    this.status = status;
    this.body = body ?? {};
  }
}

/** Return the token from the address (#token=...). Store it for this tab only, and remove it from the address bar. */
export function takeToken() {
  const params = new URLSearchParams(location.hash.slice(1));
  const token = params.get("token");
  try {
    if (token) sessionStorage.setItem("atoll-token", token);
  } catch {
    // without storage the token lasts as long as this page
  }
  if (token) {
    params.delete("token");
    const rest = params.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  }
  try {
    return token ?? sessionStorage.getItem("atoll-token");
  } catch {
    return token;
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
      // without storage the token lasts as long as this page
    }
  }

  headers(more = {}) {
    return this.token ? { Authorization: `Bearer ${this.token}`, ...more } : more;
  }

  async request(path, options = {}) {
    const response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
    if (response.ok) return response;
    let body = null;
    try {
      body = await response.json();
    } catch {
      // no JSON body: report the HTTP status only
    }
    throw new HttpError(response.status, body);
  }

  async get(path, signal) {
    return (await this.request(path, { headers: this.headers(), signal })).json();
  }

  async post(path, body) {
    const headers = this.headers({ "Content-Type": "application/json" });
    return (await this.request(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  async file(path) {
    return (await this.request(path, { headers: this.headers() })).blob();
  }

  /** Stream the status of a run until `stop` is called. `onConnection` receives {lost, retryAt, error}. */
  watch(index, { onStatus, onConnection }) {
    let stopped = false;
    let attempts = 0;
    let abort = new AbortController();
    let wake = () => {};

    const run = async () => {
      while (!stopped) {
        abort = new AbortController();
        try {
          await this.stream(index, abort, (status) => {
            attempts = 0;
            onConnection({ lost: false });
            onStatus(status);
          });
          throw new Error("the server ended the stream");
        } catch (error) {
          if (stopped) return;
          const wait = BACKOFF_MS[Math.min(attempts, BACKOFF_MS.length - 1)] * (0.8 + 0.4 * Math.random());
          attempts += 1;
          onConnection({ lost: true, error, retryAt: performance.now() + wait });
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
    run();
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

  async stream(index, abort, onStatus) {
    let timer = 0;
    const restartTimer = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(new Error("no data from the server")), SILENCE_MS);
    };
    restartTimer();
    try {
      const response = await this.request(`api/run/${index}/live`, { headers: this.headers(), signal: abort.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        restartTimer();
        const parts = (rest + value).split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) {
          const status = eventOf(part);
          if (status !== null) onStatus(status);
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }
}

/** Return the status in one block of an event stream, or null if the block is a comment or another event. */
export function eventOf(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return kind === "view" && data.length ? JSON.parse(data.join("\n")) : null;
}
