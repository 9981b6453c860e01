import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as ask from "./report.mjs";

const client = new OpenAI({ baseURL: `${ask.BASE_URL}/v1`, apiKey: ask.API_KEY, maxRetries: 0 });
const model = ask.MODEL;
const CHAT = "chat completions";
const RESPONSES = "Responses";
const about = { name: "get_weather", description: ask.WEATHER_ABOUT, parameters: ask.WEATHER_SCHEMA };
const tools = [{ type: "function", ...about }];
const user = (content) => [{ role: "user", content }];
const Sum = z.object({ sum: z.int().max(99) });
const getWeather = ({ city }) => (city === "Oslo" ? ask.WEATHER_RESULT : `no city ${city}`);

async function chat(messages, fields = {}) {
  return (await client.chat.completions.create({ model, messages, ...fields })).choices[0].message;
}

await ask.feature(CHAT, "chat", "43", async () => (await chat(user(ask.SUM))).content);
await ask.feature(CHAT, "stream", "43", () =>
  client.chat.completions.stream({ model, messages: user(ask.SUM) }).finalContent(),
);
await ask.feature(CHAT, "second turn", "Alice", async () => {
  const said = await chat(user(ask.NAME));
  return (await chat([...user(ask.NAME), said, ...user(ask.ASK_NAME)])).content;
});
const runnable = { ...about, parse: JSON.parse, function: getWeather };
const errand = { model, messages: user(ask.WEATHER), tools: [{ type: "function", function: runnable }] };
await ask.feature(CHAT, "tools", ask.WEATHER_TOLD, () => client.chat.completions.runTools(errand).finalContent());
await ask.feature(CHAT, "streamed tools", ask.WEATHER_TOLD, () =>
  client.chat.completions.runTools({ ...errand, stream: true }).finalContent(),
);
await ask.feature(CHAT, "structured output", '{"sum":', async () => {
  const response_format = zodResponseFormat(Sum, "sum");
  const reply = await client.chat.completions.parse({ model, messages: user(ask.SUM), response_format });
  return JSON.stringify(reply.choices[0].message.parsed);
});
await ask.feature(CHAT, "thinking", "43", async () => {
  const said = await chat(user(ask.SUM), { reasoning_effort: "low" });
  if (!said.reasoning_content) throw new Error(`no reasoning beside ${said.content}`);
  return said.content;
});
await ask.feature(CHAT, "session", "Alice", async () => {
  const session = { session_id: crypto.randomUUID() };
  await chat(user(ask.NAME), session);
  return (await chat(user(ask.ASK_NAME), session)).content;
});
await ask.feature(CHAT, "embeddings", "numbers", async () => {
  const reply = await client.embeddings.create({ model, input: ask.SUM });
  return `${reply.data[0].embedding.length} numbers`;
});

const respond = (fields) => client.responses.create({ model, ...fields });
await ask.feature(RESPONSES, "chat", "43", async () => (await respond({ input: ask.SUM })).output_text);
await ask.feature(RESPONSES, "stream", "43", async () => {
  return (await client.responses.stream({ model, input: ask.SUM }).finalResponse()).output_text;
});
await ask.feature(RESPONSES, "second turn", "Alice", async () => {
  const first = await respond({ input: ask.NAME });
  return (await respond({ input: ask.ASK_NAME, previous_response_id: first.id })).output_text;
});
await ask.feature(RESPONSES, "tools", ask.WEATHER_TOLD, async () => {
  const said = await respond({ input: ask.WEATHER, tools });
  const [call] = said.output;
  const output = getWeather(JSON.parse(call.arguments));
  const told = { type: "function_call_output", call_id: call.call_id, output };
  return (await respond({ input: [told], tools, previous_response_id: said.id })).output_text;
});
await ask.feature(RESPONSES, "streamed tools", "Oslo", async () => {
  const reply = await client.responses.stream({ model, input: ask.WEATHER, tools }).finalResponse();
  return reply.output[0].arguments;
});
await ask.feature(RESPONSES, "structured output", '{"sum":', async () => {
  const text = { format: zodTextFormat(Sum, "sum") };
  return JSON.stringify((await client.responses.parse({ model, input: ask.SUM, text })).output_parsed);
});
await ask.feature(RESPONSES, "thinking", "43", async () => {
  const reply = await respond({ input: ask.SUM, reasoning: { effort: "low" } });
  if (reply.output[0].type !== "reasoning") throw new Error(`no reasoning beside ${reply.output_text}`);
  return reply.output_text;
});
