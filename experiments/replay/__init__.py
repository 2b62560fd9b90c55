"""The estimator bench: every estimator sees the same router scores, on any number of virtual ranks."""
