"""The errors of models. Their texts give advice to the user."""


class ModelError(ValueError):
    """A model that can't be found, read or run. The message is one line for the user."""


class UnsupportedModelError(ModelError):
    """A model is understood, but needs a feature that Forebay lacks."""
