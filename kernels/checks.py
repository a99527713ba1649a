"""What an operation says when it is called with something that it cannot compute with."""


class ArgumentError(ValueError):
    """Names the operation and the argument, and says what is wrong with it."""

    def __init__(self, operation: str, argument: str, why: str) -> None:
        super().__init__(f"{operation}: {argument} {why}")
        self.operation = operation
        self.argument = argument
