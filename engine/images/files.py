"""The files of images that were sent lately, so that a sequence may name one without sending it again."""

from collections import OrderedDict

MOST_BYTES = 128 << 20


class ImageFiles:
    def __init__(self) -> None:
        self._files: OrderedDict[bytes, bytes] = OrderedDict()  # by name, the one named last at the end
        self._num_bytes = 0

    def found(self, name: bytes, data: bytes) -> bytes | None:
        """Return an image's file, sent now or kept from before; None if it is not here."""
        if not data:
            if name in self._files:
                self._files.move_to_end(name)
            return self._files.get(name)
        if name not in self._files:
            self._files[name] = data
            self._num_bytes += len(data)
        self._files.move_to_end(name)
        while self._num_bytes > MOST_BYTES:
            _, dropped = self._files.popitem(last=False)
            self._num_bytes -= len(dropped)
        return data
