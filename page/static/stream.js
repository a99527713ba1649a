// Requests of the playground, through the same API that other clients use.

async function send(path, body, key, { signal, site } = {}) {
  const headers = { "content-type": "application/json" };
  if (site) headers.prefer = `site=${site}`;
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  const text = await answer.text();
  let reason = text;
  try { reason = JSON.parse(text).error.message; } catch { /* not this API's error: show the text */ }
  throw new Error(`${answer.status}: ${reason}`);
}

export async function post(path, body, key) {
  const answer = await send(path, body, key);
  return { site: answer.headers.get("x-pilotlight-site"), told: await answer.json() };
}

export async function* chat(body, key, signal, site = "") {
  // Send a streamed request and yield its events.
  const answer = await send("v1/chat/completions", body, key, { signal, site });
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
