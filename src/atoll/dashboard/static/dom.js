// DOM helpers. Text is always set as text: nothing from a run is parsed as markup.

/** Create an element: h("p", {class: "soft", on: {click}}, "text", child). `style` is an object for the CSSOM. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const shown = new WeakMap();

/** Set the text only if it differs, so that an update does not disturb selection, focus and layout. */
export function put(node, text) {
  const value = String(text);
  if (shown.get(node) === value) return false;
  shown.set(node, value);
  node.textContent = value;
  return true;
}

/** Set or remove an attribute only if it differs. */
export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Keep one child per item, by key: update existing nodes in next and move them only if their order changed. */
export function keyed(parent, items, keyOf, make, update) {
  const stored = (parent.keyedNodes ??= new Map());
  const removed = new Set(stored.keys());
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    removed.delete(key);
    let entry = stored.get(key);
    if (!entry) stored.set(key, (entry = make(item)));
    update(entry, item);
    const node = entry.node ?? entry;
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const key of removed) {
    const entry = stored.get(key);
    (entry.node ?? entry).remove();
    stored.delete(key);
  }
}

/** Return a function that runs `work` at most once per frame. */
export function perFrame(work) {
  let isScheduled = false;
  return () => {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      work();
    });
  };
}

/** Return a function that runs `work` after `ms` without another call. */
export function settled(ms, work) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), ms);
  };
}

/** Return the current color of a custom property: a canvas does not resolve `light-dark`. */
export function colour(name) {
  const probe = (colour.probe ??= document.body.appendChild(h("span", { class: "unseen", "aria-hidden": "true" })));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** Announce a text to screen readers. */
export function announce(text) {
  put(document.getElementById("announcement"), text);
}

/** Show a short message that disappears after some seconds. */
export function toast(text, tone = "good") {
  const node = h("div", { class: "toast", "data-tone": tone }, text);
  const host = document.getElementById("toasts");
  host.append(node);
  while (host.children.length > 4) host.firstChild.remove();
  setTimeout(() => node.remove(), 8000);
}

export function remember(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(`atoll-${key}`);
    if (value === null) localStorage.removeItem(`atoll-${key}`);
    else localStorage.setItem(`atoll-${key}`, value);
  } catch {
    // storage may be disabled; the page works without it
  }
  return null;
}
