"""What kernels draw, and the clock at which a card that may draw no more runs them."""
