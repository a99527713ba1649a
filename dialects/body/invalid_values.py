"""An invalid value of a body, before its position in the body is known."""

import msgspec


class ValidationError(msgspec.ValidationError):
    """An invalid value.

    The message does not name its position in the body; `word` is an error code of wire/errors.py.
    `where` is the path of an invalid part of the value, such as `[1].file.file_data`."""

    def __init__(self, sentence: str, word: str = "invalid_request", where: str = "") -> None:
        super().__init__(sentence)
        self.word = word
        self.where = where


def unsupported(sentence: str) -> ValidationError:
    return ValidationError(sentence, "unsupported_parameter")
