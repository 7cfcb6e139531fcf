"""Measurements on a GPU: limits of the card, operators, a hand's steps, a server, and peers beside it."""
