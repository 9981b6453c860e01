// A conversation as data: a tree of messages, one path of which is shown. Knows neither server nor DOM.

export const newId = () =>
  crypto.getRandomValues(new Uint32Array(3)).reduce((id, n) => id + n.toString(36), "");

export function newConversation(settings = {}) {
  const now = Date.now();
  return {
    id: newId(),
    title: "",
    created: now,
    updated: now,
    settings,
    messages: {},
    leaf: null,
    firstSent: null,
  };
}

/** Appends a child of `parent` and shows the path that ends there. */
export function addMessage(talk, parent, fields) {
  const message = { id: newId(), parent, created: Date.now(), content: "", ...fields };
  talk.messages[message.id] = message;
  talk.leaf = message.id;
  talk.updated = Date.now();
  if (!talk.title && message.role === "user") talk.title = titleOf(message.content);
  return message;
}

export const titleOf = (text) => {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
};

/** Messages from the first one to `leaf`. */
export function pathTo(talk, leaf = talk.leaf) {
  const path = [];
  for (let id = leaf; id && talk.messages[id]; id = talk.messages[id].parent)
    path.unshift(talk.messages[id]);
  return path;
}

/** Messages with the same parent, oldest first: the branches at this point. */
export const siblings = (talk, message) =>
  Object.values(talk.messages)
    .filter((other) => other.parent === message.parent)
    .sort((a, b) => a.created - b.created);

/** Shows the branch of this message, down to its newest leaf. */
export function showBranch(talk, message) {
  let leaf = message;
  for (;;) {
    const next = Object.values(talk.messages).filter((other) => other.parent === leaf.id);
    if (!next.length) break;
    leaf = next.reduce((a, b) => (a.created > b.created ? a : b));
  }
  talk.leaf = leaf.id;
}

export function removeMessage(talk, message) {
  const inside = new Set([message.id]);
  for (let grown = true; grown;) {
    grown = false;
    for (const other of Object.values(talk.messages))
      if (inside.has(other.parent) && !inside.has(other.id)) grown = Boolean(inside.add(other.id));
  }
  for (const id of inside) delete talk.messages[id];
  const left = Object.values(talk.messages).filter((other) => other.parent === message.parent);
  if (left.length) showBranch(talk, left.at(-1));
  else talk.leaf = message.parent;
}

/** Index of the first message that is sent, on every branch that starts there. */
export function placeOfFirstSent(talk, path) {
  const first = talk.messages[talk.firstSent];
  return first ? Math.max(0, path.findIndex(({ parent }) => parent === first.parent)) : 0;
}

/** The messages of a request, in OpenAI's format, without those left out to fit the context. */
export function requestMessages(talk, leaf = talk.leaf) {
  const path = pathTo(talk, leaf);
  const first = placeOfFirstSent(talk, path);
  const system = talk.settings.system ? [{ role: "system", content: talk.settings.system }] : [];
  return [...system, ...path.slice(first).map(asSent)];
}

function asSent(message) {
  if (message.role === "tool")
    return { role: "tool", tool_call_id: message.callId, content: message.content };
  const sent = { role: message.role, content: message.content };
  if (message.role === "user" && message.files?.length)
    sent.content = [
      ...message.files.map((file) => `${file.name}:\n\n${file.text}`),
      message.content,
    ].join("\n\n");
  if (message.reasoning) sent.reasoning_content = message.reasoning;
  if (message.calls?.length)
    sent.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  return sent;
}

/** Leaves out the older half of the messages; false: none is left to leave out. */
export function shorten(talk) {
  const path = pathTo(talk);
  const first = placeOfFirstSent(talk, path);
  const users = path.slice(first + 1).filter((message) => message.role === "user");
  if (!users.length) return false;
  talk.firstSent = users[Math.floor((users.length - 1) / 2)].id;
  return true;
}

/** Marks answers that were still streaming when the page was closed. */
export function noteBrokenOff(talk) {
  for (const message of Object.values(talk.messages)) {
    if (!message.isGrowing) continue;
    delete message.isGrowing;
    const way = message.content || message.reasoning ? "continue" : "retry";
    message.problem = { sentence: "The page was closed before this answer was complete.", way };
  }
}

export function matches(talk, words) {
  if (!words) return true;
  const text = [talk.title, ...Object.values(talk.messages).map((message) => message.content)]
    .join("\n")
    .toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/** Reads an imported conversation. Every field is validated, every id is new: files are untrusted. */
export function readConversation(found) {
  const text = (value) => (typeof value === "string" ? value : "");
  const list = (value) => (Array.isArray(value) ? value : []);
  if (!found || typeof found.messages !== "object" || !found.messages)
    throw new Error("It has no messages.");
  const talk = newConversation();
  const ids = new Map(Object.keys(found.messages).map((id) => [id, newId()]));
  for (const [id, one] of Object.entries(found.messages)) {
    if (!["user", "assistant", "tool"].includes(one?.role))
      throw new Error("A message has an unknown role.");
    talk.messages[ids.get(id)] = {
      id: ids.get(id),
      parent: ids.get(one.parent) ?? null,
      role: one.role,
      content: text(one.content),
      isJson: one.isJson === true,
      created: Number(one.created) || Date.now(),
      reasoning: text(one.reasoning) || undefined,
      callId: text(one.callId) || undefined,
      name: text(one.name) || undefined,
      stats: one.stats ? numbersOf(one.stats) : undefined,
      calls: list(one.calls).map((c) => ({
        id: text(c?.id),
        name: text(c?.name),
        arguments: text(c?.arguments),
      })),
      files: list(one.files).map((f) => ({ name: text(f?.name), text: text(f?.text) })),
    };
  }
  talk.leaf = ids.get(found.leaf) ?? [...ids.values()].at(-1) ?? null;
  talk.firstSent = ids.get(found.firstSent) ?? null;
  for (const message of Object.values(talk.messages)) {
    const seen = new Set();
    for (let one = message; one; one = talk.messages[one.parent]) {
      if (seen.has(one.id)) throw new Error("Its messages form a cycle.");
      seen.add(one.id);
    }
  }
  talk.title = text(found.title).slice(0, 200);
  talk.updated = Number(found.updated) || Date.now();
  return talk;
}

const numbersOf = (found) =>
  Object.fromEntries(Object.entries(found).filter(([, value]) => Number.isFinite(value)));
