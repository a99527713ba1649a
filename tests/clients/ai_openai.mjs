// Vercel's AI SDK over @ai-sdk/openai as it is by default: the Responses API.

import { createOpenAI } from "@ai-sdk/openai";
import { checks } from "./ai_checks.mjs";
import * as harness from "./harness.mjs";

const provider = createOpenAI({ baseURL: harness.OPENAI_URL, apiKey: harness.KEY });
const names = { chat: harness.CHAT, vectors: harness.VECTORS, endless: harness.ENDLESS, missing: "nope" };
await harness.main("@ai-sdk/openai", checks((name) => provider(name), (name) => provider.embeddingModel(name), names));
