"""The memory hierarchy: layout of tensors, caches, partitions, DRAM, and software-managed VMEM."""
