// What the Node.js clients' programs share, as harness.py has it for those in Python: `node openai.mjs FILE` writes to FILE what it found.

import { readFileSync, writeFileSync } from "node:fs";

export const ROUTER = process.env.PILOTLIGHT_ROUTER;
export const SITE = process.env.PILOTLIGHT_SITE; // whose /status tells whether an answer is still computed
export const OPENAI_URL = `${ROUTER}/v1`;
export const CLOUDFLARE_URL = `${ROUTER}/client/v4`;
export const KEY = "any-key";
export const CHAT = "ember", VECTORS = "vectors", ENDLESS = "endless"; // the last one never ends an answer
export const VECTOR_SIZE = Number(process.env.PILOTLIGHT_VECTOR_SIZE);
export const QUESTION = "What is the airport code of Lisbon?", ANSWER = "LIS";
export const WEATHER_QUESTION = "What is the weather in Paris?";
export const WEATHER = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};
// A small model might go on and on.
export const BOUNDED_WEATHER = { ...WEATHER, properties: { city: { type: "string", maxLength: 20 } } };
export const FUNCTION = { name: "get_weather", description: "Get the weather of a city", parameters: WEATHER };
export const TOOL = { type: "function", function: FUNCTION };
export const STRICT_TOOL = { type: "function", function: { ...FUNCTION, strict: true } };
export const WEATHER_RESULT = { temperature: 18, sky: "clear" };
export const PERSON_QUESTION = "Nora is 31 years old. Who is she?";
export const TOO_LONG = "word ".repeat(6000); // Ember's context has 4,096 tokens
const CHECK_MS = 60_000, CANCEL_MS = 3_000;

/** `checks`: functions, or, where a client has no such thing, the reason why not. */
export async function main(name, checks) {
  const found = {};
  for (const [check, run] of Object.entries(checks))
    found[check] = typeof run === "string" ? { verdict: "none", reason: run } : await outcome(run);
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  writeFileSync(process.argv[2], JSON.stringify({ package: name, version, checks: found }));
  process.exit(0);
}

async function outcome(run) {
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error(`no end within ${CHECK_MS} ms`)), CHECK_MS).unref());
  try {
    await Promise.race([run(), late]);
    return { verdict: "works", reason: "" };
  } catch (error) {
    return { verdict: "fails", reason: `${error?.name}: ${error?.message} ${error?.responseBody ?? ""}`.slice(0, 2000) };
  }
}

export function expect(condition, what) {
  if (!condition) throw new Error(`not as expected: ${JSON.stringify(what)}`);
}

export async function expectRaised(call, isRight) {
  let value;
  try {
    value = await call();
  } catch (error) {
    expect(isRight(error), `${error?.name}: ${error?.message}`);
    return;
  }
  throw new Error(`nothing was raised, but returned: ${JSON.stringify(value)}`);
}

/** Arguments of the tool by its schema, whatever the city. */
export function expectWeather(values) {
  const parsed = typeof values === "string" ? JSON.parse(values) : values;
  expect(Object.keys(parsed).join() === "city" && typeof parsed.city === "string", parsed);
}

export function expectPerson(person) {
  expect(Object.keys(person).sort().join() === "age,name" && Number.isInteger(person.age), person);
}

async function running() {
  const { models } = await (await fetch(`${SITE}/status`)).json();
  return models.reduce((sum, model) => sum + model.running + model.waiting, 0);
}

export const expectRunning = () => until(async () => (await running()) > 0, 5_000, "the answer was never computed");
export const expectIdle = () =>
  until(async () => (await running()) === 0, CANCEL_MS, `the answer is still computed ${CANCEL_MS} ms after its client left`);

async function until(condition, withinMs, otherwise) {
  const deadline = Date.now() + withinMs;
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(otherwise);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
