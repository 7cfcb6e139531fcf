"""Finding, downloading and reading models.

Import the submodules directly: this package imports nothing, because `forebay.weights.describe` has to start fast.
"""
