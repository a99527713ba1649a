"""A model as a service binding: called like a function, by `fetch` or by its method `run`.

Declared in a manifest as `services = [{ binding = "EMBER", service = "@org/model" }]`.
"""

from typing import Any

import msgspec

from pilotlight.functions.bindings.ai import AI, MAX_INPUT_BYTES, Run
from pilotlight.functions.bindings.assets.asset_files import FetchCall
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Services, gathered, method
from pilotlight.functions.bindings.service_binding import RpcCall
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.frames import RESPONSE


class ModelService(Binding):
    kind = "service"

    def __init__(self, model: str, services: Services) -> None:
        self._model = model
        self._memory = services.memory
        self._ai = AI(services, None)

    @method
    async def fetch(self, request: FetchCall, body: Body | None) -> Any:
        """Run the model on the inputs in the JSON body.
        The response has the format of Workers AI's REST API, or is a stream of events."""
        sent = request.body
        if body is not None:
            with self._memory.hold() as held:
                sent = await gathered(body, MAX_INPUT_BYTES, _too_large, held)
        try:
            inputs = msgspec.json.decode(sent, type=dict[str, Any])
        except msgspec.DecodeError as error:
            text = f"{self._model} takes its inputs as a JSON object in the body of a POST: {error}"
            return {"status": 400, "headers": [("content-type", "text/plain; charset=utf-8")], "body": text.encode()}
        return await self._ai.run(Run(self._model, inputs, raw=True))

    @method
    async def rpc(self, request: RpcCall, body: Body | None) -> Any:
        """Call the model's only method, `run`; `body` (an RPC session) is ignored."""
        if request.name != "run":
            raise BindingError(
                f"a model has only the method run, not {request.name!r}", code="no_method", name="TypeError"
            )
        inputs = request.args[0] if request.args else request.kwargs.get("inputs", request.kwargs)
        if not isinstance(inputs, dict) or len(request.args) > 1:
            raise BindingError(f"run takes the inputs of {self._model} as one dict", name="TypeError")
        answer = await self._ai.run(Run(self._model, inputs))
        if isinstance(answer, StreamingReply):
            return StreamingReply({RESPONSE: answer.value}, answer.body)
        return msgspec.json.decode(answer["body"])

    async def close(self) -> None:
        await self._ai.close()


def _too_large(size: int) -> BindingError:
    return BindingError(f"the inputs have more than {MAX_INPUT_BYTES} bytes", status=413)
