"""What is on paper: the limits of devices and fabrics, each number with its source."""
