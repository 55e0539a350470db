"""What the engine raises."""


class EngineError(Exception):
    """A model, batch or request that the engine cannot run; the text says what was found and what it needs."""
