// cloudflare, the npm package: ai.run and ai.models.

import Cloudflare from "cloudflare";
import * as harness from "./harness.mjs";
import { ANSWER, QUESTION, expect } from "./harness.mjs";

const client = new Cloudflare({ apiToken: harness.KEY, baseURL: harness.CLOUDFLARE_URL, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const run = (inputs, model = "@pilotlight/ember") => client.ai.run(model, { account_id: "account", ...inputs });

async function chat() {
  expect((await run({ messages })).response.includes(ANSWER), "messages");
  let listed = 0;
  for await (const _ of client.ai.models.list({ account_id: "account", per_page: 1 })) listed += 1;
  expect(listed === 5, listed);
  const tasks = [];
  for await (const task of client.ai.tasks.list({ account_id: "account" })) tasks.push(task.name);
  expect(tasks.join() === "Text Generation,Text Embeddings,Text Classification", tasks);
  const schema = await client.ai.models.schema.get({ account_id: "account", model: "@pilotlight/ember" });
  expect(schema.input && schema.output, schema);
  expect((await client.user.tokens.verify()).status === "active", "tokens");
}

async function stream() {
  const answer = await run({ messages, stream: true }).asResponse();
  const events = (await answer.text()).split("\n\n").filter(Boolean).map((event) => event.replace("data: ", ""));
  expect(events.pop() === "[DONE]", events);
  expect(events.map((event) => JSON.parse(event).response).join("").includes(ANSWER), events);
}

async function tools() {
  const user = { role: "user", content: harness.WEATHER_QUESTION };
  for (const tool of [harness.FUNCTION, harness.TOOL]) {
    const { tool_calls: [call] } = await run({ messages: [user], tools: [tool] });
    harness.expectWeather(call.arguments);
    const called = { role: "assistant", content: JSON.stringify(call) };
    const told = { role: "tool", content: JSON.stringify(harness.WEATHER_RESULT) };
    expect((await run({ messages: [user, called, told], tools: [tool] })).response, "the second turn");
  }
}

async function forcedTool() {
  for (const tool_choice of ["required", "any"]) {
    const { tool_calls: [call] } = await run({ messages, tools: [harness.TOOL], tool_choice });
    harness.expectWeather(call.arguments);
  }
}

async function strictTool() {
  const { tool_calls: [call] } = await run({ messages, tools: [harness.STRICT_TOOL], tool_choice: "required" });
  harness.expectWeather(call.arguments);
}

async function structured() {
  const { response } = await run({ messages, response_format: { type: "json_schema", json_schema: harness.BOUNDED_WEATHER } });
  expect(typeof response === "object", response);
  harness.expectWeather(response);
}

async function embeddings() {
  const { data } = await run({ text: ["one", "two"] }, "@test/vectors");
  expect(data.every((vector) => vector.length === harness.VECTOR_SIZE), data.length);
}

async function errors() {
  const isBad = (error) => error instanceof Cloudflare.BadRequestError;
  await harness.expectRaised(() => run({ messages }, "@test/nope"), (error) => isBad(error) && error.message.includes("nope"));
  await harness.expectRaised(() => run({ messages, temperature: 9 }), isBad);
  await harness.expectRaised(() => run({ prompt: harness.TOO_LONG }), (error) => error.status === 413);
}

async function cancel() {
  const leaving = new AbortController();
  const inputs = { account_id: "account", messages, stream: true };
  const answer = await client.ai.run("@test/endless", inputs, { signal: leaving.signal }).asResponse();
  await answer.body.getReader().read();
  await harness.expectRunning();
  leaving.abort();
  await harness.expectIdle();
}

await harness.main("cloudflare", {
  chat, stream, tools, "forced tool": forcedTool, "strict tool": strictTool, structured, embeddings, errors, cancel,
});
