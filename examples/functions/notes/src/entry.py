"""Retrieval: full-text search finds notes in D1, and the model answers a question from them.

curl localhost:8787/notes -d '{"text": "The spare key is under the blue pot."}'
curl 'localhost:8787/ask?q=Where+is+the+spare+key'
"""

import re
from urllib.parse import parse_qs, urlsplit

from workers import Response, WorkerEntrypoint

NUM_NOTES = 3
PROMPT = "Answer in one sentence, from these notes only:\n"


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path, query = urlsplit(request.url).path, parse_qs(urlsplit(request.url).query)
        if path == "/notes" and request.method == "POST":
            return Response.json(await self.keep((await request.json())["text"]), status=201)
        if path == "/ask" and "q" in query:
            return Response.json(await self.ask(query["q"][0]))
        return Response("POST /notes adds a note, GET /ask?q= answers a question", status=404)

    async def keep(self, text):
        await self.env.DB.exec("CREATE VIRTUAL TABLE IF NOT EXISTS notes USING fts5(text)")
        kept = await self.env.DB.prepare("INSERT INTO notes (text) VALUES (?)").bind(text).run()
        return {"id": kept.meta.last_row_id}

    async def ask(self, question):
        notes = await self.search(question)
        messages = [
            {"role": "system", "content": PROMPT + "\n".join(f"- {note}" for note in notes)},
            {"role": "user", "content": question},
        ]
        answer = await self.env.AI.run(self.env.MODEL, {"messages": messages, "max_tokens": 40})
        return {"answer": answer.response, "notes": notes}

    async def search(self, question):
        """Return the notes with any of the words, those with rare words first (bm25)."""
        words = re.findall(r"\w+", question)
        if not words:
            return []
        statement = self.env.DB.prepare("SELECT text FROM notes WHERE notes MATCH ? ORDER BY rank LIMIT ?")
        found = await statement.bind(" OR ".join(f'"{word}"' for word in words), NUM_NOTES).all()
        return [row.text for row in found.results]
