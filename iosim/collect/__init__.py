"""Counters of this machine's GPU: what is run, how it is profiled, what is written down."""
