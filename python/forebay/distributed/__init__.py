"""Several ranks as one: the group that they are, and the meeting point that the brain gives them."""
