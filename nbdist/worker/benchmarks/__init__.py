"""Short benchmarks of collectives, devices and disks."""
