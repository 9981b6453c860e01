// HTTP client of the page: requests with the tab's API key; responses as JSON or events, errors as a Problem.

import { Problem, brokenOff, problemOf, problemOfEvent, unreachable } from "./problems.js";

export const base = new URL("../", import.meta.url);
const KEY = "penstock-key";
let askForKey = null;
let asking = null;

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const setApiKey = (key) =>
  key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY);

/** `ask(wasRefused)` resolves to a key, or to "" if the user cancels. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

async function newKey() {
  asking ??= askForKey(apiKey() !== "").finally(() => (asking = null)); // only once for all waiting requests
  const key = await asking;
  if (key) setApiKey(key);
  return key;
}

export async function request(path, { body, signal } = {}) {
  for (;;) {
    const headers = {};
    const key = apiKey();
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    let answer;
    try {
      const options = {
        method: body ? "POST" : "GET",
        headers,
        signal,
        body: body && JSON.stringify(body),
      };
      answer = await fetch(new URL(path, base), options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw unreachable();
    }
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => null);
    const problem = problemOf(answer.status, said, answer.headers);
    if (answer.status !== 401 || (apiKey() === key && !(await newKey()))) throw problem;
  }
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

/** Yields the JSON of each event. Throws a Problem if the stream ends without an expected [DONE]. */
export async function* events(path, { body, signal, endsWithDone = true } = {}) {
  const answer = await request(path, { body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw brokenOff();
    }
    if (piece.done) break;
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw problemOfEvent(event.error);
      yield event;
    }
  }
  if (endsWithDone) throw brokenOff();
}

/** The body of /health, whatever its status; null: the server is unreachable. */
export async function health() {
  const key = apiKey();
  try {
    const answer = await fetch(
      new URL("health", base),
      key ? { headers: { authorization: `Bearer ${key}` } } : {},
    );
    return await answer.json();
  } catch {
    return null;
  }
}

export { Problem };
