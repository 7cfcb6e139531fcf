"""Attention over paged keys and values: one interface, one implementation a device."""
