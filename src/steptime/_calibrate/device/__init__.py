"""What the GPU of this machine does under load: the power it draws, the clock it runs at."""
