"""Outposts that a cluster's scheduler places and starts."""
