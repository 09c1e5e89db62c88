"""GPUs, memory and processes of this machine, read from NVML and /proc."""
