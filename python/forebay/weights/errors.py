"""The errors of models. Their messages contain advice for the user."""


class ModelError(ValueError):
    """A model can't be found, read or run. The message is one line for the user."""


class UnsupportedModelError(ModelError):
    """The model is understood, but needs a feature that Forebay lacks."""
