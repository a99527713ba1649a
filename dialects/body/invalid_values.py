"""An invalid value of a body, before its position in the body is known."""

import msgspec


class ValidationError(msgspec.ValidationError):
    """An unusable value.

    The message omits its place in the body; `word` is an error word of wire/errors.py."""

    def __init__(self, sentence: str, word: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.word = word


def unsupported(sentence: str) -> ValidationError:
    return ValidationError(sentence, "unsupported_parameter")
