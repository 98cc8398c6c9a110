// Controls: each is asked twice. The first answer of the server says what would happen; only the second request does it.

import { attr, h, put, remember, show, toast } from "./dom.js";

export class Controls {
  constructor(host, { net, dialog }) {
    Object.assign(this, { host, net, dialog });
    this.requestedBy = h("input", {
      type: "text",
      maxlength: "60",
      autocomplete: "name",
      value: remember("who") ?? "",
      placeholder: "your name",
      on: { change: () => remember("who", this.requestedBy.value.trim()) },
    });
    this.learner = h("select", {});
    this.quorum = h("input", { type: "number", min: "1", step: "1", inputmode: "numeric" });
    this.grace = h("input", { type: "number", min: "0", max: "1", step: "0.05", inputmode: "decimal" });
    this.buttons = {
      pause: this.button("Pause", "pause"),
      resume: this.button("Resume", "resume"),
      snapshot: this.button("Snapshot", "snapshot"),
      drain: this.button("Drain", "drain", () => Number(this.learner.value)),
      quorum: this.button("Set", "quorum", () => Number(this.quorum.value)),
      grace: this.button("Set", "grace", () => Number(this.grace.value)),
    };
    this.note = h("p", { class: "soft hint" });
    this.title = h("h2", { id: "controls-title" }, "Controls");
    host.append(
      this.title,
      h(
        "div",
        { class: "controls" },
        h("label", {}, "Signed", this.requestedBy),
        h("div", { class: "group" }, this.buttons.pause, this.buttons.resume, this.buttons.snapshot),
        h("div", { class: "group" }, h("label", {}, "Learner", this.learner), this.buttons.drain),
        h("div", { class: "group" }, h("label", {}, "Quorum", this.quorum), this.buttons.quorum),
        h("div", { class: "group" }, h("label", {}, "Grace margin", this.grace), this.buttons.grace),
      ),
      this.note,
    );
    attr(this.buttons.quorum, "aria-label", "Set the quorum");
    attr(this.buttons.grace, "aria-label", "Set the grace margin");
  }

  button(text, what, value) {
    return h("button", { type: "button", "data-control": what, on: { click: () => this.request(what, value?.()) } }, text);
  }

  /** `run` is the one that is steered; null hides everything. */
  render(run, picture, travelling, many) {
    show(this.host, Boolean(run?.controls));
    if (!run?.controls || !picture) return;
    this.run = run;
    put(this.title, many ? `Controls of ${run.name}` : "Controls");
    const over = !picture.live || picture.stage === "finished";
    for (const button of Object.values(this.buttons)) attr(button, "disabled", travelling || over ? "" : null);
    show(this.buttons.pause, !picture.paused);
    show(this.buttons.resume, Boolean(picture.paused));
    const numbers = picture.islands.filter((island) => island.state !== "left").map((island) => island.learner);
    const key = numbers.join();
    if (key !== this.key) {
      this.key = key;
      const chosen = this.learner.value;
      this.learner.replaceChildren(...numbers.map((number) => h("option", { value: number }, String(number))));
      if (numbers.includes(Number(chosen))) this.learner.value = chosen;
    }
    // What somebody is typing is not overwritten by the next picture.
    if (document.activeElement !== this.quorum && !this.quorum.dataset.edited)
      this.quorum.value = picture.headline?.quorum ?? "";
    if (document.activeElement !== this.grace && !this.grace.dataset.edited)
      this.grace.value = picture.headline?.grace_margin ?? "";
    this.quorum.oninput ??= () => (this.quorum.dataset.edited = "1");
    this.grace.oninput ??= () => (this.grace.dataset.edited = "1");
    put(
      this.note,
      travelling
        ? "Controls act on the run as it is now: go back to live first."
        : over
          ? "The run is over."
          : "Each is asked once more before it happens, and is written to the tape with your name and the time.",
    );
  }

  async request(what, value) {
    const { run } = this;
    const body = { action: what, requested_by: this.requestedBy.value.trim() || "somebody at the page" };
    if (value !== undefined) body.value = value;
    const path = `api/run/${run.index}/control`;
    try {
      await this.net.post(path, body);
      toast("The server did it without asking twice.", "warn");
    } catch (error) {
      if (error.status !== 409 || !error.body.prompt) return toast(error.message, "bad");
      const yes = await this.dialog.confirm(error.body.prompt, {
        title: `${what[0].toUpperCase()}${what.slice(1)}?`,
        yes: `Yes, ${what}`,
        no: "No",
      });
      if (!yes) return undefined;
      try {
        const reply = await this.net.post(path, { ...body, confirmed: true });
        toast(reply.done ?? "Done.");
        delete this.quorum.dataset.edited;
        delete this.grace.dataset.edited;
      } catch (failure) {
        toast(failure.message, "bad");
      }
    }
    return undefined;
  }
}
