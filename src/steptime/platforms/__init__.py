"""What a workload runs on: devices, hosts and fabrics with their fitted models, and the three under one name."""

from steptime.platforms.device import Device, KernelEstimate
from steptime.platforms.fabric import Fabric
from steptime.platforms.platform import Platform

__all__ = ["Device", "Fabric", "KernelEstimate", "Platform"]
