// One message on the screen: content, thinking, tool calls, statistics and buttons.

import { siblings } from "./conversation.js";
import { button, copyText, count, make, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { speedOf } from "./reply.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };

export class MessageView {
  /** `actions`: the callbacks of the buttons; each gets the message. */
  constructor(talk, message, actions) {
    Object.assign(this, { talk, message, actions, isGrowing: false });
    this.makeParts();
    this.element = make("article", {
      class: `message ${message.role}`,
      tabIndex: -1,
      data: { id: message.id },
    });
    this.update();
  }

  update() {
    const { message } = this;
    this.element.setAttribute("aria-label", WHO[message.role]);
    this.element.setAttribute("aria-busy", String(this.isGrowing));
    const body =
      message.role === "assistant"
        ? this.answer()
        : message.role === "tool"
          ? this.result()
          : this.question();
    this.element.replaceChildren(this.head(), ...body, this.foot());
  }

  head() {
    const { talk, message } = this;
    const others = siblings(talk, message);
    const place = others.findIndex((other) => other.id === message.id);
    const go = (step) => () => this.actions.show(others[place + step]);
    const branches =
      others.length > 1 &&
      make(
        "span",
        { class: "branches", role: "group", "aria-label": "Branches" },
        button("‹", go(-1), {
          disabled: place === 0,
          "aria-label": "Previous branch",
          class: "quiet",
        }),
        make("span", {}, `${place + 1} of ${others.length}`),
        button("›", go(1), {
          disabled: place === others.length - 1,
          "aria-label": "Next branch",
          class: "quiet",
        }),
      );
    const name =
      message.role === "tool" ? `Result of ${message.name ?? "the tool"}` : WHO[message.role];
    return make("header", {}, make("h2", {}, name), branches || null);
  }

  question() {
    const files = (this.message.files ?? []).map((file) =>
      make(
        "details",
        { class: "file" },
        make("summary", {}, `${file.name}, ${count(file.text.length)} characters`),
        make("pre", { tabIndex: 0 }, file.text),
      ),
    );
    return [...files, make("div", { class: "said" }, this.message.content)];
  }

  result() {
    return [make("pre", { class: "result", tabIndex: 0 }, this.message.content)];
  }

  /** Elements of an answer, reused while it streams and afterwards. */
  makeParts() {
    this.prose = make("div", { class: "prose" });
    this.markdown = new MarkdownView(this.prose);
    this.thought = make(
      "details",
      { class: "thought", hidden: true },
      make("summary"),
      make("div", { class: "said" }, document.createTextNode("")),
    );
    this.calls = make("div", { class: "calls" });
    this.waiting = make("p", { class: "waiting", hidden: true }, "Waiting for the first token …");
  }

  setGrowing(isGrowing) {
    if (isGrowing) this.markdown.reset(); // the last paragraph may grow
    this.isGrowing = isGrowing;
    this.update();
  }

  answer() {
    this.grow();
    return [this.thought, this.waiting, this.prose, this.calls, this.problem()].filter(Boolean);
  }

  /** Shows new content; cheap enough for every frame. */
  grow() {
    const { message, isGrowing } = this;
    const stats = message.stats ?? {};
    this.waiting.hidden =
      !isGrowing || Boolean(message.content || message.reasoning || message.calls?.length);
    if (message.reasoning) {
      const isThinking = isGrowing && !message.content && !message.calls?.length;
      const tokens = stats.thoughtTokens ? `, ${count(stats.thoughtTokens)} tokens` : "";
      const time =
        stats.thoughtS === undefined
          ? ""
          : ` for ${stats.thoughtS < 0.1 ? "a moment" : seconds(stats.thoughtS)}`;
      this.thought.hidden = false;
      this.thought.firstChild.textContent = isThinking
        ? `Thinking${time} …`
        : `Thought${time}${tokens}`;
      const shown = this.thought.lastChild.firstChild;
      shown.appendData(message.reasoning.slice(shown.length));
    }
    this.markdown.show(message.isJson ? `~~~json\n${message.content}` : message.content, !isGrowing);
    if (message.calls?.length)
      this.calls.replaceChildren(...message.calls.map((call) => this.call(call)));
  }

  call(call) {
    const answered = Object.values(this.talk.messages).some(
      (other) => other.role === "tool" && other.callId === call.id,
    );
    const parts = [
      make("figcaption", {}, make("span", {}, "Calls "), make("code", {}, call.name)),
      make("pre", { tabIndex: 0 }, pretty(call.arguments)),
    ];
    if (!this.isGrowing && !answered) parts.push(this.answerForm(call));
    return make("figure", { class: "call" }, ...parts);
  }

  answerForm(call) {
    const text = make("textarea", {
      rows: 2,
      "aria-label": `Result of ${call.name}`,
      placeholder: "Result of the tool call",
    });
    const submit = (event) => {
      event.preventDefault();
      this.actions.answerCall(this.message, call, text.value);
    };
    const run =
      this.actions.hasFunction(call.name) &&
      button("Run the function", () => this.actions.runCall(this.message, call));
    return make(
      "form",
      { on: { submit } },
      text,
      make(
        "div",
        { class: "row" },
        make("button", { class: "primary" }, "Answer by hand"),
        run || null,
      ),
    );
  }

  problem() {
    const { problem } = this.message;
    if (!problem) return null;
    const act = (label, name) =>
      button(label, () => this.actions[name](this.message), { class: "primary" });
    const ways = {
      key: [act("Enter an API key", "enterKey")],
      shorten: [act("Leave out the oldest messages", "shorten")],
      edit: [act("Edit the message", "editQuestion")],
      continue: [act("Continue the answer", "continue"), act("Start over", "again")],
      retry: [act("Try again", "again")],
      change: [act("Edit the message", "editQuestion"), act("Try again", "again")],
      wait: [act("Try again now", "again")],
    };
    return make(
      "div",
      { class: "problem", role: "alert" },
      make("p", {}, problem.sentence),
      problem.detail &&
        make(
          "details",
          { open: problem.way === "change" }, // the detail says what to change
          make("summary", {}, "Message from the server"),
          make("p", {}, problem.detail),
        ),
      make("div", { class: "row" }, ...(ways[problem.way] ?? [])),
    );
  }

  foot() {
    const { message, actions } = this;
    if (this.isGrowing) return make("footer");
    const act = (label, name, hint) =>
      button(label, () => actions[name](message), { class: "quiet", title: hint });
    const copy = button("Copy", (event) => copyText(message.content, event.currentTarget), {
      class: "quiet",
    });
    const buttons = {
      user: () => [
        copy,
        act("Edit", "edit", "Edit as a new branch; this one is kept"),
        act("Delete", "remove"),
      ],
      assistant: () => [
        copy,
        act("Regenerate", "again", "Generate another answer; this one is kept as a branch"),
        act("Continue", "continue", "Continue where the answer ends"),
        act("Edit", "edit", "Edit the answer as a new branch; this one is kept"),
        act("Copy as", "copyAs", "Show the request as code"),
        act("Delete", "remove"),
      ],
      tool: () => [copy, act("Delete", "remove")],
    };
    return make(
      "footer",
      {},
      make("div", { class: "row" }, ...buttons[message.role]()),
      this.statistics(),
    );
  }

  statistics() {
    const { stats } = this.message;
    if (!stats?.tokens) return this.message.wasStopped ? make("small", {}, "stopped") : null;
    const speed = speedOf(stats);
    const parts = [
      `${count(stats.tokens)} tokens`,
      speed && `${speed.toFixed(1)} tokens/s`,
      stats.firstS !== undefined && `first token after ${seconds(stats.firstS)}`,
      `prompt ${count(stats.promptTokens)} tokens${stats.cachedTokens ? `, ${count(stats.cachedTokens)} cached` : ""}`,
      stats.finish === "length" && "cut off at the length limit",
      this.message.wasStopped && "stopped",
    ];
    return make("small", {}, parts.filter(Boolean).join(" · "));
  }

  /** Shows the message in a text box until the edit is saved or canceled. */
  startEdit(done) {
    const { message } = this;
    const text = make("textarea", {
      value: message.content,
      "aria-label": "Edit the message",
      class: "edit",
    });
    const finish = (value) => {
      this.update();
      if (value !== null) done(value);
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") finish(null);
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) finish(text.value);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const keep = button(message.role === "user" ? "Send" : "Save", () => finish(text.value), {
      class: "primary",
    });
    const body = make(
      "div",
      {},
      text,
      make(
        "div",
        { class: "row" },
        keep,
        button("Cancel", () => finish(null)),
      ),
    );
    this.element.replaceChildren(this.head(), body);
    text.style.height = `${Math.min(480, text.scrollHeight + 4)}px`;
    text.focus();
  }
}

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
