// promptfoo, the npm package: its evaluations ask for decisions. A release without the provider `openai:decisions` uses its provider of HTTP requests.

import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { CHAT, KEY, OPENAI_URL, QUESTION, expect, main } from "./harness.mjs";

const PREDICATE = { type: "predicate", name: "asks", instructions: "The user asks a question." };
const CHOICE = {
  type: "choice", name: "code", instructions: "Which airport code?",
  choices: [{ value: "LIS", description: "Lisbon" }, { value: "OSL" }, { value: true }],
};
const SCORE = {
  type: "score", name: "heat", instructions: "How hot is it?",
  levels: [{ label: "cold" }, { label: "mild", description: "a coat is enough" }, { label: "hot" }],
};
const own = (model, questions) => ({
  id: `openai:decisions:${model}`, config: { apiBaseUrl: OPENAI_URL, apiKey: KEY, questions },
});
const http = (model, questions) => ({
  id: `${OPENAI_URL}/decisions`,
  config: {
    method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${KEY}` },
    body: { model, input: "{{text}}", questions }, validateStatus: "status === 200",
    transformResponse: "JSON.stringify({ answers: json.answers })",
  },
});
const CHECK_MS = 300_000;

const home = mkdtempSync(join(tmpdir(), "promptfoo-"));
mkdirSync(join(home, "work"));

/** Run the program in its own home directory; return its exit code and its output. */
async function run(...options) {
  const program = fileURLToPath(new URL("node_modules/.bin/promptfoo", import.meta.url));
  // This Node.js comes first: a distribution's may be older than the program accepts.
  const path = `${dirname(process.execPath)}:${process.env.PATH}`;
  const env = { PATH: path, HOME: home, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1" };
  const child = spawn(program, options, { cwd: join(home, "work"), env, stdio: ["ignore", "pipe", "pipe"] });
  let said = "";
  for (const output of [child.stdout, child.stderr]) output.on("data", (chunk) => (said += chunk));
  const code = await new Promise((resolve, reject) => child.on("exit", resolve).on("error", reject));
  return { code, said };
}

/** Run an evaluation of one prompt; return its result, its exit code and its output. The assertions see `answers`. */
async function evaluate(provider, ...assertions) {
  const [config, results] = ["promptfooconfig.json", "results.json"].map((name) => join(home, "work", name));
  const assert = assertions.map((what) => ({ type: "javascript", value: `((answers) => ${what})(JSON.parse(output).answers)` }));
  const tests = [{ vars: { text: QUESTION }, assert }];
  writeFileSync(config, JSON.stringify({ prompts: ["{{text}}"], providers: [provider], tests }));
  const { code, said } = await run("eval", "-c", config, "-o", results, "--no-cache");
  return { code, said, result: JSON.parse(readFileSync(results)).results.results[0] };
}

const hasOwn = !(await evaluate(own(CHAT, [PREDICATE]))).said.includes("Unknown OpenAI model type");
const provider = hasOwn ? own : http;

async function expectPassed(questions, ...assertions) {
  const { code, said, result } = await evaluate(provider(CHAT, questions), ...assertions);
  expect(code === 0 && result.success && result.gradingResult.componentResults.length === assertions.length, result.error ?? said);
}

const predicates = () => expectPassed([PREDICATE], "answers[0].name === 'asks' && answers[0].probability >= 0 && answers[0].probability <= 1");
const choices = () =>
  expectPassed(
    [PREDICATE, CHOICE, SCORE],
    "answers[1].probabilities.map(({ value }) => value).join() === 'LIS,OSL,true'",
    "['LIS', 'OSL', true].includes(answers[1].choice) && answers[1].confidence >= 0 && answers[1].confidence <= 1",
    "Math.abs(answers[1].probabilities.reduce((sum, { probability }) => sum + probability, 0) - 1) < 1e-6",
  );
const scores = () =>
  expectPassed(
    [SCORE],
    "answers[0].probabilities.map(({ label }) => label).join() === 'cold,mild,hot'",
    "Math.abs(answers[0].score - answers[0].probabilities.reduce((sum, { value, probability }) => sum + value * probability, 0)) < 1e-6",
  );

async function errors() {
  const unknown = await evaluate(provider("nope", [PREDICATE]));
  expect(unknown.code !== 0 && unknown.result.error?.includes("nope"), unknown.result);
  const single = await evaluate(provider(CHAT, [{ ...CHOICE, choices: CHOICE.choices.slice(0, 1) }]));
  expect(single.code !== 0 && single.result.error?.includes("choices"), single.result);
}

await main("promptfoo", { predicates, choices, scores, errors }, CHECK_MS);
