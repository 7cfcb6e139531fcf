"""Finding, downloading and reading models.

Import the submodules directly: this package imports nothing, because `forebay.weights.fetch` has to start fast.
"""
