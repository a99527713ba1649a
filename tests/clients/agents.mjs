// Coding agents, which are programs and no libraries: each is run as its user would run it, in a home of its own, through a proxy that notes how
// every request was answered.

import { spawn } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { createServer, request } from "node:http";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { expect, ROUTER } from "./harness.mjs";

export const MODEL = "agent"; // a long context, random weights, and answers of a few tokens
export const TURNS = 5;
export const CHECK_MS = 300_000;

/** A proxy before the router. `answered` has each request's method, path and status, and what was said of one that was refused. */
export async function recordingProxy() {
  const answered = [];
  const server = createServer((asked, answer) => {
    const noted = { method: asked.method, path: asked.url, status: 0, said: "" };
    answered.push(noted);
    const to = new URL(asked.url, ROUTER);
    const passed = request(to, { method: asked.method, headers: { ...asked.headers, host: to.host } }, (got) => {
      noted.status = got.statusCode;
      if (noted.status >= 400) got.on("data", (chunk) => (noted.said += chunk));
      answer.writeHead(got.statusCode, got.headers);
      got.pipe(answer);
    });
    passed.on("error", () => answer.destroy());
    asked.pipe(passed);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, answered };
}

/** Run an agent's program in a folder of its own, and return its end; `home` is where it keeps what it remembers. */
export async function run(program, options, home, environment) {
  const bin = fileURLToPath(new URL(`node_modules/.bin/${program}`, import.meta.url));
  // This Node.js comes first: a distribution's may be older than a program accepts.
  const env = { PATH: `${dirname(process.execPath)}:${process.env.PATH}`, HOME: home, ...environment };
  const child = spawn(bin, options, { cwd: join(home, "work"), env, stdio: ["ignore", "pipe", "pipe"] });
  let said = "";
  for (const output of [child.stdout, child.stderr]) output.on("data", (chunk) => (said += chunk));
  const code = await new Promise((resolve, reject) => child.on("exit", resolve).on("error", reject));
  return { code, said };
}

export const newHome = () => mkdtempSync(join(tmpdir(), "agent-"));

/** The agent has ended well, and none of its requests was refused. */
export function expectTurn({ code, said }, proxy, path, least) {
  const refused = proxy.answered.filter(({ status }) => status !== 200);
  expect(refused.length === 0, refused.slice(0, 5));
  expect(code === 0, said.slice(-1500));
  const asked = proxy.answered.filter((one) => one.method === "POST" && one.path.split("?")[0] === path);
  expect(asked.length >= least, [asked.length, said.slice(-500)]);
}
