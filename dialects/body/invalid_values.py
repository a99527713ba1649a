"""What is wrong with a value of a body, before anybody has said where in the body it stands."""

import msgspec


class ValidationError(msgspec.ValidationError):
    """A value that cannot be used. The message says why, without its place in the body; `word` is one of wire/errors.py."""

    def __init__(self, sentence: str, word: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.word = word


def unsupported(sentence: str) -> ValidationError:
    return ValidationError(sentence, "unsupported_parameter")
