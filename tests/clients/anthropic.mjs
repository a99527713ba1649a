// @anthropic-ai/sdk, the npm package.

import Anthropic, { BadRequestError, NotFoundError } from "@anthropic-ai/sdk";
import * as harness from "./harness.mjs";
import { ANSWER, CHAT, QUESTION, expect } from "./harness.mjs";

const client = new Anthropic({ baseURL: harness.ROUTER, apiKey: harness.KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const weather = [{ role: "user", content: harness.WEATHER_QUESTION }];
const TOOL = { name: "get_weather", description: harness.FUNCTION.description, input_schema: harness.WEATHER };
const asked = (options) => ({ model: CHAT, max_tokens: 300, messages, ...options });
const ask = (options) => client.messages.create(asked(options));
const calls = (answer) => answer.content.filter((block) => block.type === "tool_use");

async function chat() {
  const answer = await ask({});
  expect(answer.content[0].text.includes(ANSWER) && answer.stop_reason === "end_turn", answer);
  const counted = await client.messages.countTokens({ model: CHAT, messages });
  expect(counted.input_tokens === answer.usage.input_tokens + answer.usage.cache_read_input_tokens, [counted, answer.usage]);
}

async function stream() {
  let text = "";
  const running = client.messages.stream(asked({})).on("text", (piece) => (text += piece));
  const final = await running.finalMessage();
  expect(text.includes(ANSWER) && final.content[0].text === text && final.usage.output_tokens > 3, final);
}

async function tools() {
  const first = await client.messages.stream(asked({ messages: weather, tools: [TOOL] })).finalMessage();
  const [call] = calls(first);
  harness.expectWeather(call.input);
  const result = { type: "tool_result", tool_use_id: call.id, content: JSON.stringify(harness.WEATHER_RESULT) };
  const said = [...weather, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const final = await ask({ messages: said, tools: [TOOL] });
  expect(final.content[0].text.includes("18"), final);
}

async function forced(tool) {
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "get_weather" }])
    harness.expectWeather(calls(await ask({ tools: [tool], tool_choice }))[0].input);
}

async function structured() {
  const schema = {
    type: "object", properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 150 } },
    required: ["name", "age"], additionalProperties: false,
  };
  const person = [{ role: "user", content: harness.PERSON_QUESTION }];
  const answer = await ask({ messages: person, output_config: { format: { type: "json_schema", schema } } });
  harness.expectPerson(JSON.parse(answer.content[0].text));
}

async function errors() {
  await harness.expectRaised(() => ask({ model: "nope" }), (error) => error instanceof NotFoundError && error.message.includes("nope"));
  const long = [{ role: "user", content: harness.TOO_LONG }];
  const isTooLong = (error) => error instanceof BadRequestError && error.error.error.type === "invalid_request_error";
  await harness.expectRaised(() => ask({ messages: long }), isTooLong);
}

async function cancel() {
  for await (const _ of await ask({ model: harness.ENDLESS, max_tokens: 100_000, stream: true })) {
    await harness.expectRunning();
    break;
  }
  await harness.expectIdle();
}

await harness.main("@anthropic-ai/sdk", {
  chat, stream, tools, "forced tool": () => forced(TOOL), "strict tool": () => forced({ ...TOOL, strict: true }), structured,
  embeddings: "has none", errors, cancel,
});
