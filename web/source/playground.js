// The playground: raw completions with logprobs, tokenization, and rendered chat templates.

import { pathTo } from "./conversation.js";
import { showCopyAs } from "./copy_as.js";
import { announce, button, copyText, count, labelled, make } from "./dom.js";
import { Problem, events, json } from "./server.js";
import { NUMBERS, chatBody, samplingOf } from "./settings.js";

const NUM_ALTERNATIVES = 5;
const TABS = { complete: "Complete", tokens: "Tokens", template: "Template" };

export class Playground {
  /** `currentTalk` returns the conversation shown in the chat. */
  constructor(element, model, currentTalk) {
    Object.assign(this, { model, currentTalk });
    this.card = make("div", { class: "token-card", hidden: true, role: "tooltip" });
    const panels = {
      complete: this.completePanel(),
      tokens: this.tokensPanel(),
      template: this.templatePanel(),
    };
    const tabs = Object.entries(TABS).map(([name, label]) =>
      button(label, () => choose(name), { data: { tab: name } }),
    );
    const choose = (chosen) => {
      for (const [name, panel] of Object.entries(panels)) panel.hidden = name !== chosen;
      for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.dataset.tab === chosen));
    };
    element.replaceChildren(
      make(
        "div",
        { class: "page" },
        make("h2", {}, "Playground"),
        make("div", { class: "row" }, ...tabs),
        ...Object.values(panels),
        this.card,
      ),
    );
    choose("complete");
  }

  // Complete

  completePanel() {
    this.prompt = make("textarea", {
      rows: 6,
      class: "mono",
      value: "A river is",
      spellcheck: false,
    });
    this.sides = [
      this.side("A", { temperature: 0, max_tokens: 48 }),
      this.side("B", { temperature: 1, max_tokens: 48 }),
    ];
    const second = this.sides[1].element;
    second.hidden = true;
    const compare = make("input", {
      type: "checkbox",
      on: { change: (event) => (second.hidden = !event.target.checked) },
    });
    this.runButton = button("Complete", () => this.run(), { class: "primary" });
    return make(
      "div",
      {},
      make(
        "p",
        { class: "hint" },
        "The text is sent to the model as is, without a chat template. Darker tokens were less likely; point at a token, or use the arrow keys, to see its alternatives.",
      ),
      labelled("Prompt", this.prompt),
      make(
        "div",
        { class: "row" },
        this.runButton,
        make("label", {}, compare, "Compare with other settings"),
      ),
      make("div", { class: "columns" }, ...this.sides.map((side) => side.element)),
    );
  }

  side(name, settings) {
    const output = make("div", {
      class: "output",
      tabIndex: 0,
      "aria-label": `Completion ${name}`,
      role: "region",
    });
    const note = make("small");
    const fields = NUMBERS.filter((one) => one.name !== "repetition_penalty").map(
      ({ name: field, label, hint, ...limits }) =>
        labelled(
          label,
          make("input", {
            type: "number",
            ...limits,
            value: settings[field] ?? "",
            on: {
              input: (event) =>
                (settings[field] =
                  event.target.value === "" ? undefined : event.target.valueAsNumber),
            },
          }),
        ),
    );
    output.addEventListener("keydown", (event) => stepThrough(output, event));
    const side = { settings, output, note };
    const copy = button("Copy as", () => showCopyAs("v1/completions", this.bodyOf(side)), {
      class: "quiet",
    });
    side.element = make(
      "div",
      {},
      make("div", { class: "row" }, make("h3", {}, `Settings ${name}`), copy),
      make("div", { class: "grid" }, ...fields),
      output,
      note,
    );
    return side;
  }

  bodyOf(side) {
    return {
      model: this.model.name,
      prompt: this.prompt.value,
      logprobs: NUM_ALTERNATIVES,
      stream: true,
      ...samplingOf(side.settings),
    };
  }

  async run() {
    if (this.controller) return this.controller.abort();
    this.controller = new AbortController();
    this.runButton.textContent = "Stop";
    await Promise.all(
      this.sides.filter((side) => !side.element.hidden).map((side) => this.complete(side)),
    );
    this.controller = null;
    this.runButton.textContent = "Complete";
    announce("The completion has finished.");
    return undefined;
  }

  async complete(side) {
    side.output.replaceChildren();
    side.note.textContent = "";
    let number = 0,
      surprise = 0;
    try {
      for await (const event of events("v1/completions", {
        body: this.bodyOf(side),
        signal: this.controller.signal,
      })) {
        const scores = event.choices?.[0]?.logprobs;
        (scores?.tokens ?? []).forEach((token, place) => {
          side.output.append(
            this.token(token, scores.token_logprobs[place], scores.top_logprobs?.[place] ?? {}),
          );
          surprise -= scores.token_logprobs[place];
          number += 1;
        });
      }
    } catch (error) {
      if (!(error instanceof Problem) && error.name !== "AbortError") throw error;
      side.note.textContent =
        error instanceof Problem ? `${error.message} ${error.detail} ` : "Stopped. ";
    }
    if (number)
      side.note.textContent += `${count(number)} tokens, perplexity ${Math.exp(surprise / number).toFixed(2)}`;
  }

  token(text, logprob, alternatives) {
    const element = tokenOf(text, { tabIndex: -1 });
    const doubt = 1 - Math.exp(logprob);
    element.style.background = `color-mix(in srgb, var(--rival) ${Math.round(doubt * 60)}%, transparent)`;
    const rows = Object.entries(alternatives)
      .sort(([, a], [, b]) => b - a)
      .map(([other, score]) =>
        make(
          "tr",
          {},
          make("th", {}, JSON.stringify(other)),
          make("td", {}, `${(100 * Math.exp(score)).toFixed(1)} %`),
        ),
      );
    const title = `${JSON.stringify(text)}: ${(100 * Math.exp(logprob)).toFixed(1)} %`;
    const show = () => {
      const place = element.getBoundingClientRect();
      this.card.replaceChildren(
        make("strong", {}, title),
        make("table", {}, make("tbody", {}, ...rows)),
      );
      this.card.hidden = false;
      this.card.style.left = `${Math.min(place.left, innerWidth - 220)}px`;
      this.card.style.top = `${place.bottom + 6 + this.card.offsetHeight > innerHeight ? place.top - this.card.offsetHeight - 6 : place.bottom + 6}px`;
    };
    const hide = () => (this.card.hidden = true);
    element.addEventListener("pointerenter", show);
    element.addEventListener("pointerleave", hide);
    element.addEventListener("focus", () => {
      show();
      announce(`${title}. Alternatives: ${rows.map((row) => row.textContent).join(", ")}`);
    });
    element.addEventListener("blur", hide);
    return element;
  }

  // Tokens

  tokensPanel() {
    const output = make("div", {
      class: "output",
      tabIndex: 0,
      role: "region",
      "aria-label": "Tokens",
    });
    const note = make("small");
    const source = make("textarea", { rows: 5, class: "mono", spellcheck: false });
    let waiting = 0;
    const request = () => ({
      prompt: source.value,
      return_token_strs: true,
      add_special_tokens: false,
    });
    const show = async () => {
      try {
        const {
          count: total,
          tokens,
          token_strs: pieces,
        } = await json("tokenize", { body: request() });
        output.replaceChildren(
          ...tokens.map((id, place) =>
            tokenOf(pieces[place], { title: `token ${id}` }, "striped"),
          ),
        );
        note.textContent = `${count(total)} tokens, ${count(source.value.length)} characters`;
      } catch (error) {
        note.textContent = error.message;
      }
    };
    source.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(show, 200);
    });
    return make(
      "div",
      {},
      labelled("Text", source, "each stripe is a token; point at it to see its ID"),
      make(
        "div",
        { class: "row" },
        button("Copy as", () => showCopyAs("tokenize", request()), { class: "quiet" }),
      ),
      output,
      note,
    );
  }

  // Template

  templatePanel() {
    const source = make("textarea", {
      rows: 8,
      class: "mono",
      spellcheck: false,
      value: '{\n  "messages": [\n    {"role": "user", "content": "Hello!"}\n  ]\n}',
    });
    const output = make("pre", { class: "output", tabIndex: 0, "aria-label": "Prompt" });
    const note = make("small");
    const show = async () => {
      try {
        const body = JSON.parse(source.value);
        const { prompt } = await json("apply-template", { body });
        const { count: total } = await json("tokenize", { body });
        output.textContent = prompt;
        note.textContent = `${count(total)} tokens`;
      } catch (error) {
        note.textContent = `${error.message} ${error.detail ?? ""}`;
      }
    };
    const copyAs = () => {
      try {
        showCopyAs("apply-template", JSON.parse(source.value));
      } catch (error) {
        note.textContent = error.message;
      }
    };
    const take = button("Use the current conversation", () => {
      const talk = this.currentTalk();
      if (!pathTo(talk).length) note.textContent = "The conversation is empty.";
      else {
        const { messages, tools, chat_template_kwargs } = chatBody(talk, talk.leaf, "");
        source.value = JSON.stringify({ messages, tools, chat_template_kwargs }, null, 2);
        show();
      }
    });
    return make(
      "div",
      {},
      labelled(
        "Request (JSON)",
        source,
        "what an API client would send: messages, and optionally tools and chat_template_kwargs",
      ),
      make(
        "div",
        { class: "row" },
        button("Show what the model sees", show, { class: "primary" }),
        take,
        button("Copy", (event) => copyText(output.textContent, event.currentTarget)),
        button("Copy as", () => copyAs(), { class: "quiet" }),
      ),
      output,
      note,
    );
  }
}

/** A line break gets a visible mark, so that it can be pointed at. */
const tokenOf = (text, fields, kind = "") =>
  make("span", { class: `token ${kind} ${text.includes("\n") ? "breaks" : ""}`, ...fields }, text);

/** The arrow keys move the focus between tokens; the focused token shows its alternatives. */
function stepThrough(output, event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tokens = [...output.children];
  if (!step || !tokens.length) return;
  const place = tokens.indexOf(document.activeElement) + step;
  tokens[Math.max(0, Math.min(place, tokens.length - 1))].focus();
  event.preventDefault();
}
