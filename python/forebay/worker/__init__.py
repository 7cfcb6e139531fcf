"""The hand's process: the protocol's frames and the loop that handles them."""
