"""What eight gloo ranks run; the tests read what they found. See ``worker``."""
