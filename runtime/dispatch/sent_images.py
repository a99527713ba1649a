"""The images that engine hosts already have: after it is sent once, an image is named by its digest.

A host that has dropped the image since reports so, and gets the sequence again with all files.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.protocol import Submit, TokenOutput

REMEMBERED = 4096  # number of remembered digests per host; an image that the host has dropped costs one more message


class SentImages:
    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[EngineClient, OrderedDict[bytes, None]] = WeakKeyDictionary()

    @asynccontextmanager
    async def generate(self, client: EngineClient, submit: Submit) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        """Open the scope of a sequence with images on a host, like the client's own `generate`."""
        async with AsyncExitStack() as scope:
            outputs = await scope.enter_async_context(client.generate(self._by_digests(client, submit)))
            yield self._outputs(client, submit, outputs, scope)

    async def _outputs(
        self, client: EngineClient, submit: Submit, outputs: AsyncIterator[TokenOutput], scope: AsyncExitStack
    ) -> AsyncIterator[TokenOutput]:
        try:
            async for output in outputs:
                yield output
        except EngineError as error:
            if error.code != "images_missing":
                raise
        else:
            return
        await scope.aclose()  # so that the id is free: by it, a request's other choices wait for the first one's prompt
        async for output in await scope.enter_async_context(client.generate(submit)):
            yield output

    def _by_digests(self, client: EngineClient, submit: Submit) -> Submit:
        """Return the sequence without the files that the host has, and record the others as sent."""
        sent = self._sent.setdefault(client, OrderedDict())
        images = tuple(replace(image, data=b"") if image.digest in sent else image for image in submit.images)
        for image in submit.images:
            sent[image.digest] = None
            sent.move_to_end(image.digest)
        while len(sent) > REMEMBERED:
            sent.popitem(last=False)
        return replace(submit, images=images)
