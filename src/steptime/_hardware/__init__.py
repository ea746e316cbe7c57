"""What is on paper: the limits of devices, each number with its source."""

from steptime._hardware.description import Quantity
from steptime._hardware.device import DeviceLimits, device_names, read_device

__all__ = ["DeviceLimits", "Quantity", "device_names", "read_device"]
