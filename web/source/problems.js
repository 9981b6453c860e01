// Errors that a user may see, each with one plain sentence and a way to proceed.

/** `way`: what the user can do: key, wait, shorten, edit, continue, change (the request), retry. */
export class Problem extends Error {
  constructor(sentence, { way = "retry", detail = "", status = 0, waitS = 0 } = {}) {
    super(sentence);
    Object.assign(this, { way, detail, status, waitS });
  }
}

export const unreachable = () =>
  new Problem("The server cannot be reached. It may have been stopped, or the network may be down.", {
    way: "retry",
  });

/** The problem of a response whose status is not 200. */
export function problemOf(status, body, headers) {
  const error = body?.error ?? {};
  const detail = typeof error === "string" ? error : (error.message ?? "");
  const waitS = Math.max(1, Number(headers?.get("retry-after")) || 1);
  if (status === 401)
    return new Problem("The server did not accept the API key.", { way: "key", status, detail });
  if (status === 429)
    return new Problem(`The server is busy and asks to wait ${waitS} s.`, {
      way: "wait",
      status,
      detail,
      waitS,
    });
  if (status === 503)
    return new Problem("The engine is not ready yet.", {
      way: "wait",
      status,
      detail,
      waitS: Math.max(2, waitS),
    });
  if (error.code === "context_length_exceeded")
    return new Problem("The conversation no longer fits into the model's context.", {
      way: "shorten",
      status,
      detail,
    });
  if (status === 408)
    return new Problem("The answer took longer than the server allows.", { status, detail });
  if (status === 404)
    return new Problem("The server does not support this request.", { way: "change", status, detail });
  if (status >= 500) return new Problem("The server had an internal error.", { status, detail });
  return new Problem("The server refused the request.", { way: "change", status, detail });
}

/** The problem of an error event in the middle of a stream. */
export function problemOfEvent(error) {
  const lost = error.code === "engines_lost" || error.code === "engine_unavailable";
  const sentence = lost
    ? "The engine stopped in the middle of this answer."
    : error.code === "deadline_exceeded"
      ? "The answer took longer than the server allows."
      : "The answer was interrupted.";
  return new Problem(sentence, { way: "continue", detail: error.message ?? "" });
}

export const brokenOff = () =>
  new Problem("The connection ended in the middle of this answer.", { way: "continue" });
