"""Jobs: planned, started with their ranks, followed, and told of afterwards."""
