"""What a workload runs on: devices, hosts and fabrics with their fitted models, and the three under one name."""
