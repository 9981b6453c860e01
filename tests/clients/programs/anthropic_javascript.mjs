import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import * as ask from "./report.mjs";

const client = new Anthropic({ baseURL: ask.BASE_URL, apiKey: ask.API_KEY, maxRetries: 0 });
const API = "Messages";
const user = (content) => [{ role: "user", content }];
const head = { model: ask.MODEL, max_tokens: 2048 };
const about = { name: "get_weather", description: ask.WEATHER_ABOUT };
const tools = [{ ...about, input_schema: ask.WEATHER_SCHEMA }];
const getWeather = ({ city }) => (city === "Oslo" ? ask.WEATHER_RESULT : `no city ${city}`);
const say = async (messages, fields = {}) => (await client.messages.create({ ...head, messages, ...fields })).content;

await ask.feature(API, "chat", "43", async () => (await say(user(ask.SUM)))[0].text);
await ask.feature(API, "stream", "43", () => client.messages.stream({ ...head, messages: user(ask.SUM) }).finalText());
await ask.feature(API, "second turn", "Alice", async () => {
  const said = { role: "assistant", content: await say(user(ask.NAME)) };
  return (await say([...user(ask.NAME), said, ...user(ask.ASK_NAME)]))[0].text;
});
await ask.feature(API, "tools", ask.WEATHER_TOLD, async () => {
  const content = await say(user(ask.WEATHER), { tools });
  const [call] = content;
  const told = { type: "tool_result", tool_use_id: call.id, content: getWeather(call.input) };
  return (await say([...user(ask.WEATHER), { role: "assistant", content }, ...user([told])], { tools }))[0].text;
});
await ask.feature(API, "streamed tools", "Oslo", async () => {
  const stream = client.messages.stream({ ...head, messages: user(ask.WEATHER), tools });
  return JSON.stringify((await stream.finalMessage()).content[0].input);
});
await ask.feature(API, "tool runner", ask.WEATHER_TOLD, async () => {
  const runnable = betaTool({ ...about, inputSchema: ask.WEATHER_SCHEMA, run: getWeather });
  const runner = client.beta.messages.toolRunner({ ...head, messages: user(ask.WEATHER), tools: [runnable] });
  return (await runner).content[0].text;
});
await ask.feature(API, "thread", "Alice", async () => {
  const thread = client.beta.messages.thread({ ...head });
  await thread.send(...user(ask.NAME));
  return (await thread.send(...user(ask.ASK_NAME))).content[0].text;
});
await ask.feature(API, "structured output", '{"sum":', async () => {
  const format = zodOutputFormat(z.object({ sum: z.int().max(99) }));
  const reply = await client.messages.parse({ ...head, messages: user(ask.SUM), output_config: { format } });
  return JSON.stringify(reply.parsed_output);
});
await ask.feature(API, "thinking", "43", async () => {
  const [thought, said] = await say(user(ask.SUM), { thinking: { type: "enabled", budget_tokens: 1024 } });
  if (!thought.thinking) throw new Error("no thought");
  return said.text;
});
await ask.feature(API, "count tokens", "tokens", async () => {
  return `${(await client.messages.countTokens({ model: ask.MODEL, messages: user(ask.SUM) })).input_tokens} tokens`;
});
await ask.feature(API, "session", "Alice", async () => {
  const session = { session_id: crypto.randomUUID() };
  await say(user(ask.NAME), session);
  return (await say(user(ask.ASK_NAME), session))[0].text;
});
