"""What is on paper: the limits of devices, each number with its source."""

from steptime._hardware.device import DeviceLimits, Quantity, device_names, read_device

__all__ = ["DeviceLimits", "Quantity", "device_names", "read_device"]
