// A streamed chat request, as events: the same bytes that any client gets.

export async function* chat(body, key, signal, site = "") {
  const headers = { "content-type": "application/json" };
  if (site) headers.prefer = `site=${site}`;
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) {
    const text = await answer.text();
    let reason = text;
    try { reason = JSON.parse(text).error.message; } catch { /* not ours: shown as it came */ }
    throw new Error(`${answer.status}: ${reason}`);
  }
  yield { site: answer.headers.get("x-pilotlight-site"), route: answer.headers.get("x-pilotlight-route") };
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const python = (value, depth = 1) => {
  const pad = "    ".repeat(depth), end = "    ".repeat(depth - 1);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => pad + python(one, depth + 1)).join(",\n")},\n${end}]` : "[]";
  if (typeof value === "object") return `{\n${Object.entries(value).map(([name, one]) => `${pad}${JSON.stringify(name)}: ${python(one, depth + 1)}`).join(",\n")},\n${end}}`;
  return JSON.stringify(value);
};

// What does the same elsewhere. The key is named, never written out.
export function copies(body, base) {
  const json = JSON.stringify(body, null, 2);
  return {
    curl: `curl -N ${base}v1/chat/completions \\\n  -H "authorization: Bearer $PILOTLIGHT_KEY" -H "content-type: application/json" \\\n  -d '${json.replaceAll("'", "'\\''")}'`,
    Python: `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=os.environ.get("PILOTLIGHT_KEY", "none"))\nstream = client.chat.completions.create(**${python(body)})\nfor event in stream:\n    if event.choices:\n        print(event.choices[0].delta.content or "", end="", flush=True)\n`,
    JavaScript: `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${JSON.stringify(`${base}v1`)}, apiKey: process.env.PILOTLIGHT_KEY ?? "none" });\nconst stream = await client.chat.completions.create(${json});\nfor await (const event of stream) process.stdout.write(event.choices[0]?.delta?.content ?? "");\n`,
  };
}
