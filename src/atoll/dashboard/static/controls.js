// Controls. Every action needs a confirmation: the server replies to the first request with a question, and acts on the
// second request.

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

  button(text, action, value) {
    const click = () => this.request(action, value?.());
    return h("button", { type: "button", "data-control": action, on: { click } }, text);
  }

  /** Show the controls of `run`; null hides them. */
  render(run, status, travelling, many) {
    show(this.host, Boolean(run?.controls));
    if (!run?.controls || !status) return;
    this.run = run;
    put(this.title, many ? `Controls of ${run.name}` : "Controls");
    const isOver = !status.live || status.stage === "finished";
    for (const button of Object.values(this.buttons)) attr(button, "disabled", travelling || isOver ? "" : null);
    show(this.buttons.pause, !status.paused);
    show(this.buttons.resume, Boolean(status.paused));
    const numbers = status.islands.filter((island) => island.state !== "left").map((island) => island.learner);
    const key = numbers.join();
    if (key !== this.key) {
      this.key = key;
      const chosen = this.learner.value;
      this.learner.replaceChildren(...numbers.map((number) => h("option", { value: number }, String(number))));
      if (numbers.includes(Number(chosen))) this.learner.value = chosen;
    }
    // Do not overwrite a field that the user is editing.
    if (document.activeElement !== this.quorum && !this.quorum.dataset.edited)
      this.quorum.value = status.headline?.quorum ?? "";
    if (document.activeElement !== this.grace && !this.grace.dataset.edited)
      this.grace.value = status.headline?.grace_margin ?? "";
    this.quorum.oninput ??= () => (this.quorum.dataset.edited = "1");
    this.grace.oninput ??= () => (this.grace.dataset.edited = "1");
    put(
      this.note,
      travelling
        ? "Controls act on the current run: go back to live first."
        : isOver
          ? "The run has ended."
          : "Every action needs a confirmation, and is written to the tape with your name and the time.",
    );
  }

  async request(action, value) {
    const { run } = this;
    const body = { action, requested_by: this.requestedBy.value.trim() || "unnamed user of the page" };
    if (value !== undefined) body.value = value;
    const path = `api/run/${run.index}/control`;
    try {
      await this.net.post(path, body);
      toast("Done without confirmation.", "warn");
    } catch (error) {
      if (error.status !== 409 || !error.body.prompt) return toast(error.message, "bad");
      const yes = await this.dialog.confirm(error.body.prompt, {
        title: `${action[0].toUpperCase()}${action.slice(1)}?`,
        yes: `Yes, ${action}`,
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
