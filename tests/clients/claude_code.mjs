// Claude Code, the npm package @anthropic-ai/claude-code.

import { mkdirSync } from "node:fs";
import { join } from "node:path";
import * as agents from "./agents.mjs";
import { KEY, main } from "./harness.mjs";

const home = agents.newHome();
mkdirSync(join(home, "work"));
const proxy = await agents.recordingProxy();
const environment = {
  ANTHROPIC_BASE_URL: proxy.url, ANTHROPIC_API_KEY: KEY, CLAUDE_CONFIG_DIR: join(home, ".claude"), DISABLE_AUTOUPDATER: "1",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

const ask = (...further) => agents.run("claude", ["-p", "--model", agents.MODEL, ...further], home, environment);

async function first() {
  agents.expectTurn(await ask("Say hello."), proxy, "/v1/messages", 1);
}

async function further() {
  for (let turn = 2; turn <= agents.TURNS; turn += 1)
    agents.expectTurn(await ask("--continue", "Go on."), proxy, "/v1/messages", turn);
}

await main("@anthropic-ai/claude-code", { "a first turn": first, "further turns": further }, agents.CHECK_MS);
