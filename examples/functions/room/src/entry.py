"""A chat room over WebSockets: one Durable Object per room.

It sends each message to everyone in the room, and the last messages to newcomers.

websocat 'ws://127.0.0.1:8787/lobby?name=Ada'
"""

import json
from urllib.parse import parse_qs, urlsplit

from js import WebSocketPair
from workers import DurableObject, Response, WorkerEntrypoint

SHOWN = 20  # earlier messages that a newcomer gets


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.headers.get("Upgrade") != "websocket":
            return Response("Connect with a WebSocket: ws://HOST/ROOM?name=YOU\n", status=426)
        room = urlsplit(request.url).path.strip("/") or "lobby"
        return await self.env.ROOMS.getByName(room).fetch(request)


class Room(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        ctx.storage.sql.exec("CREATE TABLE IF NOT EXISTS said (id INTEGER PRIMARY KEY, who TEXT, what TEXT)")

    async def fetch(self, request):
        who = parse_qs(urlsplit(request.url).query).get("name", ["somebody"])[0][:40]
        client, server = WebSocketPair.new().object_values()
        self.ctx.acceptWebSocket(server, [who])
        server.serializeAttachment({"who": who})
        last = self.ctx.storage.sql.exec("SELECT who, what FROM said ORDER BY id DESC LIMIT ?", SHOWN).toArray()
        for row in reversed(last):
            server.send(json.dumps({"who": row.who, "said": row.what}))
        self.tell({"joined": who, "here": len(self.ctx.getWebSockets())})
        return Response(None, status=101, web_socket=client)

    async def webSocketMessage(self, ws, message):
        who = ws.deserializeAttachment()["who"]
        self.ctx.storage.sql.exec("INSERT INTO said (who, what) VALUES (?, ?)", who, str(message))
        self.tell({"who": who, "said": str(message)})

    async def webSocketClose(self, ws, code, reason, was_clean):
        ws.close(code, reason)
        self.tell({"left": ws.deserializeAttachment()["who"], "here": len(self.ctx.getWebSockets())})

    def tell(self, event):
        for ws in self.ctx.getWebSockets():
            ws.send(json.dumps(event))
