"""Predicted beside measured: which run answers a counter row, and how far off it is."""
