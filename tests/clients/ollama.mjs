// ollama, the npm package.

import { Ollama } from "ollama";
import * as harness from "./harness.mjs";
import { ANSWER, CHAT, ENDLESS, QUESTION, ROUTER, expect, main } from "./harness.mjs";

const client = new Ollama({ host: ROUTER });
const user = { role: "user", content: QUESTION };

async function chat() {
  const { models } = await client.list();
  expect(models.some(({ model }) => model === CHAT), models);
  const answer = await client.chat({ model: CHAT, messages: [user] });
  expect(answer.message.content.includes(ANSWER) && answer.done_reason === "stop" && answer.eval_count > 0, answer);
  const made = await client.generate({ model: CHAT, prompt: QUESTION });
  expect(made.response.includes(ANSWER), made);
}

async function stream() {
  const pieces = [];
  for await (const piece of await client.chat({ model: CHAT, messages: [user], stream: true })) pieces.push(piece);
  expect(pieces.map(({ message }) => message.content).join("").includes(ANSWER) && pieces.at(-1).done, pieces);
}

async function tools() {
  const messages = [{ role: "user", content: harness.WEATHER_QUESTION }];
  const first = await client.chat({ model: CHAT, messages, tools: [harness.TOOL] });
  expect(first.message.tool_calls?.length === 1, first);
  harness.expectWeather(first.message.tool_calls[0].function.arguments);
  messages.push(first.message, { role: "tool", tool_name: "get_weather", content: JSON.stringify(harness.WEATHER_RESULT) });
  const final = await client.chat({ model: CHAT, messages, tools: [harness.TOOL] });
  expect(final.message.content.includes("18"), final);
}

async function structured() {
  const properties = { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 150 } };
  const format = { type: "object", properties, required: ["name", "age"], additionalProperties: false };
  const messages = [{ role: "user", content: harness.PERSON_QUESTION }];
  const answer = await client.chat({ model: CHAT, messages, format });
  harness.expectPerson(JSON.parse(answer.message.content));
}

async function embeddings() {
  const { embeddings: found } = await client.embed({ model: "vectors", input: ["one", "two"] });
  expect(found.length === 2 && found.every((vector) => vector.length === harness.VECTOR_SIZE), found.length);
}

async function errors() {
  await harness.expectRaised(() => client.chat({ model: "nope", messages: [user] }), (error) => error.message.includes("nope"));
  const options = { temperature: 9 };
  const asked = { model: CHAT, messages: [user], options };
  await harness.expectRaised(() => client.chat(asked), (error) => error.message.includes("temperature"));
}

async function cancel() {
  const answer = await client.chat({ model: ENDLESS, messages: [user], stream: true });
  const reading = answer[Symbol.asyncIterator]();
  for (let piece = 0; piece < 3; piece += 1) await reading.next();
  await harness.expectRunning();
  answer.abort();
  await harness.expectIdle();
}

const none = "its API has no tool_choice";
await main("ollama", {
  chat, stream, tools, "forced tool": none, "strict tool": none, structured, embeddings, errors, cancel,
});
