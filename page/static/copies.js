// A request as code for other clients. The code reads the key from the environment.

const python = (value, depth = 1) => {
  const pad = "    ".repeat(depth), end = "    ".repeat(depth - 1);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => pad + python(one, depth + 1)).join(",\n")},\n${end}]` : "[]";
  if (typeof value === "object") return `{\n${Object.entries(value).map(([name, one]) => `${pad}${JSON.stringify(name)}: ${python(one, depth + 1)}`).join(",\n")},\n${end}}`;
  return JSON.stringify(value);
};

// The function of each library for the request, and the code that prints the answer.
const CALLS = {
  "chat/completions": { py: "chat.completions.create", js: "chat.completions.create", lite: "completion" },
  embeddings: { py: "embeddings.create", js: "embeddings.create", lite: "embedding", options: { encoding_format: "float" } },
};
const PRINTED = {
  "chat/completions": {
    py: 'for event in answer:\n    if event.choices:\n        print(event.choices[0].delta.content or "", end="", flush=True)\n',
    js: 'for await (const event of answer) process.stdout.write(event.choices[0]?.delta?.content ?? "");\n',
  },
  embeddings: { py: "print(answer.data)\n", js: "console.log(answer.data);\n" },
};

export function copies(path, body, base) {
  // path: the part after /v1/.
  const json = JSON.stringify(body, null, 2), { model, ...rest } = body, call = CALLS[path];
  const printed = PRINTED[path] ?? { py: "print(answer)\n", js: "console.log(answer);\n" };
  const found = {
    curl: `curl -N ${base}v1/${path} \\\n  -H "authorization: Bearer $PILOTLIGHT_KEY" -H "content-type: application/json" \\\n  -d '${json.replaceAll("'", "'\\''")}'`,
    Python: `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=os.environ.get("PILOTLIGHT_KEY", "none"))\n` +
      `answer = ${call ? `client.${call.py}(**${python(body)})` : `client.post("/${path}", cast_to=object, body=${python(body)})`}\n${printed.py}`,
    JavaScript: `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${JSON.stringify(`${base}v1`)}, apiKey: process.env.PILOTLIGHT_KEY ?? "none" });\n` +
      `const answer = await ${call ? `client.${call.js}(${json})` : `client.post("/${path}", { body: ${json} })`};\n${printed.js}`,
  };
  if (call) {
    found.LiteLLM = `import os\n\nimport litellm\n\nanswer = litellm.${call.lite}(model=${JSON.stringify(`openai/${model}`)}, api_base=${JSON.stringify(`${base}v1`)}, api_key=os.environ.get("PILOTLIGHT_KEY", "none"), **${python({ ...rest, ...call.options })})\n${printed.py}`;
  }
  const inputs = ofFunction(path, rest);
  if (inputs) {
    found.Function = "from workers import Response, WorkerEntrypoint\n\n\nclass Default(WorkerEntrypoint):\n    async def fetch(self, request):\n" +
      `        answer = await self.env.AI.run(${JSON.stringify(model)}, ${python(inputs, 3)})\n        return ${inputs.stream ? 'Response(answer, headers={"content-type": "text/event-stream"})' : "Response.json(answer)"}\n`;
  }
  return found;
}

export const clients = (path) => Object.keys(copies(path, { model: "", documents: [] }, ""));

function ofFunction(path, { stream_options, logprobs, top_logprobs, ...rest }) {
  // The same inputs in Workers AI's form; null if it has none.
  if (path === "chat/completions") return rest;
  if (path === "embeddings") return { text: rest.input };
  return path === "rerank" ? { query: rest.query, contexts: rest.documents.map((text) => ({ text })) } : null;
}
