"""The faults that a model can have, in words that tell a user what to do."""


class ModelError(ValueError):
    """A model that can't be found, read or run. The message is one line for the user."""


class UnsupportedModelError(ModelError):
    """A model that was understood, and needs something that Forebay doesn't have."""
