"""Time: what each resource needs at least, and what limits a launch."""
