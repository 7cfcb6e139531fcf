"""Several ranks as one group, and the store through which they meet, which the brain provides."""
