"""From the run folders of an experiment to its table, its figures and its page."""
