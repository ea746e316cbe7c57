"""What a workload runs on: devices, hosts and fabrics with their fitted models, and the three under one name."""

from steptime._platforms.device import Device, KernelEstimate
from steptime._platforms.fabric import Fabric
from steptime._platforms.platform import Platform

__all__ = ["Device", "Fabric", "KernelEstimate", "Platform"]
