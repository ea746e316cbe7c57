"""What a workload runs on: devices with their fitted models; hosts and fabrics follow."""

from steptime.platforms.device import Device, KernelEstimate

__all__ = ["Device", "KernelEstimate"]
