// Settings of a conversation, and the chat request built from them.

import { requestMessages } from "./conversation.js";

export const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    hint: "0: always the most likely token",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0.01,
    max: 1,
    step: 0.01,
    hint: "probability mass to sample from",
  },
  {
    name: "top_k",
    label: "Top k",
    min: 0,
    max: 1000,
    step: 1,
    hint: "number of tokens to sample from; 0: all",
  },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "relative to the most likely token" },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.5,
    max: 2,
    step: 0.05,
    hint: "1: none",
  },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "length limit of an answer" },
  { name: "seed", label: "Seed", step: 1, hint: "makes sampling repeatable" },
];

/** The sampling parameters that are set; the server has defaults for the others. */
export const samplingOf = (settings) =>
  Object.fromEntries(
    NUMBERS.map(({ name }) => [name, settings[name]]).filter(([, value]) => Number.isFinite(value)),
  );

/** The body of a chat completion for the path that ends at `leaf`. Throws if a schema is not JSON. */
export function chatBody(talk, leaf, model) {
  const { settings } = talk;
  const body = { model, messages: requestMessages(talk, leaf), ...samplingOf(settings) };
  if (settings.thinking)
    body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const tools = (settings.tools ?? []).filter((tool) => tool.name);
  if (tools.length) {
    body.tools = tools.map(({ name, description, parameters }) => ({
      type: "function",
      function: {
        name,
        description,
        parameters: parsed(parameters || '{"type":"object"}', `The schema of ${name}`),
      },
    }));
    // After a tool result the model is free to answer: with "required" it would call tools forever.
    const isFree = settings.toolChoice === "required" && body.messages.at(-1)?.role === "tool";
    if (settings.toolChoice && !isFree) body.tool_choice = settings.toolChoice;
  }
  if (settings.schema?.trim()) {
    const schema = parsed(settings.schema, "The response schema");
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema, strict: true },
    };
  }
  return body;
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

export function jsonProblem(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return `Not JSON yet: ${error.message}`;
  }
}

/** Reads imported settings and checks their types: files are untrusted. */
export function readSettings(found) {
  const settings = {};
  const text = (value) => (typeof value === "string" ? value : "");
  for (const name of ["system", "schema", "thinking", "toolChoice"])
    if (text(found?.[name])) settings[name] = found[name];
  for (const { name } of NUMBERS) if (Number.isFinite(found?.[name])) settings[name] = found[name];
  const tools = Array.isArray(found?.tools) ? found.tools : [];
  settings.tools = tools.map((tool) =>
    Object.fromEntries(
      ["name", "description", "parameters", "code"].map((name) => [name, text(tool?.[name])]),
    ),
  );
  return settings;
}
