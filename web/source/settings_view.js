// The settings panel of a conversation: system prompt, thinking, sampling, tools and response format.

import { button, byId, labelled, make } from "./dom.js";
import { NUMBERS, jsonProblem } from "./settings.js";

const EXAMPLE_TOOL = {
  name: "add",
  description: "Add two numbers.",
  parameters: JSON.stringify(
    {
      type: "object",
      properties: { a: { type: "number" }, b: { type: "number" } },
      required: ["a", "b"],
    },
    null,
    2,
  ),
  code: "({ a, b }) => a + b",
};

/** Draws the settings of the current conversation; changes apply immediately. */
export function drawSettings(chat) {
  const { settings } = chat.talk;
  const changed = () => {
    byId("settings-problem").textContent = "";
    chat.keepSoon();
    chat.composer.changed();
  };
  const set = (name, value) => {
    settings[name] = value;
    changed();
  };
  byId("settings").replaceChildren(
    make(
      "header",
      {},
      make("h2", {}, "Conversation settings"),
      button("×", () => (document.body.dataset.settings = ""), {
        "aria-label": "Close settings",
        class: "quiet",
      }),
    ),
    make("p", { id: "settings-problem", class: "over", role: "alert" }),
    labelled(
      "System prompt",
      text(settings.system ?? "", (value) => set("system", value), { rows: 4 }),
      "instructions before the first message",
    ),
    thinking(settings, set),
    sampling(settings, set, chat.model.sampling ?? {}),
    tools(settings, changed),
    form(settings, set),
    make("p", { class: "hint" }, "New conversations start with these settings."),
  );
}

const text = (value, onInput, fields = {}) =>
  make("textarea", {
    value,
    spellcheck: false,
    ...fields,
    on: { input: (event) => onInput(event.target.value) },
  });

function thinking(settings, set) {
  const options = [
    ["", "server default"],
    ["on", "on"],
    ["off", "off"],
  ];
  const choice = make(
    "select",
    { on: { change: (event) => set("thinking", event.target.value) } },
    ...options.map(([value, label]) =>
      make("option", { value, selected: value === (settings.thinking ?? "") }, label),
    ),
  );
  return labelled("Thinking", choice);
}

function sampling(settings, set, defaults) {
  const fields = NUMBERS.map(({ name, label, hint, ...limits }) =>
    labelled(
      label,
      make("input", {
        type: "number",
        ...limits,
        value: settings[name] ?? "",
        placeholder: String(defaults[name] ?? ""),
        on: {
          input: (event) =>
            set(name, event.target.value === "" ? undefined : event.target.valueAsNumber),
        },
      }),
      hint,
    ),
  );
  return make(
    "details",
    { open: true },
    make("summary", {}, "Sampling"),
    make("div", { class: "grid" }, ...fields),
  );
}

function tools(settings, changed) {
  settings.tools ??= [];
  const list = make("div");
  const draw = () => {
    list.replaceChildren(
      ...settings.tools.map((tool, place) =>
        toolFields(tool, changed, () => {
          settings.tools.splice(place, 1);
          changed();
          draw();
        }),
      ),
    );
  };
  const add = button("Add a tool", () => {
    settings.tools.push({
      ...EXAMPLE_TOOL,
      ...(settings.tools.length ? { name: `tool_${settings.tools.length + 1}` } : {}),
    });
    changed();
    draw();
  });
  const options = [
    ["", "auto: the model may call tools"],
    ["required", "required: the model must call a tool first"],
    ["none", "none: no tool calls"],
  ];
  const choice = make(
    "select",
    {
      on: {
        change: (event) => {
          settings.toolChoice = event.target.value;
          changed();
        },
      },
    },
    ...options.map(([value, label]) =>
      make("option", { value, selected: value === (settings.toolChoice ?? "") }, label),
    ),
  );
  draw();
  return make(
    "details",
    { open: settings.tools.length > 0 },
    make("summary", {}, "Tools"),
    list,
    labelled("Tool choice", choice),
    add,
  );
}

function toolFields(tool, changed, remove) {
  const set = (name, value) => {
    tool[name] = value;
    changed();
  };
  const problem = make("small", { class: "over" }, jsonProblem(tool.parameters ?? ""));
  const schema = text(
    tool.parameters ?? "",
    (value) => {
      problem.textContent = jsonProblem(value);
      set("parameters", value);
    },
    { rows: 5, class: "mono" },
  );
  const name = make("input", {
    value: tool.name ?? "",
    spellcheck: false,
    on: { input: (event) => set("name", event.target.value.trim()) },
  });
  return make(
    "fieldset",
    {},
    make("legend", {}, "Tool"),
    labelled("Name", name),
    labelled(
      "Description",
      text(tool.description ?? "", (value) => set("description", value), { rows: 2 }),
    ),
    labelled("Parameters (JSON schema)", schema),
    problem,
    labelled(
      "Function (JavaScript)",
      text(tool.code ?? "", (value) => set("code", value), { rows: 3, class: "mono" }),
      "Runs in a sandbox without network access. Leave it empty to answer calls by hand.",
    ),
    button("Remove this tool", remove, { class: "quiet" }),
  );
}

function form(settings, set) {
  const problem = make("small", { class: "over" }, jsonProblem(settings.schema ?? ""));
  const schema = text(
    settings.schema ?? "",
    (value) => {
      problem.textContent = jsonProblem(value);
      set("schema", value);
    },
    {
      rows: 5,
      class: "mono",
      placeholder: '{"type": "object", "properties": {"sum": {"type": "integer"}}}',
    },
  );
  return make(
    "details",
    { open: Boolean(settings.schema) },
    make("summary", {}, "Response format"),
    labelled(
      "JSON schema",
      schema,
      "Answers are constrained to this schema. Empty: free text.",
    ),
    problem,
  );
}
