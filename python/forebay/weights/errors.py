"""The faults of a model, in words with advice for a user."""


class ModelError(ValueError):
    """A model that can't be found, read or run. The message is one line for the user."""


class UnsupportedModelError(ModelError):
    """A model is understood, and needs a feature that Forebay lacks."""
