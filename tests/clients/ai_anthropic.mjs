// Vercel's AI SDK over @ai-sdk/anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { checks } from "./ai_checks.mjs";
import * as harness from "./harness.mjs";

const provider = createAnthropic({ baseURL: harness.OPENAI_URL, apiKey: harness.KEY });
const names = { chat: harness.CHAT, endless: harness.ENDLESS, missing: "nope" };
const found = checks((name) => provider(name), undefined, names);
await harness.main("@ai-sdk/anthropic", { ...found, embeddings: "has none" });
