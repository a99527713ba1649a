// The Codex CLI, the npm package @openai/codex.

import { mkdirSync } from "node:fs";
import { join } from "node:path";
import * as agents from "./agents.mjs";
import { KEY, main } from "./harness.mjs";

const home = agents.newHome();
mkdirSync(join(home, "work"));
mkdirSync(join(home, ".codex"));
const proxy = await agents.recordingProxy();
const provider = `model_providers.here={name="here", base_url="${proxy.url}/v1", wire_api="responses", env_key="HERE_KEY"}`;
const options = ["--skip-git-repo-check", "-c", provider, "-c", 'model_provider="here"', "-c", `model="${agents.MODEL}"`];

const exec = (...further) =>
  agents.run("codex", ["exec", ...further], home, { CODEX_HOME: join(home, ".codex"), HERE_KEY: KEY });

async function first() {
  agents.expectTurn(await exec(...options, "Say hello."), proxy, "/v1/responses", 1);
}

async function further() {
  for (let turn = 2; turn <= agents.TURNS; turn += 1)
    agents.expectTurn(await exec("resume", "--last", ...options, "Go on."), proxy, "/v1/responses", turn);
}

await main("@openai/codex", { "a first turn": first, "further turns": further }, agents.CHECK_MS);
