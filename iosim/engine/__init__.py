"""Blocks onto cores in time order, through the memory. Knows no kernel and no chip."""
