"""Outposts that a cluster's scheduler places, in place of people who start them."""
