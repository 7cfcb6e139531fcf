"""The shape and the weights of a model, as the brain has read its files. Import the submodules directly."""
