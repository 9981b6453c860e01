import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as ask from "./report.mjs";

const settings = { baseURL: `${ask.BASE_URL}/v1`, apiKey: ask.API_KEY };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ name: "penstock", supportsStructuredOutputs: true, ...settings });
const anthropic = createAnthropic(settings);

const get_weather = tool({
  description: ask.WEATHER_ABOUT,
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === "Oslo" ? ask.WEATHER_RESULT : `no city ${city}`),
});
const user = (content) => ({ role: "user", content });

async function runFeatures(api, model, thinking) {
  const fields = { model, maxRetries: 0 };
  await ask.feature(api, "chat", "43", async () => (await generateText({ ...fields, prompt: ask.SUM })).text);
  await ask.feature(api, "stream", "43", () => streamText({ ...fields, prompt: ask.SUM }).text);
  await ask.feature(api, "second turn", "Alice", async () => {
    const first = await generateText({ ...fields, messages: [user(ask.NAME)] });
    const messages = [user(ask.NAME), ...first.response.messages, user(ask.ASK_NAME)];
    return (await generateText({ ...fields, messages })).text;
  });
  const errand = { ...fields, tools: { get_weather }, stopWhen: stepCountIs(3), prompt: ask.WEATHER };
  await ask.feature(api, "tools", ask.WEATHER_TOLD, async () => (await generateText(errand)).text);
  await ask.feature(api, "streamed tools", ask.WEATHER_TOLD, () => streamText(errand).text);
  await ask.feature(api, "structured output", '{"sum":', async () => {
    const output = Output.object({ schema: z.object({ sum: z.int().max(99) }) });
    return JSON.stringify((await generateText({ ...fields, output, prompt: ask.SUM })).output);
  });
  await ask.feature(api, "thinking", "43", async () => {
    const reply = await generateText({ ...fields, ...thinking, prompt: ask.SUM });
    if (!reply.reasoning.length) throw new Error(`no reasoning beside ${reply.text}`);
    return reply.text;
  });
}

const effort = { reasoningEffort: "low" };
await runFeatures("Responses", openai(ask.MODEL), { providerOptions: { openai: { ...effort, forceReasoning: true } } });
await runFeatures("chat completions", compatible(ask.MODEL), { providerOptions: { penstock: effort } });
await runFeatures("Messages", anthropic(ask.MODEL), {
  providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
});
await ask.feature("chat completions", "embeddings", "numbers", async () => {
  const model = compatible.embeddingModel(ask.MODEL);
  return `${(await embed({ model, value: ask.SUM, maxRetries: 0 })).embedding.length} numbers`;
});
