"""The step protocol: frames, plans and results as bytes. `docs/protocol.md` is the specification."""
