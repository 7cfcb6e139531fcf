"""The state that lasts from step to step: the configuration, the slot tables, the pages of keys and values."""
