"""Several ranks as one: their group, and the meeting point that the brain gives them."""
