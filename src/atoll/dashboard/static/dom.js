// Small hands for the DOM. Text is always text: nothing that comes from a run is ever parsed as markup.

/** An element: h("p", {class: "soft", on: {click}}, "text", child). `style` is an object, set through the CSSOM. */
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

/** Sets the text only where it differs, so that an update leaves selection, focus and layout alone. */
export function put(node, text) {
  const words = String(text);
  if (shown.get(node) === words) return false;
  shown.set(node, words);
  node.textContent = words;
  return true;
}

/** Sets or removes an attribute only where it differs. */
export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** One child per item, kept by key: existing nodes are updated in place and moved only if their order changed. */
export function keyed(parent, items, keyOf, make, update) {
  const kept = (parent.keyedNodes ??= new Map());
  const gone = new Set(kept.keys());
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    gone.delete(key);
    let entry = kept.get(key);
    if (!entry) kept.set(key, (entry = make(item)));
    update(entry, item);
    const node = entry.node ?? entry;
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const key of gone) {
    const entry = kept.get(key);
    (entry.node ?? entry).remove();
    kept.delete(key);
  }
}

/** Calls at most once per frame, however often it is asked. */
export function perFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** Calls once after `ms` without another call. */
export function settled(ms, work) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...words), ms);
  };
}

/** What a custom property is as a colour right now: a canvas does not resolve `light-dark`. */
export function colour(name) {
  const probe = (colour.probe ??= document.body.appendChild(h("span", { class: "unseen", "aria-hidden": "true" })));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function say(text) {
  put(document.getElementById("said"), text);
}

/** A short word at the edge that goes away by itself. */
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
    // storage may be forbidden; the page works without
  }
  return null;
}
