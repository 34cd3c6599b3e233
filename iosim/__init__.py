"""A memory-hierarchy simulator for IO-aware attention kernels on GPUs and TPUs."""

__version__ = "0.1.0"
