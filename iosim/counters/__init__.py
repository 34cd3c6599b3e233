"""Real counters: reading what profilers and compilers wrote. Needs nothing but NumPy."""
