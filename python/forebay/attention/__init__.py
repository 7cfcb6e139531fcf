"""Attention over paged keys and values: one interface, with one implementation per device."""
