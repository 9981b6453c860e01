// One streaming reply: adds its events to a message and measures their times.

import { events } from "./server.js";

/** Adds to `message` until the reply ends; calls `onGrow` after every event. */
export async function streamReply(body, message, { signal, onGrow }) {
  const started = performance.now();
  const stats = { ...message.stats, startedAt: Date.now() };
  message.stats = stats;
  let thoughtSince = null;
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  for await (const event of events("v1/chat/completions", { body: asked, signal })) {
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (stats.firstS === undefined && (thought || delta.content || delta.tool_calls))
      stats.firstS = (performance.now() - started) / 1000;
    if (thought) {
      thoughtSince ??= performance.now();
      message.reasoning = (message.reasoning ?? "") + thought;
      stats.thoughtS = (performance.now() - thoughtSince) / 1000;
    }
    if (delta.content) message.content += delta.content;
    for (const part of delta.tool_calls ?? []) growCall(message, part);
    if (choice?.finish_reason) stats.finish = choice.finish_reason;
    if (event.usage) takeUsage(stats, event.usage);
    stats.totalS = (performance.now() - started) / 1000;
    onGrow();
  }
}

function growCall(message, part) {
  message.calls ??= [];
  const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

function takeUsage(stats, usage) {
  stats.promptTokens = usage.prompt_tokens;
  stats.tokens = usage.completion_tokens;
  stats.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  stats.thoughtTokens = usage.completion_tokens_details?.reasoning_tokens ?? 0;
}

/** Tokens per second after the first token; null: too few tokens. */
export function speedOf(stats) {
  const spentS = (stats.totalS ?? 0) - (stats.firstS ?? 0);
  return stats.tokens > 1 && spentS > 0.001 ? (stats.tokens - 1) / spentS : null;
}
